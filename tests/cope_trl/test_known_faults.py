"""Faults that users of multi-turn trainers have reported elsewhere, each looked for in every place ours could have it.

Others have their place with the code they concern: ranks with uneven turns in `test_two_processes.py` and
`engines/`, a lost rollout buffer in `test_resume.py`, LoRA weights that never reach vLLM in `tests/vllm/`, template
renders that do not extend each other in `test_chat.py`.
"""

import math

import pytest
import torch
from datasets import Dataset
from driven import CLIMB, DONE, SLIDE, Stairs, constant, driven_trainer, roll_out
from support import (
    BACK,
    GO,
    MIXED_SCRIPTS,
    TALK,
    count_rows,
    make_config,
    make_model,
    make_tokenizer,
    scripted_trainer,
)
from transformers import TrainerCallback
from trl import GRPOTrainer

from cope_trl.errors import RolloutError

CALLS = [[CLIMB, CLIMB, DONE], [SLIDE, CLIMB, CLIMB, DONE], [DONE], [CLIMB, DONE]]


def played(folder, **changes):
    """A trainer that plays environments, its batch of rows, and the batch."""
    changes = {"per_device_train_batch_size": 8, "gradient_checkpointing": False, **changes}
    scripts = changes.pop("scripts", MIXED_SCRIPTS)
    tokenizer = changes.pop("tokenizer", None)
    trainer = scripted_trainer(make_model(), make_config(folder, **changes), (2, 3), scripts, tokenizer)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer, trainer._generate_and_score_completions(
        [dict(row) for row in trainer.train_dataset for _ in range(4)]
    )


def called(folder, **changes):
    """The same with tools that TRL's loop executes."""
    scripts = changes.pop("scripts", CALLS)
    trainer = driven_trainer(folder, scripts, environment_factory=Stairs, gradient_checkpointing=False, **changes)
    trainer.current_gradient_accumulation_steps = 1
    return trainer, roll_out(trainer)


BOTH = pytest.mark.parametrize("rollout", [played, called])


# ---------------------------------------------------------------- ids and masks


@BOTH
def test_trained_ids_are_the_sampled_ids(tmp_path, rollout):
    """A loop that decodes and encodes again trains other tokens than were sampled."""
    trainer, buffer = rollout(tmp_path)
    tokenizer = trainer.processing_class
    for row, (trajectory, script) in enumerate(zip(trainer.trajectories, trainer.script.scripts, strict=True)):
        ids = buffer["completion_ids"][row][buffer["completion_mask"][row].bool()].tolist()
        assert tuple(ids) == trajectory.completion_ids
        mask = buffer["tool_mask"][row][: len(ids)].bool()
        trained = torch.tensor(ids)[mask].tolist()
        said = [script[min(turn, len(script) - 1)] for turn in range(len(trajectory.turns))]
        expected = [[*tokenizer(reply)["input_ids"], tokenizer.eos_token_id] for reply in said]
        assert trained == [token for turn in expected for token in turn][: len(trained)]
        assert len(trained) > 0


@pytest.mark.parametrize("limit", [1, 7, 30, 31, 40, 63, 64, 90, 120, 150, 400])
@BOTH
def test_masks_are_as_long_as_the_ids_at_every_cut(tmp_path, rollout, limit):
    trainer, buffer = rollout(tmp_path, max_completion_length=limit)
    for row, trajectory in enumerate(trainer.trajectories):
        assert len(trajectory.completion_ids) == len(trajectory.completion_mask) <= limit
        assert buffer["completion_mask"][row].sum() == len(trajectory.completion_ids)
    assert buffer["tool_mask"].shape == buffer["completion_ids"].shape == buffer["completion_mask"].shape
    assert math.isfinite(float(trainer._compute_loss(trainer.model, buffer)))


@pytest.mark.parametrize("limit", [7, 40, 90, 150])
@BOTH
def test_a_cut_completion_is_masked_when_asked_for(tmp_path, rollout, limit):
    trainer, buffer = rollout(tmp_path, max_completion_length=limit, mask_truncated_completions=True)
    tokenizer = trainer.processing_class
    for row, trajectory in enumerate(trainer.trajectories):
        cut = trajectory.completion_ids[-1] != tokenizer.eos_token_id
        assert bool(buffer["completion_mask"][row].sum() == 0) is cut
        if cut:
            assert (buffer["forecast_window"][row] == -1).all()


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


@pytest.mark.parametrize("forecast_engine", ["shared_prefix", "separate"])
@pytest.mark.parametrize("loss_type", LOSSES)
@BOTH
def test_environment_tokens_get_no_gradient_on_any_loss_path(tmp_path, rollout, loss_type, forecast_engine):
    sequence = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    trainer, buffer = rollout(
        tmp_path,
        loss_type=loss_type,
        forecast_engine=forecast_engine,
        forecast_coef=1e-9,
        entropy_coef=0.01,
        **sequence,
    )
    outputs = []
    plain = trainer._get_per_token_logps_and_entropies

    def spy(*args, **kwargs):
        log_probs, entropies, aux = plain(*args, **kwargs)
        for tensor in (log_probs, entropies):
            if tensor is not None and tensor.requires_grad:
                tensor.retain_grad()
                outputs.append(tensor)
        return log_probs, entropies, aux

    trainer._get_per_token_logps_and_entropies = spy
    trainer._compute_loss(trainer.model, buffer).backward()
    trained = (buffer["tool_mask"] * buffer["completion_mask"]).bool()
    assert outputs
    for tensor in outputs:
        assert tensor.grad is None or (tensor.grad[~trained] == 0).all()
    with_signal = trained & (buffer["advantages"] != 0).unsqueeze(1)
    assert (outputs[0].grad[with_signal] != 0).any()


@BOTH
def test_the_end_of_a_turn_is_trained_where_it_is_also_the_padding(tmp_path, rollout):
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    trainer, buffer = rollout(tmp_path, tokenizer=tokenizer)
    end = tokenizer.eos_token_id
    assert trainer.processing_class.pad_token_id == end
    for row, trajectory in enumerate(trainer.trajectories):
        length = len(trajectory.completion_ids)
        assert buffer["completion_mask"][row].tolist() == [1] * length + [0] * (
            buffer["completion_mask"].size(1) - length
        )
        for turn in trajectory.turns:
            position = turn.end - 1 - len(trajectory.prompt_ids)
            if trajectory.completion_ids[position] == end:
                assert buffer["tool_mask"][row, position] == 1
        assert trajectory.completion_ids.count(end) >= len(trajectory.turns) - 1
    # The forecast's own end of turn is a target as well.
    rows = buffer["forecast_ids"][buffer["forecast_weight"] > 0]
    assert (rows == end).any()


@BOTH
def test_every_turn_of_an_episode_is_there(tmp_path, rollout):
    trainer, buffer = rollout(tmp_path)
    turns = [len(trajectory.turns) for trajectory in trainer.trajectories]
    assert max(turns) > 2
    for row, count in enumerate(turns):
        mask = (buffer["tool_mask"] * buffer["completion_mask"])[row]
        starts = (mask[1:] > mask[:-1]).sum() + mask[0]
        assert int(starts) == count


# ---------------------------------------------------------------- groups, scales, signals


@BOTH
def test_groups_of_one_outcome_are_finite(tmp_path, rollout):
    scripts = [[GO]] if rollout is played else [[CLIMB, CLIMB, DONE]]
    trainer, buffer = rollout(tmp_path, scripts=scripts, forecast_coef=1.0)
    assert torch.equal(buffer["advantages"], torch.zeros_like(buffer["advantages"]))
    loss = trainer._compute_loss(trainer.model, buffer)
    loss.backward()
    assert math.isfinite(float(loss))
    assert all(torch.isfinite(p.grad).all() for p in trainer.model.parameters() if p.grad is not None)


@BOTH
def test_a_group_of_successes_still_forecasts(tmp_path, rollout):
    """No advantage anywhere, so the policy loss has no gradient; forecasting has."""
    scripts = [[GO]] if rollout is played else [[CLIMB, CLIMB, DONE]]
    trainer, buffer = rollout(tmp_path, scripts=scripts, forecast_coef=1.0)
    assert all(trajectory.success for trajectory in trainer.trajectories)
    trainer._compute_loss(trainer.model, buffer).backward()
    norm = sum(float(p.grad.norm()) for p in trainer.model.parameters() if p.grad is not None)
    assert norm > 0.1


def test_an_unscored_episode_leaves_the_baseline_alone(tmp_path):
    def some(completions, **_):
        return [None, 1.0, 0.0, 0.0]

    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=some)
    buffer = roll_out(trainer)
    rewards = torch.tensor([1.0, 0.0, 0.0])
    assert buffer["advantages"][0] == 0
    assert torch.allclose(buffer["advantages"][1:], (rewards - rewards.mean()) / (rewards.std() + 1e-4), atol=1e-5)


class _Gradients(TrainerCallback):
    """Keeps the gradient of each optimizer step."""

    def __init__(self):
        self.steps = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.steps.append({name: p.grad.clone() for name, p in model.named_parameters()})


def step_gradients(folder, batch, accumulation, steps_per_generation, forecast_coef):
    """Gradient of each optimizer step that one generation of two groups of four gives; the weights stay."""
    config = make_config(
        folder,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=steps_per_generation,
        max_steps=steps_per_generation // accumulation,
        optim="sgd",
        max_grad_norm=1e9,
        weight_decay=0.0,
        learning_rate=0.0,
        forecast_coef=forecast_coef,
        gradient_checkpointing=False,
    )
    gradients = _Gradients()
    scripted_trainer(make_model(), config, (2, 3), MIXED_SCRIPTS, callbacks=[gradients]).train()
    return gradients.steps


@pytest.mark.parametrize("forecast_coef", [0.0, 0.5])
@pytest.mark.parametrize("split", [(1, 4, 8), (2, 2, 4), (4, 1, 2), (2, 1, 4)])
def test_the_scale_where_a_generation_serves_several_optimizer_steps(tmp_path, split, forecast_coef):
    """Each step is a mean over its own rows, so that the mean of the steps is the step over all rows."""
    (whole,) = step_gradients(tmp_path / "whole", 8, 1, 1, forecast_coef)
    steps = step_gradients(tmp_path / "split", *split, forecast_coef)
    assert len(steps) == split[2] // split[1] > 1
    for name, expected in whole.items():
        mean = torch.stack([gradients[name] for gradients in steps]).mean(0)
        assert float((mean - expected).norm() / expected.norm()) < 1e-3, name


# ---------------------------------------------------------------- what is cut, dropped or empty


def test_a_long_prompt_keeps_its_instruction_or_is_refused(tmp_path):
    """Nothing is cut on the left: the row fails, the others go on."""
    scripts, goals = [[GO]] * 8, (1, 10**40)
    config = make_config(tmp_path, per_device_train_batch_size=8, max_prompt_length=110)
    trainer = scripted_trainer(make_model(), config, goals, scripts)
    trainer.model.train()
    trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset for _ in range(4)])
    short, long = trainer.trajectories[:4], trainer.trajectories[4:]
    decode = trainer.processing_class.decode
    assert all("Say go until you are there." in decode(episode.prompt_ids) for episode in short)
    assert not any(episode.failed for episode in short)
    assert all(episode.failed and "`max_prompt_length`=110" in episode.error for episode in long)


def test_long_episodes_that_an_importance_correction_discards_are_counted(tmp_path, monkeypatch):
    """A ratio summed over an episode moves away from 1 with its length; the share that stays is logged by length."""
    plain = GRPOTrainer._generate_and_score_completions

    def with_ratio(self, inputs):
        output = plain(self, inputs)
        sampled = (output["completion_mask"] * output["tool_mask"]).sum(1, keepdim=True)
        output["importance_sampling_ratio"] = (sampled <= 40).float()  # as the mode "sequence_mask" does
        return output

    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", with_ratio)
    scripts = [[GO], [GO], [BACK, BACK, BACK, GO], [BACK, BACK, BACK, TALK, GO]] * 2
    trainer, _ = played(tmp_path, scripts=scripts)
    logged = trainer._means["train"].flush()
    assert logged["sampling/kept_share_short"] == 1.0
    assert logged["sampling/kept_share_long"] < 1.0


def test_no_ratio_no_share(tmp_path):
    trainer, _ = played(tmp_path)
    assert not any(name.startswith("sampling/") for name in trainer._means["train"].flush())


def test_a_step_without_a_usable_rollout_stops_the_run(tmp_path):
    trainer = driven_trainer(tmp_path, [["Yes."]], reward_funcs=constant(None))
    with pytest.raises(RolloutError, match="All 4 rollouts of step 0 failed"):
        trainer.train()
    config = make_config(tmp_path, max_prompt_length=3)
    with pytest.raises(RolloutError, match="All 4 rollouts of step 0 failed"):
        scripted_trainer(make_model(), config, (1,), [[GO]]).train()


def test_an_empty_dataset_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset` is empty"):
        driven_trainer(tmp_path, [[DONE]], Dataset.from_list(count_rows(1)).select([]))
