"""Behaviour cloning of noisy demonstrations by TRL's `SFTTrainer`: the start that GRPO needs to see a success."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from datasets import Dataset

from cope_trl.local_agent.demonstrations import demonstrations
from cope_trl.local_agent.model import build_model, build_tokenizer
from env_adapters import registry
from env_adapters.base import TextEnv


@dataclass
class WarmStartArguments:
    """
    Arguments of the warm start, for an agent that is built on the spot instead of loaded.

    Args:
        warm_start (`bool`, *optional*, defaults to `False`):
            Build a tokenizer and a tiny model and clone the environment's scripted expert before training. Used when
            `model_name_or_path` is not given.
        demonstrations (`int`, *optional*, defaults to `2000`):
            Demonstrations; each training task is demonstrated equally often, up to one.
        demonstration_noise (`float`, *optional*, defaults to `0.5`):
            Probability that a demonstrated action is a random admissible one.
        plan_share (`float`, *optional*, defaults to `0.1`):
            Share of demonstrations that end with a plan-ahead turn.
        warm_start_steps (`int`, *optional*, defaults to `400`):
            Optimizer steps of 8 demonstrations.
        warm_start_learning_rate (`float`, *optional*, defaults to `4e-3`):
            Learning rate.
        hidden_size (`int`, *optional*, defaults to `96`):
            Width of the model.
        layers (`int`, *optional*, defaults to `3`):
            Layers of the model.
    """

    warm_start: bool = field(default=False, metadata={"help": "Build a tiny agent and clone the scripted expert."})
    demonstrations: int = field(default=2000, metadata={"help": "Demonstrations of the training tasks."})
    demonstration_noise: float = field(default=0.5, metadata={"help": "Probability of a random action."})
    plan_share: float = field(default=0.1, metadata={"help": "Share of demonstrations that end with a plan."})
    warm_start_steps: int = field(default=400, metadata={"help": "Optimizer steps of 8 demonstrations."})
    warm_start_learning_rate: float = field(default=4e-3, metadata={"help": "Learning rate of the warm start."})
    hidden_size: int = field(default=96, metadata={"help": "Width of the model."})
    layers: int = field(default=3, metadata={"help": "Layers of the model."})


def warm_start(
    args: WarmStartArguments,
    folder: str | Path,
    *,
    environment: str,
    task_ids: Sequence[str],
    max_turns: int,
    horizon: int,
    seed: int,
    disable_tqdm: bool = False,
) -> Path:
    """Build the agent, train it on demonstrations, and save it.

    Args:
        args: sizes and rates.
        folder: where model and tokenizer go.
        environment: registry name of an environment with a scripted expert.
        task_ids: the training tasks; each is demonstrated equally often, up to one.
        max_turns: longest demonstration, in turns.
        horizon: K of the plan-ahead turns.
        seed: seed of the demonstrations, the weights and the batches.
        disable_tqdm: hide the progress bar.

    Returns:
        The folder, loadable by `from_pretrained`.
    """
    from trl import SFTConfig, SFTTrainer

    shuffled = random.Random(seed).sample(list(task_ids), len(task_ids))
    chosen = list(itertools.islice(itertools.cycle(shuffled), args.demonstrations))
    rows = demonstrations(
        cast(TextEnv, registry.make(environment)),
        chosen,
        noise=args.demonstration_noise,
        plan_share=args.plan_share,
        horizon=horizon,
        max_turns=max_turns,
        seed=seed,
    )
    tokenizer = build_tokenizer(message["content"] for row in rows for message in row["messages"])
    trainer = SFTTrainer(
        model=build_model(tokenizer, hidden_size=args.hidden_size, layers=args.layers, seed=seed),
        args=SFTConfig(
            output_dir=str(folder),
            max_steps=args.warm_start_steps,
            per_device_train_batch_size=8,
            learning_rate=args.warm_start_learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=args.warm_start_steps // 20,
            # The loss runs over observations too: a model this small learns to copy names from what it reads much
            # sooner when it is also asked to predict what it reads.
            assistant_only_loss=False,
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            seed=seed,
            disable_tqdm=disable_tqdm,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(folder))
    return Path(folder)
