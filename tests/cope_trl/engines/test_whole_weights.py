"""When a rollout holds ZeRO-3's weights whole, without DeepSpeed; with it: `test_launched_engines.py`."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from trl import GRPOTrainer

from cope_trl import engine_trainer
from cope_trl.engine_trainer import EngineTrainer


@pytest.fixture
def entered(monkeypatch):
    """The models that were unwrapped, in order; `None` marks the end."""
    seen = []

    @contextmanager
    def unwrap(model, accelerator, gradient_checkpointing_kwargs=None):
        seen.append((model, accelerator, gradient_checkpointing_kwargs))
        try:
            yield model
        finally:
            seen.append(None)

    monkeypatch.setattr(engine_trainer, "unwrap_model_for_generation", unwrap)
    return seen


def trainer(zero3=True, gather=True, use_vllm=False):
    made = object.__new__(EngineTrainer)
    made.__dict__.update(
        _dist=SimpleNamespace(is_zero3=zero3),
        args=SimpleNamespace(ds3_gather_for_generation=gather, gradient_checkpointing_kwargs={"use_reentrant": False}),
        use_vllm=use_vllm,
        model_wrapped="the model",
        accelerator="the accelerator",
    )
    return made


def test_the_calls_inside_do_not_gather_again(entered):
    made = trainer()
    with made._whole_weights():
        assert entered == [("the model", "the accelerator", {"use_reentrant": False})]
        assert made.args.ds3_gather_for_generation is False
    assert made.args.ds3_gather_for_generation is True
    assert entered[1:] == [None]


def test_a_rollout_that_fails_leaves_the_setting_as_it_was(entered):
    made = trainer()
    with pytest.raises(RuntimeError, match="all failed"), made._whole_weights():
        raise RuntimeError("all failed")
    assert made.args.ds3_gather_for_generation is True
    assert entered[-1] is None


@pytest.mark.parametrize("changes", [{"zero3": False}, {"gather": False}, {"use_vllm": True}])
def test_nothing_is_gathered_elsewhere(entered, changes):
    made = trainer(**changes)
    before = made.args.ds3_gather_for_generation
    with made._whole_weights():
        assert made.args.ds3_gather_for_generation is before
    assert entered == []


def test_the_whole_rollout_is_inside(entered, monkeypatch):
    inside = []
    monkeypatch.setattr(
        GRPOTrainer, "_generate", lambda self, prompts: inside.append((prompts, len(entered))) or "out"
    )
    assert trainer()._generate(["a"]) == "out"
    assert inside == [(["a"], 1)]
    assert entered[-1] is None
