"""The configurations of τ²-bench hold the paper's settings (Tables 7 and 11)."""

import dataclasses
from pathlib import Path

import pytest
import yaml
from trl import ModelConfig

from cope_trl.cope_config import CoPEConfig
from cope_trl.scripts.train import CoPEScriptArguments

FOLDER = Path(__file__).parents[3] / "configs" / "tau2"
PAPER = {
    "max_turns": 50,
    "max_turns_eval": 50,
    "max_prompt_length": 8192,
    "max_completion_length": 16384,
    "vllm_max_model_length": 24576,
    "max_tokens_per_turn": 1024,
    "learning_rate": 1e-6,
    "beta": 1e-3,
    "entropy_coef": 1e-3,
    "temperature": 1.0,
    "max_steps": 50,
    "num_generations": 8,
    "generation_batch_size": 128,
}


def load(name):
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["cope.yaml", "grpo.yaml"])
def test_the_papers_settings(name):
    config = load(name)
    assert {key: config[key] for key in PAPER} == PAPER
    assert config["environment"] == "tau2"
    known = {field.name for cls in (CoPEConfig, CoPEScriptArguments, ModelConfig) for field in dataclasses.fields(cls)}
    assert set(config) <= known


def test_they_differ_in_forecasting_only():
    cope, grpo = load("cope.yaml"), load("grpo.yaml")
    assert (cope.pop("forecast_coef"), cope.pop("forecast_horizon"), grpo.pop("forecast_coef")) == (0.01, 2, 0.0)
    assert (cope.pop("output_dir"), grpo.pop("output_dir")) == ("runs/tau2-cope", "runs/tau2-grpo")
    assert cope == grpo
