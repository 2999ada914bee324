"""What the trainer samples with: the kept cache wherever it can, elsewhere lock step, and always the same tokens."""

import logging
import random

import pytest
import torch
from datasets import Dataset
from support import CountEnv, count_rows, make_config, make_model, make_talker, make_tokenizer

from cope_trl import CoPETrainer
from cope_trl.errors import ConfigError


def trainer_of(folder, model=None, **changes):
    defaults = {"max_tokens_per_turn": 20, "max_turns": 3, "forecast_coef": 0.0}
    return CoPETrainer(
        model=model or make_talker(),
        args=make_config(folder, **{**defaults, **changes}),
        train_dataset=Dataset.from_list(count_rows(2, 3)),
        processing_class=make_tokenizer(),
        environments={"count": CountEnv},
    )


def rollout(trainer):
    """The trajectories of the trainer's next batch."""
    rows = [dict(row) for row in trainer.train_dataset for _ in range(trainer.num_generations)]
    trainer.model.train()
    trainer._generate_and_score_completions(rows)
    return [(list(e.prompt_ids), list(e.completion_ids), list(e.completion_mask)) for e in trainer.trajectories]


def test_own_pace_is_the_default_and_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "cope_trl"):
        trainer = trainer_of(tmp_path)
    assert trainer.lock_step_reason is None
    assert "every episode at its own pace, its cache kept from turn to turn" in caplog.text


class Overridden(CoPETrainer):
    def _sample_turn(self, prompts, max_new_tokens):
        return super()._sample_turn(prompts, max_new_tokens)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rollout_schedule": "lock_step"}, "`rollout_schedule` asks for it"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 3}}, "holds ['no_repeat_ngram_size'], which only `generate`"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty` is 1.2"),
        ({"use_transformers_continuous_batching": True}, "`use_transformers_continuous_batching` samples a batch"),
    ],
)
def test_what_only_lock_step_can_do(tmp_path, caplog, changes, reason):
    with caplog.at_level(logging.INFO, "cope_trl"):
        trainer = trainer_of(tmp_path, **changes)
    assert reason in trainer.lock_step_reason
    assert f"all episodes in lock step, because {trainer.lock_step_reason}" in caplog.text


def test_a_subclass_that_samples_by_itself_is_asked(tmp_path):
    trainer = trainer_of(tmp_path)
    overridden = Overridden(
        model=trainer.model,
        args=make_config(tmp_path, forecast_coef=0.0),
        train_dataset=trainer.train_dataset,
        processing_class=make_tokenizer(),
        environments={"count": CountEnv},
    )
    assert overridden.lock_step_reason == "`_sample_turn` is overridden"


def test_a_model_that_drops_its_cache_falls_back(tmp_path):
    window = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
    trainer = trainer_of(tmp_path, make_model(**window))
    assert "sliding window of 8 tokens" in trainer.lock_step_reason
    assert all(mask for _, _, mask in rollout(trainer))


@pytest.mark.parametrize("value", ["fast", ""])
def test_an_unknown_schedule_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match="`rollout_schedule` is"):
        make_config(tmp_path, rollout_schedule=value)


def test_no_episode_at_a_time_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="`max_concurrent_episodes` is 0"):
        make_config(tmp_path, max_concurrent_episodes=0)


# ---------------------------------------------------------------- the tokens


def by_hand(model, prompt, completion, mask, seed, temperature):
    """Sample the policy's tokens anew, by whole forwards, from the episode's own random numbers."""
    numbers = random.Random(seed)
    sampled = []
    for i, own in enumerate(mask):
        if not own:
            sampled.append(completion[i])
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + completion[:i]])).logits[0, -1] / temperature
        sums = logits.softmax(-1).double().cumsum(-1)
        sampled.append(int((sums <= numbers.random() * sums[-1]).sum()))
    return sampled


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_those_of_the_policy_and_of_the_episodes_own_numbers(tmp_path, temperature):
    trainer = trainer_of(tmp_path, temperature=temperature, seed=11)
    played = rollout(trainer)
    model = trainer.accelerator.unwrap_model(trainer.model)
    for i, (prompt, completion, mask) in enumerate(played):
        task = trainer.trajectories[i].task
        seed = f"11-train-0-0-{i}-count-{task.task_id}"
        assert by_hand(model, prompt, completion, mask, seed, temperature) == completion
    assert len({tuple(completion) for _, completion, _ in played}) > len(played) // 2
    assert sum(len(episode.turns) for episode in trainer.trajectories) > 2 * len(played)


@pytest.mark.parametrize("limit", [1, 3])
def test_the_same_seed_gives_the_same_episodes_however_many_at_a_time(tmp_path, limit):
    together = rollout(trainer_of(tmp_path))
    assert rollout(trainer_of(tmp_path, max_concurrent_episodes=limit)) == together
    assert rollout(trainer_of(tmp_path, seed=7)) != together


def test_greedy_rollouts_may_be_asked_for(tmp_path):
    """Every rollout of a group is then the same, and the most likely one."""
    trainer = trainer_of(tmp_path, generation_kwargs={"do_sample": False})
    assert trainer.lock_step_reason is None
    played = rollout(trainer)
    groups = [played[: trainer.num_generations], played[trainer.num_generations :]]
    assert all(episode == group[0] for group in groups for episode in group)
    model = trainer.accelerator.unwrap_model(trainer.model)
    prompt, completion, _ = played[0]
    with torch.no_grad():
        assert int(model(input_ids=torch.tensor([prompt])).logits[0, -1].argmax()) == completion[0]


def test_greedy_evaluation_is_the_same_in_lock_step(tmp_path):
    """`generate` and the kept cache, token for token (the most likely ones, which need no random numbers)."""
    own = trainer_of(tmp_path, temperature=1e-4, max_turns_eval=3)
    step = trainer_of(tmp_path, temperature=1e-4, max_turns_eval=3, rollout_schedule="lock_step")
    tasks = Dataset.from_list(count_rows(1, 2, 3, 4, 5))
    assert own.lock_step_reason is None
    assert step.lock_step_reason is not None
    first, second = own.evaluate_tasks(tasks), step.evaluate_tasks(tasks)
    assert [e.completion_ids for e in first] == [e.completion_ids for e in second]
    assert own.model.training == step.model.training


def test_training_goes_on_as_it_was(tmp_path):
    """Gradient checkpointing, which rollouts suspend, is on again in the update; attention is the model's own."""
    kwargs = {"use_reentrant": False}
    trainer = trainer_of(
        tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs, max_steps=2, forecast_coef=0.01
    )
    base = trainer._base_model
    own, states = base.config._attn_implementation, []
    compute = trainer._compute_loss

    def noted(*args):
        states.append((base.is_gradient_checkpointing, base.model.layers[0]._gradient_checkpointing_func.keywords))
        return compute(*args)

    trainer._compute_loss = noted
    trainer.train()
    assert states
    assert all(state == (True, kwargs) for state in states)
    assert base.config._attn_implementation == own
