"""LoRA through `peft_config`: forecasting reaches the adapter and nothing else."""

import pytest
import torch
from support import MIXED_SCRIPTS, make_config, make_model, scripted_trainer

peft = pytest.importorskip("peft")


@pytest.mark.parametrize("engine", ["shared_prefix", "separate"])
def test_forecasting_trains_the_adapter_alone(tmp_path, engine):
    config = make_config(tmp_path, per_device_train_batch_size=8, forecast_coef=1.0, forecast_engine=engine, beta=0.01)
    trainer = scripted_trainer(
        make_model(),
        config,
        (2, 3),
        MIXED_SCRIPTS,
        peft_config=peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    )
    trainer.model.train()
    rows = [dict(row) for row in trainer.train_dataset for _ in range(4)]
    buffer = trainer._generate_and_score_completions(rows)
    buffer["advantages"] = torch.zeros_like(buffer["advantages"])
    buffer["ref_per_token_logps"] = torch.zeros_like(buffer["ref_per_token_logps"])
    trainer.beta, trainer.current_gradient_accumulation_steps = 0.0, 1
    trainer._compute_loss(trainer.model, buffer).backward()
    for name, parameter in trainer.model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) == ("lora_" in name), name


def test_both_engines_agree_with_an_adapter(tmp_path):
    losses = []
    for engine in ("shared_prefix", "separate"):
        config = make_config(tmp_path / engine, per_device_train_batch_size=8, forecast_engine=engine)
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        trainer = scripted_trainer(make_model(), config, (2, 3), MIXED_SCRIPTS, peft_config=lora)
        trainer.train()
        losses.append(trainer.state.log_history[0]["forecast/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
