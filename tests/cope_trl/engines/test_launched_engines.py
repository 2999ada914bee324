"""Two processes under every engine, launched for real on this machine's CPUs: their update is that of one process."""

import pytest
import torch
from support import make_model

ENGINES = ["ddp", "zero2", "zero3", "fsdp2"]
KINDS = {"ddp": "MULTI_CPU", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}
LOGGED = ("loss", "grad_norm", "forecast/loss", "forecast/nll_k0", "forecast/windows", "tokens/forecast")

pytestmark = pytest.mark.slow


def distance(value, expected, before=0.0):
    """Distance of two updates, relative to the one that is expected."""
    return float((value - expected).norm() / (expected - before).norm())


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engine_is_the_one_that_was_launched(outcome, engine):
    run = outcome(engine, "shared_prefix")
    assert (run["kind"], run["processes"]) == (KINDS[engine], 2)
    assert run["stage"] == {"zero2": 2, "zero3": 3}.get(engine, 0)


@pytest.mark.parametrize("case", ["shared_prefix", "separate"])
@pytest.mark.parametrize("engine", ENGINES)
def test_two_processes_make_the_update_of_one(outcome, start, engine, case):
    """Over two accumulated micro-batches, with forecasting on."""
    run, one = outcome(engine, case), outcome("one", case)
    assert run["forecast_engine"] == one["forecast_engine"] == case
    assert set(run["state"]) == set(start)
    for name, expected in one["state"].items():
        assert distance(run["state"][name], expected, start[name]) < 1e-4, name
    for key in LOGGED:
        assert run["log"][key] == pytest.approx(one["log"][key], rel=1e-4), key


@pytest.mark.parametrize("engine", ENGINES)
def test_one_turn_against_thirty_samples_the_same(outcome, start, engine):
    """Ranks that end 29 turns apart neither hang nor sample anything else than one process does."""
    run, one = outcome(engine, "sampled"), outcome("one", "sampled")
    assert run["log"]["episode/turns"] == pytest.approx((1 + 30) / 2)
    assert len(run["said"]) == 30
    assert run["said"][0] == one["said"][0][: len(run["said"][0])]
    assert all(run["said"][0])
    for name, expected in one["state"].items():
        assert distance(run["state"][name], expected, start[name]) < 1e-4, name


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_from_disk_is_evaluated_and_trained_as_in_one_process(outcome, start, engine):
    """Full weights with a reference model of their own, which the second step is held to."""
    run, one = outcome(engine, "from_disk"), outcome("one", "from_disk")
    assert len(run["before"]) == 3
    assert run["before"] == one["before"] != one["after"] == run["after"]
    assert one["log"]["kl"] > 1e-3
    # TRL logs the mean of the micro-batches' token means, whose weights depend on how the episodes are dealt out.
    assert run["log"]["kl"] == pytest.approx(one["log"]["kl"], rel=0.05)
    for key in ("loss", "forecast/loss"):
        assert run["log"][key] == pytest.approx(one["log"][key], rel=1e-3), key
    for name, expected in one["state"].items():
        assert distance(run["state"][name], expected, start[name]) < 1e-3, name


def test_zero3_gathers_the_weights_once_a_rollout(outcome):
    run = outcome("zero3", "sampled")
    assert run["counts"] == {"whole": 1, "modules": 0}
    assert run["gathers"] is True
    assert outcome("zero3", "from_disk")["counts"] == {"whole": 2, "modules": 0}  # two evaluations


def test_zero3_can_sample_in_shards(outcome):
    """`ds3_gather_for_generation=False`: never the whole model on one device, and the same tokens."""
    run, whole = outcome("zero3", "sampled_in_shards"), outcome("zero3", "sampled")
    assert run["counts"]["whole"] == 0
    assert run["counts"]["modules"] > 100
    assert run["said"][:2] == whole["said"][:2]
    assert run["gathers"] is False


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("case", ["lora", "rslora"])
@pytest.mark.parametrize("engine", ["one", *ENGINES])
def test_forecasting_alone_trains_the_adapter(outcome, start, engine, case):
    """Every episode succeeds, so the policy's gradient is 0 and what moves is the forecasts' doing."""
    run, one = outcome(engine, case), outcome("one", case)
    for name, value in run["state"].items():
        if "lora_" not in name:
            plain = name.replace("base_model.model.", "", 1).replace(".base_layer", "")
            assert torch.equal(value, start[plain]), name
        elif "lora_B" in name:  # starts at 0
            assert value.norm() > 1e-3, name
            assert distance(value, one["state"][name]) < 1e-4, name
    assert run["log"]["forecast/loss"] == pytest.approx(one["log"]["forecast/loss"], rel=1e-5)


def test_the_two_adapters_are_scaled_differently(outcome):
    """8/4 against 8/√4: at B = 0 the first gradients differ by that factor."""
    lora, rslora = outcome("one", "lora")["log"], outcome("one", "rslora")["log"]
    assert rslora["grad_norm"] == pytest.approx(2 * lora["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("case", ["lora", "rslora"])
@pytest.mark.parametrize("engine", ["one", *ENGINES])
def test_a_saved_adapter_plays_as_the_trained_one(outcome, engine, case):
    from peft import PeftModel

    run, ids = outcome(engine, case), torch.arange(5, 45)[None]
    model = make_model().eval()
    with torch.no_grad():
        base = model(input_ids=ids).logits
        logits = PeftModel.from_pretrained(model, str(run["folder"] / "adapter"))(input_ids=ids).logits
    assert torch.allclose(logits, run["logits"], atol=1e-4)
    assert (logits - base).abs().max() > 0.05


@pytest.mark.parametrize("engine", ENGINES)
def test_the_reference_policy_of_an_adapter_is_the_base_model(outcome, engine):
    """An adapter that is not 0 is away from the reference at once, by as much in two processes as in one."""
    run, one = outcome(engine, "reference"), outcome("one", "reference")
    assert one["log"]["kl"] > 0.01
    assert run["log"]["kl"] == pytest.approx(one["log"]["kl"], rel=1e-4)
    for name, before in one["before"].items():
        if "lora_" in name:
            assert distance(run["state"][name], one["state"][name], before) < 1e-4, name
        else:
            assert torch.equal(run["state"][name], before), name


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("engine", ["zero2", "zero3", "fsdp2"])
def test_a_run_goes_on_from_its_checkpoint(outcome, start, engine):
    """Optimizer states, learning rate and weights: two steps, a checkpoint and two steps are four steps."""
    run = outcome(engine, "resumed")
    resumed = run["resumed"]
    assert (run["steps"], resumed["steps"]) == (4, 2)
    for name, expected in run["state"].items():
        assert distance(expected, start[name]) > 1e-3, name
        assert distance(resumed["state"][name], expected, start[name]) < 1e-4, name
    for key in ("loss", "grad_norm", "forecast/loss", "learning_rate"):
        assert resumed["last"][key] == pytest.approx(run["last"][key], rel=1e-4), key
