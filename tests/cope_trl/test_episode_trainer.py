"""Episodes inside the trainer: plain GRPO is untouched, broken environments carry no signal, mistakes are named."""

import threading
import time

import pytest
import torch
from datasets import Dataset, IterableDataset
from support import BACK, GO, MIXED_SCRIPTS, CountEnv, count_rows, make_config, make_model, make_tokenizer
from support import scripted_trainer as scripted
from trl import GRPOTrainer

from cope_trl.cope_trainer import CoPETrainer
from cope_trl.episode_trainer import success_reward
from cope_trl.errors import ConfigError, DataError, RolloutError, TemplateError
from env_adapters.errors import EnvAdapterError, UnknownEnvironmentError, UnknownTaskError


def test_without_forecasting_it_is_grpo_bit_for_bit(tmp_path):
    """The same rollouts through TRL's own trainer give the same weights, to the last bit."""
    changes = {
        "forecast_coef": 0.0,
        "max_steps": 3,
        "gradient_accumulation_steps": 2,
        "beta": 0.01,
        "entropy_coef": 0.001,
        "save_trajectories": False,
    }
    tokenizer, recorded = make_tokenizer(), []
    torch.manual_seed(3)
    path = tmp_path / "model"
    make_model().save_pretrained(path)
    tokenizer.save_pretrained(path)

    ours = scripted(str(path), make_config(tmp_path / "a", **changes), (2, 3), MIXED_SCRIPTS, tokenizer)
    rollout = ours.rollout_func

    def record(prompts, trainer):
        recorded.append(rollout(prompts, trainer))
        return {name: list(value) if isinstance(value, list) else value for name, value in recorded[-1].items()}

    ours.rollout_func = record
    ours.train()
    replay = iter(recorded)
    plain = GRPOTrainer(
        model=str(path),
        reward_funcs=success_reward,
        args=make_config(tmp_path / "b", **changes),
        train_dataset=Dataset.from_list(count_rows(2, 3)),
        processing_class=tokenizer,
        rollout_func=lambda prompts, trainer: next(replay),
    )
    plain.train()
    assert len(recorded) == 3
    moved = dict(make_model().named_parameters())
    for (name, a), b in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(not torch.equal(a, moved[name]) for name, a in ours.model.named_parameters())
    for mine, theirs in zip(ours.state.log_history[:3], plain.state.log_history[:3], strict=True):
        for key in ("loss", "grad_norm", "entropy", "kl", "reward"):
            assert mine[key] == theirs[key], key


class BrokenEnv(CountEnv):
    """Breaks in one episode of the batch: the one whose turn it is to be made `victim`-th."""

    name, victim, how, made = "count", 5, "raise", 0
    lock = threading.Lock()

    def __init__(self):
        with BrokenEnv.lock:
            self.number = BrokenEnv.made
            BrokenEnv.made += 1

    def _act(self, action):
        if self.number != self.victim and self.how != "raise everywhere":
            return super()._act(action)
        if self.how == "hang":
            time.sleep(30)
        if self.how == "observation":
            return super()._act(action).__class__(observation=None)
        if self.how == "exit":
            raise SystemExit(3)
        raise OSError("the simulator is gone")


@pytest.fixture
def _fresh():
    BrokenEnv.made = 0


def play(tmp_path, how, **changes):
    BrokenEnv.how = how
    changes = {"per_device_train_batch_size": 8, "environment_timeout": 2.0, "save_trajectories": False, **changes}
    trainer = scripted(
        make_model(),
        make_config(tmp_path, **changes),
        (2, 2),
        [[GO], [BACK], [GO], [GO], [BACK], [GO], [BACK], [GO]],
        environments={"count": BrokenEnv},
    )
    trainer.model.train()
    return trainer


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("how", ["raise", "hang", "observation", "exit"])
def test_one_broken_environment_of_eight_carries_no_signal(tmp_path, how):
    trainer = play(tmp_path, how)
    rows = [dict(row) for row in trainer.train_dataset for _ in range(4)]
    started = time.monotonic()
    buffer = trainer._generate_and_score_completions(rows)
    assert time.monotonic() - started < 20
    failed = [t.failed for t in trainer.trajectories]
    assert sum(failed) == 1
    broken = failed.index(True)
    assert trainer.trajectories[broken].error
    # The others' advantages are those of a group without it.
    for first in (0, 4):
        members = [i for i in range(first, first + 4) if i != broken]
        rewards = torch.tensor([float(trainer.trajectories[i].success) for i in members])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        assert torch.allclose(buffer["advantages"][members], expected, atol=1e-5)
    assert buffer["advantages"][broken] == 0
    assert (buffer["tool_mask"] * buffer["completion_mask"])[broken].sum() == 0
    assert buffer["forecast_weight"][broken].sum() == 0
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, buffer).backward()
    assert all(torch.isfinite(p.grad).all() for p in trainer.model.parameters() if p.grad is not None)


@pytest.mark.usefixtures("_fresh")
def test_the_run_goes_on_after_a_failure_and_counts_it(tmp_path):
    trainer = play(tmp_path, "raise", max_steps=2)
    trainer.train()
    assert [log["episode/failed"] for log in trainer.state.log_history[:2]] == [1 / 8, 0]
    assert trainer.state.log_history[0]["episode/success"] > 0


@pytest.mark.usefixtures("_fresh")
def test_a_custom_reward_function_cannot_reward_a_failed_episode(tmp_path):
    BrokenEnv.how = "raise"
    trainer = scripted(
        make_model(),
        make_config(tmp_path, per_device_train_batch_size=8),
        (2, 2),
        [[GO]] * 8,
        environments={"count": BrokenEnv},
        reward_funcs=lambda completions, num_turns, **_: [float(n) for n in num_turns],
    )
    trainer.train()
    table = trainer._logs["advantages"]
    assert sum(t.failed for t in trainer.trajectories) == 1
    assert list(table)[[t.failed for t in trainer.trajectories].index(True)] == 0


@pytest.mark.usefixtures("_fresh")
def test_a_step_without_a_usable_rollout_stops_with_the_first_cause(tmp_path):
    with pytest.raises(RolloutError, match=r"All 8 rollouts .* the simulator is gone"):
        play(tmp_path, "raise everywhere").train()


def test_evaluation_uses_its_own_turn_limit_and_prefix(tmp_path):
    config = make_config(tmp_path, per_device_eval_batch_size=4, max_turns=2)
    trainer = scripted(
        make_model(), config, (2,), [[BACK]], eval_dataset=Dataset.from_list(count_rows(2)), callbacks=[]
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] is not None
    logged = trainer.state.log_history[-1]
    assert logged["eval_episode/turns"] == CountEnv.max_turns_eval
    assert logged["eval_episode/success"] == 0
    trainer.train()
    assert trainer.state.log_history[-2]["episode/turns"] == 2


@pytest.mark.parametrize(("max_turns", "expected"), [(None, CountEnv.max_turns), (2, 2)])
def test_a_streamed_training_set_has_the_same_turn_limits(tmp_path, max_turns, expected):
    rows = count_rows(2)
    config = make_config(tmp_path, max_turns=max_turns, per_device_eval_batch_size=4)
    trainer = scripted(
        make_model(),
        config,
        (),
        [[BACK]],
        train_dataset=IterableDataset.from_generator(lambda: iter(rows)),
        eval_dataset=IterableDataset.from_generator(lambda: iter(rows)),
    )
    trainer.train()
    assert {len(t.turns) for t in trainer.trajectories} == {expected}
    trainer.evaluate()
    assert {len(t.turns) for t in trainer.trajectories} == {CountEnv.max_turns_eval}


def test_every_episode_is_kept_on_disk(tmp_path):
    from cope_trl.data.trajectories import read_trajectories

    trainer = scripted(make_model(), make_config(tmp_path, max_steps=2), (2, 3), MIXED_SCRIPTS)
    trainer.train()
    kept = read_trajectories(tmp_path / "trajectories")
    assert len(kept) == 8
    assert kept[4:] == trainer.trajectories


# ---------------------------------------------------------------- mistakes, each named before a model is loaded


def build(tmp_path, rows=None, model="no/such-model", **kwargs):
    rows = count_rows(1) if rows is None else rows
    kwargs.setdefault("environments", {"count": CountEnv})
    kwargs.setdefault("processing_class", make_tokenizer())
    args = make_config(tmp_path, **kwargs.pop("config", {}))
    return CoPETrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), **kwargs)


def test_unknown_environment(tmp_path):
    rows = [{**count_rows(1)[0], "environment": "houshold"}]
    with pytest.raises(UnknownEnvironmentError, match=r"'houshold'.*household"):
        build(tmp_path, rows)


def test_unknown_task_id(tmp_path):
    rows = [{**count_rows(1)[0], "environment": "household", "task_id": "train-99999999"}]
    with pytest.raises(UnknownTaskError, match="train-99999999"):
        build(tmp_path, rows)


def test_unknown_task_id_of_a_factory_stops_the_run(tmp_path):
    rows = [{**count_rows(1)[0], "task_id": "count-x"}]
    with pytest.raises(UnknownTaskError, match="count-x"):
        build(tmp_path, rows, model=make_model()).train()


@pytest.mark.parametrize("column", ["prompt", "environment", "task_id"])
def test_missing_column(tmp_path, column):
    row = {name: value for name, value in count_rows(1)[0].items() if name != column}
    with pytest.raises(DataError, match=column):
        build(tmp_path, [row])


def test_factory_that_cannot_be_called(tmp_path):
    with pytest.raises(ConfigError, match="cannot be called"):
        build(tmp_path, environments={"count": "CountEnv"})


def test_template_that_rewrites_history(tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(TemplateError):
        build(tmp_path, processing_class=tokenizer)


def test_group_size_that_does_not_divide_the_batch(tmp_path):
    with pytest.raises(ConfigError, match=r"num_generations.*3"):
        build(tmp_path, config={"num_generations": 3})


def test_environment_errors_share_a_base():
    assert issubclass(UnknownTaskError, EnvAdapterError)


def test_a_hanging_environment_does_not_block_closing(tmp_path):
    BrokenEnv.made, BrokenEnv.how = 0, "hang"
    trainer = play(tmp_path, "hang", environment_timeout=0.5)
    trainer._generate_and_score_completions([dict(row) for row in trainer.train_dataset for _ in range(4)])
    started = time.monotonic()
    trainer.close()
    assert time.monotonic() - started < 5
