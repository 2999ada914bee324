"""Switches that must not change what is computed: gradient checkpointing, bfloat16, compilation."""

import pytest
import torch
from support import MIXED_SCRIPTS, make_config, make_model, scripted_trainer

ENGINES = ["shared_prefix", "separate"]


def step(folder, model=None, **changes):
    """One update over two micro-batches: the log and the change of every weight."""
    settings = {"optim": "sgd", "max_grad_norm": 1e9, "weight_decay": 0.0, "learning_rate": 0.05}
    settings |= {"gradient_accumulation_steps": 2, "forecast_coef": 0.5, "gradient_checkpointing": False}
    model = model or make_model()
    start = {name: parameter.detach().clone().float() for name, parameter in model.named_parameters()}
    trainer = scripted_trainer(model, make_config(folder, **{**settings, **changes}), (2, 3), MIXED_SCRIPTS)
    trainer.train()
    return trainer, {name: p.detach().float() - start[name] for name, p in model.named_parameters()}


def furthest(changes, expected):
    return max(float((changes[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_checkpointing_changes_nothing(tmp_path, engine, reentrant):
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    calls, updates = [], []
    for name, changes in (("plain", {}), ("checkpointed", kwargs)):
        model, made = make_model(), []
        model.model.layers[0].input_layernorm.register_forward_hook(lambda *_, made=made: made.append(1))
        updates.append(step(tmp_path / name, model, forecast_engine=engine, **changes)[1])
        calls.append(len(made))
    assert furthest(updates[1], updates[0]) < 1e-5
    assert calls[1] == 2 * calls[0]  # the activations really are computed again


@pytest.mark.parametrize("engine", ENGINES)
def test_bfloat16_autocast_stays_close(tmp_path, engine):
    plain, expected = step(tmp_path / "plain", forecast_engine=engine)
    trainer, changes = step(tmp_path / "bf16", forecast_engine=engine, bf16=True)
    for key in ("loss", "grad_norm", "forecast/loss"):
        assert trainer.state.log_history[0][key] == pytest.approx(plain.state.log_history[0][key], rel=0.01), key
    assert 1e-5 < furthest(changes, expected) < 0.05


def test_both_engines_agree_on_a_model_in_bfloat16(tmp_path):
    """Weights in bfloat16 move in steps of their own size, so gradients are compared."""
    gradients = []
    for engine in ENGINES:
        model, seen = make_model().to(torch.bfloat16), {}
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p, name=name, seen=seen: seen.update({name: p.grad.float()})
            )
        trainer, _ = step(tmp_path / engine, model, forecast_engine=engine, bf16=True, gradient_accumulation_steps=1)
        gradients.append(seen)
        assert trainer.state.log_history[0]["forecast/loss"] > 1
    shared, separate = gradients
    for name, value in separate.items():
        assert float(torch.cosine_similarity(shared[name].flatten(), value.flatten(), dim=0)) > 0.98, name


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(tmp_path):
    """Traced and differentiated by `torch.compile`; its code generator is left out, which takes minutes on a CPU."""
    torch._dynamo.reset()
    plain, expected = step(tmp_path / "plain")
    compiled = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    trainer, changes = step(tmp_path / "compiled", **compiled)
    assert trainer.forecast_engine == "shared_prefix"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    assert furthest(changes, expected) < 1e-4
    for key in ("loss", "forecast/loss"):
        assert trainer.state.log_history[0][key] == pytest.approx(plain.state.log_history[0][key], rel=1e-5), key
    torch._dynamo.reset()
