from dataclasses import replace

import pytest

from cope_trl.data.forecasts import forecast_dataset, trajectory_messages
from cope_trl.errors import ConfigError, DataError
from cope_trl.forecast.prompts import NEXT_ACTION, plan_ahead
from cope_trl.types import TaskRef, Trajectory, Turn

STANDING = [{"role": "user", "content": "Be good."}, {"role": "assistant", "content": "OK."}]


def turn(action, observation="Nothing happens.", **fields):
    return Turn(0, 0, 1, f"Thought: hm\nAction: {action}", action, action, observation=observation, **fields)


EPISODE = Trajectory(
    task=TaskRef("house", "1"),
    prompt_ids=(1,),
    completion_ids=(2,),
    completion_mask=(1,),
    turns=(turn("go north", "A wall."), turn("dance", invalid=True), turn("take cup", "You win.")),
    success=True,
    first_observation="A room.",
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def test_an_episode_as_messages():
    assert trajectory_messages(EPISODE, STANDING) == [
        *STANDING,
        user("A room."),
        assistant("Thought: hm\nAction: go north"),
        user("A wall."),
        assistant("Thought: hm\nAction: dance"),
        user("Nothing happens."),
        assistant("Thought: hm\nAction: take cup"),
        user("You win."),
    ]
    assert STANDING[-1] == assistant("OK.")


def test_standing_messages_that_end_with_the_user_take_the_observation():
    assert trajectory_messages(EPISODE, [user("Be good.")])[:2] == [
        user("Be good.\n\nA room."),
        assistant("Thought: hm\nAction: go north"),
    ]
    rows = forecast_dataset([EPISODE], [user("Be good.")])
    assert rows[0]["prompt"] == [user("Be good.\n\nA room."), user(plan_ahead(3, "list"))]


def test_a_row_is_the_history_the_request_and_the_bare_actions():
    rows = forecast_dataset([EPISODE], STANDING, horizon=1)
    assert rows.column_names == ["prompt", "completion"]
    assert len(rows) == 3
    assert rows[0] == {
        "prompt": [*STANDING, user("A room."), user(plan_ahead(2, "list"))],
        "completion": [assistant("go north\ndance")],
    }
    assert rows[2]["prompt"][-3:] == [
        assistant("Thought: hm\nAction: dance"),
        user("Nothing happens."),
        user(plan_ahead(1, "list")),
    ]
    assert rows[2]["completion"] == [assistant("take cup")]


def test_an_action_a_reply():
    rows = forecast_dataset([replace(EPISODE, layout="turns")], STANDING, skip_invalid=True)
    assert rows[0]["prompt"][-1] == user(plan_ahead(2, "turns"))
    assert rows[0]["completion"] == [assistant("go north"), user(NEXT_ACTION), assistant("take cup")]


def test_merging_for_templates_that_refuse_two_user_turns():
    rows = forecast_dataset([EPISODE], STANDING, horizon=0, merge_user_turns=True)
    assert rows[1]["prompt"][-2:] == [
        assistant("Thought: hm\nAction: go north"),
        user("A wall.\n\n" + plan_ahead(1, "list")),
    ]


def test_only_successes_unless_asked():
    lost, broken = replace(EPISODE, success=False), replace(EPISODE, failed=True)
    assert len(forecast_dataset([EPISODE, lost, broken], STANDING)) == 3
    assert len(forecast_dataset([EPISODE, lost, broken], STANDING, successes_only=False)) == 6
    with pytest.raises(DataError, match="gave no forecast window"):
        forecast_dataset([lost, broken], STANDING)


def test_a_mapping_gives_each_environment_its_messages():
    other = replace(EPISODE, task=TaskRef("shop", "1"))
    rows = forecast_dataset([EPISODE, other], {"house": STANDING, "shop": []}, horizon=0)
    assert rows[0]["prompt"][0] == STANDING[0]
    assert rows[3]["prompt"][0] == user("A room.")
    by_task = forecast_dataset([EPISODE, other], lambda task: [] if task == other.task else STANDING, horizon=0)
    assert by_task.to_list() == rows.to_list()
    with pytest.raises(DataError, match="no entry for the environment 'shop'"):
        forecast_dataset([other], {"house": STANDING})


def test_the_draw_and_the_errors_are_those_of_the_windows():
    long = replace(EPISODE, turns=EPISODE.turns * 5)
    draws = [forecast_dataset([long, long], STANDING, max_windows=2, seed=seed).to_list() for seed in (0, 0, 1)]
    assert len(draws[0]) == 4
    assert draws[0] == draws[1] != draws[2]
    with pytest.raises(ConfigError, match="`horizon` is -1"):
        forecast_dataset([EPISODE], STANDING, horizon=-1)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["list", "turns"])
def test_the_sft_trainer_takes_the_rows_unchanged(tmp_path, tokenizer, layout):
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import SFTConfig, SFTTrainer

    rows = forecast_dataset([replace(EPISODE, layout=layout)], STANDING)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    trainer = SFTTrainer(
        model=Qwen2ForCausalLM(config),
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_steps=1,
            per_device_train_batch_size=3,
            assistant_only_loss=layout == "turns",
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            max_length=None,
        ),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    trained = {  # the line breaks around an end of turn are the template's own, trained or not
        tuple(turn.strip() for turn in tokenizer.decode(ids[labels != -100]).split("<|im_end|>") if turn.strip())
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    }
    plans = [("go north", "dance", "take cup"), ("dance", "take cup"), ("take cup",)]
    assert trained == {("\n".join(plan),) if layout == "list" else plan for plan in plans}  # no "Next action?"
    assert trainer.train().training_loss > 0
