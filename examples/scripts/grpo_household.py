"""
Train on chores in a house with TRL's own `GRPOTrainer`, without CoPE: the adapter is its environment.

    python examples/scripts/grpo_household.py --model_name_or_path Qwen/Qwen3-0.6B --output_dir runs/grpo \
        --max_completion_length 2048 --use_peft

The model's chat template must know tools (Qwen2.5 and Qwen3 do). Any environment by name: `--environment webshop`.
"""

from dataclasses import dataclass, field

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, ModelConfig, TrlParser, get_peft_config, get_quantization_config

from env_adapters import as_trl_environment


@dataclass
class ScriptArguments:
    environment: str = field(default="household", metadata={"help": "What to play, by registry name."})
    split: str = field(default="train", metadata={"help": "Split of the tasks."})
    num_tasks: int | None = field(default=None, metadata={"help": "Train on this many tasks."})


def main(script_args: ScriptArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    Environment = as_trl_environment(script_args.environment)
    trainer = GRPOTrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=Dataset.from_list(Environment.rows(script_args.split, limit=script_args.num_tasks)),
        environment_factory=Environment,  # the reward is the environment's: 1.0 on success
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, GRPOConfig, ModelConfig)).parse_args_and_config())
