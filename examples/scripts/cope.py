"""
Train an agent with CoPE, in the style of TRL's example scripts.

One process:

    python examples/scripts/cope.py --environment scienceworld --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct \
        --output_dir runs/cope --use_peft

Several:

    accelerate launch --config_file configs/accelerate/zero3_8gpu.yaml examples/scripts/cope.py \
        --config configs/scienceworld/cope.yaml
"""

from dataclasses import dataclass, field

from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from cope_trl import CoPEConfig, CoPETrainer, load_tasks, summarize


@dataclass
class ScriptArguments:
    environment: str = field(default="household", metadata={"help": "What to play, by registry name."})
    split: str = field(default="train", metadata={"help": "Split of the tasks."})
    num_tasks: int | None = field(default=None, metadata={"help": "Train on this many tasks."})
    eval_tasks: int = field(default=0, metadata={"help": "Evaluate on this many test tasks at the end; -1 takes all."})


def main(script_args: ScriptArguments, training_args: CoPEConfig, model_args: ModelConfig) -> None:
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
    }
    trainer = CoPETrainer(
        model=model_args.model_name_or_path,
        args=training_args,
        train_dataset=load_tasks(script_args.environment, split=script_args.split, limit=script_args.num_tasks),
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if script_args.eval_tasks:
        limit = script_args.eval_tasks if script_args.eval_tasks > 0 else None
        test = load_tasks(script_args.environment, split="test", limit=limit)
        trainer.accelerator.print(summarize(trainer.evaluate_tasks(test)))
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main(*TrlParser((ScriptArguments, CoPEConfig, ModelConfig)).parse_args_and_config())
