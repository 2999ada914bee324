"""Rollouts that TRL drives itself: tools, environments, a rollout function, single turns."""

import logging
import math

import pytest
import torch
from datasets import Dataset
from driven import CLIMB, DONE, SLIDE, Stairs, Well, call, constant, driven_trainer, prompt_rows, roll_out
from support import CountEnv, ScriptedPolicy, count_rows, make_config, make_model, make_tokenizer
from trl import GRPOConfig, GRPOTrainer

from cope_trl.cope_trainer import CoPETrainer
from cope_trl.errors import ConfigError, RolloutError, TemplateError
from cope_trl.forecast.windows import forecast_windows

SCRIPTS = [[CLIMB, CLIMB, DONE], [SLIDE, CLIMB, CLIMB, DONE], [DONE], [CLIMB, DONE]]


def eq_5(model, trainer, group=4, horizon=2):
    """Eq. 5 by brute force over the batch's trajectories: one plain forward a window, assistant turns only."""
    total = 0.0
    played = trainer.trajectories
    for members in [played[i : i + group] for i in range(0, len(played), group)]:
        successes = [t for t in members if t.success]
        for trajectory in successes:
            values = []
            for window in forecast_windows(trajectory, horizon, skip_no_call=trajectory.skip_no_call):
                branch = trainer.chat.branch(window.targets, "turns")
                ids = torch.tensor([[*trajectory.ids[: window.history_end], *branch.ids]])
                log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1].double(), dim=-1)
                chosen = log_probs.gather(1, ids[0, 1:, None])[:, 0]
                values.append(
                    -chosen[torch.tensor([0] * window.history_end + list(branch.loss_mask)).bool()[1:]].mean()
                )
            total = total + torch.stack(values).mean() / len(successes)
    return total / (len(played) // group)


def forecast_loss(trainer):
    """λ·L_AF alone (λ is 1): advantages are zeroed."""
    buffer = roll_out(trainer)
    buffer["advantages"] = torch.zeros_like(buffer["advantages"])
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(trainer.model, buffer)


def unmasked_rollout(scripts_of_turns):
    """A rollout function that says fixed turns with observations between; with its mask, and without."""

    def build(with_mask, mask_change=0):
        def rollout(prompts, trainer):
            tokenizer = trainer.processing_class
            output = {"prompt_ids": [], "completion_ids": [], "logprobs": None, "env_mask": []}
            for number, prompt in enumerate(prompts):
                prompt_ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
                ids, mask = [], []
                turns = scripts_of_turns[number % len(scripts_of_turns)]
                for position, turn in enumerate(turns):
                    if position:
                        between = "\n<|im_start|>user\nYou see a door.<|im_end|>\n<|im_start|>assistant\n"
                        new = tokenizer(between)["input_ids"]
                        ids, mask = ids + new, mask + [0] * len(new)
                    new = tokenizer(turn + "<|im_end|>")["input_ids"]
                    ids, mask = ids + new, mask + [1] * len(new)
                output["prompt_ids"].append(prompt_ids)
                output["completion_ids"].append(ids)
                output["env_mask"].append(mask[: len(mask) + mask_change])
            if not with_mask:
                del output["env_mask"]
            return output

        return rollout

    return build


TALKS = unmasked_rollout([["look", "open the door"], ["wait"], ["look", "look", "go"], ["sleep"]])


# ---------------------------------------------------------------- environments and tools


def test_an_environments_episodes_are_read_off_the_mask(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cope_trl")
    trainer = driven_trainer(tmp_path, SCRIPTS, environment_factory=Stairs)
    buffer = roll_out(trainer)
    won, detour = trainer.trajectories[:2]
    assert [t.success for t in trainer.trajectories] == [True, True, False, False]
    assert [t.score for t in trainer.trajectories] == [0.5, 0.5, 0.0, 0.0]
    for trajectory, script in zip(trainer.trajectories, SCRIPTS, strict=True):
        assert [turn.reply for turn in trajectory.turns] == script
        for turn in trajectory.turns:
            text = trainer._tokenizer.decode(trajectory.ids[turn.start : turn.end])
            assert text == turn.reply + "<|im_end|>"
            before = trainer._tokenizer.decode(trajectory.ids[: turn.history_end])
            after = trainer._tokenizer.decode(trajectory.ids[turn.history_end : turn.start])
            assert before.endswith("<|im_end|>\n")
            assert after == "<|im_start|>assistant\n"
        assert sum(trajectory.completion_mask) == sum(turn.end - turn.start for turn in trajectory.turns)
    call_text = CLIMB.removeprefix("Up. ")
    assert [turn.target for turn in won.turns] == [call_text, call_text, DONE]
    assert [turn.is_call for turn in detour.turns] == [True, True, True, False]
    assert [turn.observation for turn in detour.turns] == [
        "{'error': 'the banister is broken'}",
        "You are on floor 1.",
        "You are on floor 2.",
        "",
    ]
    assert won.task.environment == "Stairs"
    assert torch.equal(buffer["tool_mask"][0, : len(won.completion_mask)], torch.tensor(won.completion_mask))
    assert "the attribute `success` of Stairs" in caplog.text
    assert "nothing to look ahead" not in caplog.text


@pytest.mark.parametrize("engine", ["shared_prefix", "separate"])
def test_the_loss_is_eq_5_on_the_calls(tmp_path, engine):
    trainer = driven_trainer(
        tmp_path,
        SCRIPTS,
        environment_factory=Stairs,
        forecast_coef=1.0,
        forecast_engine=engine,
        gradient_checkpointing=False,
    )
    loss = forecast_loss(trainer)
    expected = eq_5(make_model(), trainer)
    assert float(expected) > 1
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)


def test_a_window_without_any_call_is_dropped(tmp_path):
    trainer = driven_trainer(tmp_path, SCRIPTS, environment_factory=Stairs)
    buffer = roll_out(trainer)
    # Three turns, three windows (two calls and the message, one call and the message, the message alone).
    assert buffer["forecast_window"][0].max() == 1
    assert buffer["forecast_window"][1].max() == 2
    assert (buffer["forecast_window"][2:] == -1).all()


def test_an_error_repaired_later_is_without_effect(tmp_path):
    broken = call("climb", floors=1)  # no such argument
    trainer = driven_trainer(
        tmp_path, [[broken, CLIMB, CLIMB, DONE], [SLIDE, CLIMB, DONE]], environment_factory=Stairs
    )
    roll_out(trainer)
    assert [turn.invalid for turn in trainer.trajectories[0].turns] == [True, False, False, False]
    assert [turn.invalid for turn in trainer.trajectories[1].turns] == [False, False, False]


def test_only_the_first_of_several_calls_is_forecast(tmp_path):
    twice = CLIMB + "\n" + CLIMB.removeprefix("Up. ")
    trainer = driven_trainer(tmp_path, [[twice, DONE]], environment_factory=Stairs)
    roll_out(trainer)
    first, last = trainer.trajectories[0].turns
    assert first.target == CLIMB.removeprefix("Up. ")
    assert first.details == {"num_calls": 2}
    assert first.observation == "You are on floor 1."
    assert trainer.trajectories[0].success  # both were executed
    assert last.target == DONE


def test_a_call_nobody_executed_is_no_action(tmp_path):
    trainer = driven_trainer(tmp_path, [[CLIMB]], environment_factory=Stairs, max_tool_calling_iterations=2)
    roll_out(trainer)
    assert [bool(turn.action) for turn in trainer.trajectories[0].turns] == [True, True, False]


def test_several_environments(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cope_trl")
    rows = Dataset.from_list(
        [*prompt_rows(2, environment="up"), *prompt_rows(1, environment="down")],
    )
    dig = call("dig")
    scripts = [[CLIMB, CLIMB, DONE], [DONE], [DONE], [DONE], [dig, DONE], [dig, dig, DONE], [CLIMB, DONE], [DONE]]
    trainer = driven_trainer(
        tmp_path,
        scripts,
        rows,
        environment_factory={"up": Stairs, "down": Well},
        per_device_train_batch_size=8,
        forecast_coef=1.0,
        gradient_checkpointing=False,
    )
    loss = forecast_loss(trainer)
    assert [t.success for t in trainer.trajectories] == [True, *[False] * 3, True, False, True, False]
    assert [t.task.environment for t in trainer.trajectories] == ["up"] * 4 + ["down"] * 4
    assert float(loss) == pytest.approx(float(eq_5(make_model(), trainer)), rel=1e-5)
    assert "the attribute `success` of Stairs" in caplog.text
    assert "total reward >= 1 (`success_threshold`)" in caplog.text


def test_tools_without_an_environment(tmp_path):
    def double(number: int) -> int:
        """Double a number.

        Args:
            number: any number.
        """
        return 2 * number

    def right(completions, **_):
        return [float(completion[-1]["content"].strip() == "42") for completion in completions]

    scripts = [[call("double", number=21), "42"], ["41"], [call("double", number=1), "2"], [call("halve"), "42"]]
    trainer = driven_trainer(tmp_path, scripts, tools=[double], reward_funcs=right)
    roll_out(trainer)
    assert [t.success for t in trainer.trajectories] == [True, False, False, True]
    assert trainer.trajectories[0].turns[0].observation == "42"
    assert "not found" in trainer.trajectories[3].turns[0].observation


def test_a_training_run_with_an_environment(tmp_path):
    trainer = driven_trainer(tmp_path, SCRIPTS, environment_factory=Stairs, max_steps=2, forecast_coef=0.1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["episode/success"] == 0.5
    assert logged["forecast/windows"] == 5
    assert logged["forecast/loss"] > 0
    assert logged["time/rollout"] > 0
    assert logged["tools/call_frequency"] == 6 / 4
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    assert list((tmp_path / "trajectories").glob("*.parquet"))


def test_without_forecasting_it_is_grpo_bit_for_bit(tmp_path):
    class Plain(GRPOTrainer):
        scripts, end = SCRIPTS, "<|im_end|>"

        def _generate_and_score_completions(self, inputs):
            end = self._tokenizer.convert_tokens_to_ids(self.end)
            self.script = ScriptedPolicy(self._tokenizer, SCRIPTS, end)
            return super()._generate_and_score_completions(inputs)

        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return [reply.ids for reply in self.script(prompt_ids, 10_000)], None

    settings = {"forecast_coef": 0.0, "max_steps": 2, "save_trajectories": False}
    ours = driven_trainer(tmp_path, SCRIPTS, environment_factory=Stairs, **settings)
    ours.train()
    plain = Plain(
        make_model(),
        args=make_config(tmp_path, **settings),
        train_dataset=prompt_rows(2),
        processing_class=make_tokenizer(),
        environment_factory=Stairs,
    )
    plain.train()
    for (name, a), b in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_completion_that_ends_in_the_environments_words_is_not_branched_off_where_it_is_hidden(tmp_path):
    """TRL takes it for truncated, since its last token is no end of turn."""
    plain = TALKS(True)

    def rollout(prompts, trainer):
        output = plain(prompts, trainer)
        for ids, mask in zip(output["completion_ids"], output["env_mask"], strict=True):
            ids.append(5)
            mask.append(0)
        return output

    settings = {"rollout_func": rollout, "reward_funcs": constant(1.0)}
    shown = roll_out(driven_trainer(tmp_path, [[DONE]], **settings))
    hidden = roll_out(driven_trainer(tmp_path, [[DONE]], mask_truncated_completions=True, **settings))
    assert (shown["forecast_window"] >= 0).any(dim=1).all()
    assert (hidden["forecast_window"] == -1).all()


def test_an_adapter_learns_from_forecasts_of_calls(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = driven_trainer(
        tmp_path,
        [[CLIMB, CLIMB, DONE]],
        environment_factory=Stairs,
        peft_config=config,
        forecast_coef=1.0,
        gradient_checkpointing=False,
    )
    forecast_loss(trainer).backward()
    norms = {name: float(p.grad.norm()) for name, p in trainer.model.named_parameters() if p.grad is not None}
    assert norms
    assert all("lora_" in name for name in norms)
    assert sum(norms.values()) > 0


# ---------------------------------------------------------------- the success rule


@pytest.mark.parametrize(("threshold", "expected"), [(0.5, True), (0.6, False)])
def test_the_threshold_decides_where_nothing_else_does(tmp_path, threshold, expected):
    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=constant(0.5), success_threshold=threshold)
    roll_out(trainer)
    assert [t.success for t in trainer.trajectories] == [expected] * 4


def test_success_fn_comes_before_everything(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="cope_trl")
    seen = []

    def success_fn(row, completion, environment, rewards):
        seen.append((row["goal"], completion[-1]["content"], environment.floor, rewards))
        return environment.floor == 1

    trainer = driven_trainer(
        tmp_path, SCRIPTS, environment_factory=Stairs, success_fn=success_fn, reward_funcs=[constant(2.0)]
    )
    roll_out(trainer)
    assert [t.success for t in trainer.trajectories] == [False, False, False, True]
    assert seen[0] == (2, DONE, 2, {"steady": 2.0, "Stairs": 0.5})
    assert "success by `success_fn`" in caplog.text


@pytest.mark.parametrize("value", [1, "yes", None, 0.7])
def test_a_success_that_is_no_bool(tmp_path, value):
    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=constant(1.0), success_fn=lambda **_: value)
    with pytest.raises(ConfigError, match="`success_fn` returned .*must be True or False"):
        roll_out(trainer)


def test_reward_weights_make_the_total(tmp_path):
    rewards = [constant(1.0), constant(0.5)]
    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=rewards, reward_weights=[0.5, 1.0])
    roll_out(trainer)
    assert trainer.trajectories[0].score == 1.0
    assert trainer.trajectories[0].success


# ---------------------------------------------------------------- rewards that are missing


def test_a_completion_nobody_can_score_leaves_the_others_alone(tmp_path):
    def some(completions, **_):
        return [None, 1.0, 0.0, 1.0]

    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=some)
    buffer = roll_out(trainer)
    assert [t.failed for t in trainer.trajectories] == [True, False, False, False]
    assert [t.success for t in trainer.trajectories] == [False, True, False, True]
    assert buffer["advantages"][0] == 0
    rewards = torch.tensor([1.0, 0.0, 1.0])
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    assert torch.allclose(buffer["advantages"][1:], expected, atol=1e-5)


def test_a_batch_nobody_can_score_stops_the_run(tmp_path):
    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=constant(None))
    with pytest.raises(RolloutError, match="no reward function could score"):
        roll_out(trainer)


# ---------------------------------------------------------------- a rollout function


@pytest.mark.parametrize("engine", ["shared_prefix", "separate"])
def test_a_rollout_function_with_its_mask(tmp_path, engine):
    trainer = driven_trainer(
        tmp_path,
        [[DONE]],
        rollout_func=TALKS(True),
        reward_funcs=constant(1.0),
        forecast_coef=1.0,
        forecast_engine=engine,
        gradient_checkpointing=False,
    )
    loss = forecast_loss(trainer)
    assert [[turn.target for turn in t.turns] for t in trainer.trajectories] == [
        ["look", "open the door"],
        ["wait"],
        ["look", "look", "go"],
        ["sleep"],
    ]
    assert "You see a door." in trainer.trajectories[0].turns[0].observation
    assert [turn.invalid for turn in trainer.trajectories[2].turns] == [False, True, False]  # said before
    assert float(loss) == pytest.approx(float(eq_5(make_model(), trainer)), rel=1e-5)


def test_a_rollout_function_without_a_mask_in_a_multi_turn_run(tmp_path):
    trainer = driven_trainer(tmp_path, [[DONE]], rollout_func=TALKS(False), reward_funcs=constant(1.0))
    with pytest.raises(ConfigError, match="no `env_mask`, but completion 0 goes on to another turn"):
        roll_out(trainer)


def test_a_rollout_function_without_a_mask_and_one_turn(tmp_path):
    single = unmasked_rollout([["wait"]])(False)
    trainer = driven_trainer(tmp_path, [[DONE]], rollout_func=single, reward_funcs=constant(1.0))
    roll_out(trainer)
    assert [turn.target for turn in trainer.trajectories[0].turns] == ["wait"]


def test_a_mask_of_another_length(tmp_path):
    short = unmasked_rollout([["wait"]])(True, mask_change=-1)
    trainer = driven_trainer(tmp_path, [[DONE]], rollout_func=short, reward_funcs=constant(1.0))
    with pytest.raises(ConfigError, match=r"`env_mask` of \d+ tokens for completion 0, which has"):
        roll_out(trainer)


# ---------------------------------------------------------------- single turns


def test_a_single_turn_has_one_window(tmp_path, caplog):
    scripts = [["The answer is 4."], ["5"], ["4"], ["I do not know."]]

    def right(completions, **_):
        return [float("4" in completion[0]["content"]) for completion in completions]

    trainer = driven_trainer(tmp_path, scripts, reward_funcs=right, forecast_coef=1.0, gradient_checkpointing=False)
    loss = forecast_loss(trainer)
    assert "forecasting has nothing to look ahead to" in caplog.text
    assert [len(t.turns) for t in trainer.trajectories] == [1] * 4
    assert [t.success for t in trainer.trajectories] == [True, False, True, False]
    assert [turn.target for turn in trainer.trajectories[0].turns] == ["The answer is 4."]
    assert float(loss) == pytest.approx(float(eq_5(make_model(), trainer)), rel=1e-5)


def test_a_single_turn_run_trains(tmp_path):
    trainer = driven_trainer(tmp_path, [["Yes."], ["No."]], reward_funcs=constant(1.0), max_steps=1)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["forecast/windows"] == 4
    assert math.isfinite(logged["loss"])
    assert logged["episode/turns"] == 1


def test_plain_prompts_train_without_windows(tmp_path, caplog):
    rows = Dataset.from_list([{"prompt": "2 + 2 ="}])
    trainer = driven_trainer(tmp_path, [["4"], ["5"]], rows, reward_funcs=constant(1.0))
    trainer.train()
    assert trainer.state.log_history[0]["forecast/windows"] == 0
    assert "4 of 4 turns do not follow this chat template's generation prompt" in caplog.text


def test_a_tokenizer_without_a_template_is_plain_grpo(tmp_path, caplog):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    rows = Dataset.from_list([{"prompt": "2 + 2 ="}])
    trainer = driven_trainer(tmp_path, [["4"], ["5"]], rows, reward_funcs=constant(1.0), tokenizer=tokenizer)
    trainer.train()
    assert "Forecasting is off, this is plain GRPO" in caplog.text
    assert (trainer.forecast_coef, trainer.forecast_engine) == (0.0, "none")
    assert "forecast/loss" not in trainer.state.log_history[0]
    assert trainer.state.log_history[0]["episode/turns"] == 1


def test_a_cut_reply_gets_no_window(tmp_path):
    trainer = driven_trainer(tmp_path, [["x" * 200], ["Yes."]], reward_funcs=constant(1.0), max_completion_length=20)
    roll_out(trainer)
    cut, whole = trainer.trajectories[:2]
    assert cut.truncated
    assert cut.turns[0].action == ""
    assert not whole.truncated
    assert whole.turns[0].action == "Yes."


# ---------------------------------------------------------------- mistakes


def test_two_ways_at_once(tmp_path):
    for argument, value in (
        ("environment_factory", Stairs),
        ("tools", [print]),
        ("rollout_func", TALKS(True)),
    ):
        with pytest.raises(ConfigError, match=f"`environments` and `{argument}` are both given"):
            CoPETrainer(
                model=make_model(),
                args=make_config(tmp_path),
                train_dataset=prompt_rows(2),
                processing_class=make_tokenizer(),
                environments={"count": CountEnv},
                **{argument: value},
            )


def test_a_template_without_tools(tmp_path):
    with pytest.raises(TemplateError, match="`environment_factory` is given, but the chat template of"):
        driven_trainer(tmp_path, SCRIPTS, tokenizer=make_tokenizer("gemma"), environment_factory=Stairs)


def test_a_plain_configuration(tmp_path):
    with pytest.raises(ConfigError, match="`args` is a GRPOConfig; use `CoPEConfig`"):
        CoPETrainer(
            make_model(), args=GRPOConfig(str(tmp_path), use_cpu=True, bf16=False), train_dataset=prompt_rows(2)
        )


def test_success_fn_where_environments_decide(tmp_path):
    with pytest.raises(ConfigError, match="`success_fn` is given, but these episodes are played in environments"):
        CoPETrainer(
            model=make_model(),
            args=make_config(tmp_path),
            train_dataset=Dataset.from_list(count_rows(1)),
            processing_class=make_tokenizer(),
            environments={"count": CountEnv},
            success_fn=lambda **_: True,
        )


def test_rows_without_environment_or_reward(tmp_path):
    with pytest.raises(ValueError, match="no column 'environment', 'task_id'"):
        driven_trainer(tmp_path, SCRIPTS)
