"""The AppWorld configurations against the paper's Table 10."""

from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[3] / "configs" / "appworld"
TABLE_10 = {
    "max_turns": 30,
    "max_turns_eval": 30,
    "max_tokens_per_turn": 1024,
    "max_prompt_length": 4096,
    "max_completion_length": 20480,
    "vllm_max_model_length": 34816,
    "num_generations": 8,
    "generation_batch_size": 16 * 8,
    "per_device_train_batch_size": 1,
    "learning_rate": 1e-6,
    "beta": 1e-2,
    "entropy_coef": 1e-3,
    "temperature": 1.0,
    "max_steps": 100,  # one optimizer step a rollout batch
    "model_name_or_path": "Qwen/Qwen2.5-14B-Instruct",
}


def load(name):
    return yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())


@pytest.mark.parametrize("name", ["cope", "grpo"])
def test_settings_of_table_10(name):
    config = load(name)
    assert {key: config[key] for key in TABLE_10} == TABLE_10
    # On 8 GPUs one optimizer step takes the whole rollout batch (PPO mini-batch of 16 tasks).
    assert config["per_device_train_batch_size"] * 8 * config["gradient_accumulation_steps"] == 128
    assert (config["environment"], config["test_split"]) == ("appworld", "test_normal")


def test_they_differ_in_forecasting_only():
    cope, grpo = load("cope"), load("grpo")
    assert {key for key in cope if cope[key] != grpo.get(key)} == {"output_dir", "forecast_coef", "forecast_horizon"}
    assert (cope["forecast_coef"], cope["forecast_horizon"], grpo["forecast_coef"]) == (0.01, 2, 0.0)
