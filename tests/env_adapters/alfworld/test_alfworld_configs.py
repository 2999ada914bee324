"""The configurations for ALFWorld load, and hold the paper's values (Table 9)."""

from pathlib import Path

import pytest

from env_adapters.alfworld import AlfWorldEnv

ROOT = Path(__file__).parents[3]
PROCESSES = 8  # of configs/accelerate/zero3_8gpu.yaml
TABLE_9 = {
    "learning_rate": 1e-6,
    "beta": 1e-3,
    "entropy_coef": 1e-3,
    "num_generations": 8,
    "num_iterations": 1,
    "max_turns": 20,
    "max_turns_eval": 30,
    "max_prompt_length": 1024,
    "max_completion_length": 8192,
    "vllm_max_model_length": 16384,
    "max_tokens_per_turn": 512,
    "temperature": 1.0,
}


@pytest.mark.parametrize(("method", "coefficient"), [("cope", 0.01), ("grpo", 0.0)])
def test_values_are_those_of_table_9(method, coefficient, tmp_path):
    from cope_trl.scripts.train import parse

    config = ROOT / f"configs/alfworld/{method}.yaml"
    # What needs a GPU is turned off; everything else is read as it stands.
    off = ["--bf16", "false", "--use_cpu", "true", "--use_vllm", "false", "--report_to", "none"]
    script, _, args, model = parse(["--config", str(config), "--output_dir", str(tmp_path), *off])
    assert script.environment == AlfWorldEnv.name
    assert model.model_name_or_path == "Qwen/Qwen2.5-7B-Instruct"
    assert args.forecast_coef == coefficient
    assert {name: getattr(args, name) for name in TABLE_9} == TABLE_9
    assert (args.max_turns, args.max_turns_eval) == (AlfWorldEnv.max_turns, AlfWorldEnv.max_turns_eval)
    # 16 tasks a batch of rollouts, 2 an optimizer step, 100 batches.
    episodes_a_step = args.per_device_train_batch_size * PROCESSES * args.gradient_accumulation_steps
    assert args.generation_batch_size == 16 * args.num_generations
    assert episodes_a_step == 2 * args.num_generations
    assert args.max_steps == 100 * args.generation_batch_size // episodes_a_step
