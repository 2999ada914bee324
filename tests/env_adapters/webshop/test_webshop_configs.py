"""configs/webshop: the paper's Table 9, and nothing a training run would refuse."""

import dataclasses
from pathlib import Path

import pytest
import yaml

from env_adapters.webshop import WebShopEnv

ROOT = Path(__file__).parents[3]

# The column "WebShop" of Table 9, and what follows from it: a batch of 16 tasks with 8 rollouts each is 128 episodes,
# a mini-batch of 8 tasks is half of it, 200 batches are 400 optimizer steps.
TABLE_9 = {
    "environment": "webshop",
    "learning_rate": 1e-6,
    "beta": 1e-3,
    "entropy_coef": 1e-3,
    "generation_batch_size": 16 * 8,
    "num_generations": 8,
    "max_steps": 200 * 2,
    "max_turns": 15,
    "max_turns_eval": 15,
    "max_prompt_length": 2048,
    "max_completion_length": 8192,
    "vllm_max_model_length": 16384,
    "max_tokens_per_turn": 512,
    "temperature": 1.0,
}


def read(method: str, environment: str = "webshop") -> dict:
    return yaml.safe_load((ROOT / "configs" / environment / f"{method}.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("method", "coefficient"), [("cope", 0.01), ("grpo", 0.0)])
def test_values_of_the_paper(method, coefficient):
    config = read(method)
    assert {key: config.get(key) for key in TABLE_9} == TABLE_9
    assert config["forecast_coef"] == coefficient
    # On the 8 GPUs they are written for, an optimizer step takes half of the batch.
    step = 8 * config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert step * 2 == config["generation_batch_size"]
    assert (config["max_turns"], config["max_turns_eval"]) == (WebShopEnv.max_turns, WebShopEnv.max_turns_eval)
    assert f"configs/webshop/{method}.yaml" in (ROOT / "configs/webshop" / f"{method}.yaml").read_text(
        encoding="utf-8"
    )


def test_the_two_methods_differ_in_forecasting_only():
    cope, grpo = read("cope"), read("grpo")
    different = {key for key in cope.keys() | grpo.keys() if cope.get(key) != grpo.get(key)}
    assert different == {"forecast_coef", "forecast_horizon", "output_dir"}
    assert cope["forecast_horizon"] == 2
    assert grpo["forecast_coef"] == 0


@pytest.mark.parametrize("method", ["cope", "grpo"])
def test_every_key_is_an_option(method):
    from trl import ModelConfig

    from cope_trl.cope_config import CoPEConfig
    from cope_trl.scripts.train import CoPEScriptArguments

    classes = (CoPEScriptArguments, CoPEConfig, ModelConfig)
    assert set(read(method)) <= {field.name for cls in classes for field in dataclasses.fields(cls)}
