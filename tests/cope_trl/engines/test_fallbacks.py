"""Models that cannot share a prefix train with separate sequences, and the log says why; Liger is refused."""

import logging

import pytest
import torch
from support import MIXED_SCRIPTS, VOCABULARY, make_config, make_model, scripted_trainer
from transformers import AutoConfig, AutoModelForCausalLM

from cope_trl.errors import ConfigError

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MODELS = {
    "mistral_window": ("mistral", {"sliding_window": 64}, "sliding window of 64 tokens is shorter than a trajectory"),
    "mistral_no_window": ("mistral", {"sliding_window": None}, None),
    "qwen3_5": ("qwen3_5_text", LINEAR, "layers without softmax attention"),
    "mamba": ("mamba", {"state_size": 8}, "layers without softmax attention"),
}


def build(kind, changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **changes}))


def trained(folder, model, **changes):
    config = make_config(folder, per_device_train_batch_size=8, forecast_coef=0.5, **changes)
    trainer = scripted_trainer(model, config, (2, 3), MIXED_SCRIPTS)
    with torch.no_grad():
        before = [parameter.clone() for parameter in model.parameters()]
    trainer.train()
    moved = sum(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert moved > len(before) / 2
    return trainer


@pytest.mark.parametrize("name", MODELS)
def test_one_real_step_with_the_engine_that_fits(tmp_path, caplog, name):
    kind, changes, reason = MODELS[name]
    with caplog.at_level(logging.INFO, logger="cope_trl.cope_trainer"):
        trainer = trained(tmp_path, build(kind, changes), gradient_checkpointing=False)
    said = [record.getMessage() for record in caplog.records if "Forecasting engine" in record.getMessage()]
    assert len(said) == 1
    if reason is None:
        assert trainer.forecast_engine == "shared_prefix"
        assert said == ["Forecasting engine: shared_prefix (all windows ride in the policy's own forward)."]
    else:
        assert trainer.forecast_engine == "separate"
        assert said[0].startswith("Forecasting engine: separate (one padded sequence a window, because ")
        assert reason in said[0]
    logged = trainer.state.log_history[0]
    assert logged["forecast/windows"] == 8
    assert torch.isfinite(torch.tensor(logged["forecast/loss"]))
    assert logged["forecast/loss"] > 1


@pytest.mark.parametrize("name", ["mistral_window", "qwen3_5", "mamba"])
def test_a_demand_for_the_shared_prefix_is_refused(tmp_path, name):
    kind, changes, reason = MODELS[name]
    config = make_config(tmp_path, forecast_engine="shared_prefix", per_device_train_batch_size=8)
    with pytest.raises(ConfigError) as refused:
        scripted_trainer(build(kind, changes), config, (2, 3), MIXED_SCRIPTS)
    assert reason in str(refused.value)
    assert 'Set `forecast_engine="auto"` or "separate"' in str(refused.value)


def test_a_window_as_long_as_every_trajectory_shares_the_prefix(tmp_path):
    config = make_config(tmp_path, max_prompt_length=100, max_completion_length=200, per_device_train_batch_size=8)
    trainer = scripted_trainer(build("mistral", {"sliding_window": 300}), config, (2, 3), MIXED_SCRIPTS)
    assert trainer.forecast_engine == "shared_prefix"
    config = make_config(tmp_path, max_prompt_length=101, max_completion_length=200, per_device_train_batch_size=8)
    trainer = scripted_trainer(build("mistral", {"sliding_window": 300}), config, (2, 3), MIXED_SCRIPTS)
    assert trainer.forecast_engine == "separate"


def test_flash_attention_gets_separate_sequences(tmp_path, caplog):
    """By its name in the configuration: the kernels need a GPU."""
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    config = make_config(tmp_path, per_device_train_batch_size=8)
    with caplog.at_level(logging.INFO, logger="cope_trl.cope_trainer"):
        trainer = scripted_trainer(model, config, (2, 3), MIXED_SCRIPTS)
    assert trainer.forecast_engine == "separate"
    assert "attention 'flash_attention_2' takes no 4-D mask" in caplog.text


@pytest.mark.parametrize("engine", ["auto", "shared_prefix"])
def test_liger_is_refused_where_the_prefix_would_be_shared(tmp_path, engine):
    with pytest.raises(ConfigError, match=r"`use_liger_kernel` is True .* Set `use_liger_kernel=False`"):
        make_config(tmp_path, use_liger_kernel=True, forecast_engine=engine)
    assert make_config(tmp_path, use_liger_kernel=True, forecast_coef=0.0).use_liger_kernel


def test_an_update_of_its_own_is_refused_under_deepspeed(tmp_path, monkeypatch):
    from cope_trl.cope_trainer import CoPETrainer

    config = make_config(tmp_path, forecast_update="separate", per_device_train_batch_size=8)
    build_up = CoPETrainer._set_up_forecasting

    def under_deepspeed(self, args):
        self.is_deepspeed_enabled = True
        build_up(self, args)

    monkeypatch.setattr(CoPETrainer, "_set_up_forecasting", under_deepspeed)
    with pytest.raises(ConfigError, match=r"`forecast_update` is 'separate', but DeepSpeed .* Use `forecast_update"):
        scripted_trainer(make_model(), config, (2, 3), MIXED_SCRIPTS)
