"""
What forecasting costs: plain GRPO, shared prefix, separate sequences, on the same trajectories.

    python examples/benchmarks/forecast_overhead.py [--output_dir out/benchmarks]

Five trajectories of 15 turns and 2,100 to 2,450 tokens, three of them successful, go through forward and backward of a
real `CoPETrainer`, one trajectory a micro-batch and all five in one. The modes take turns within one process, so that
a change of the machine's speed hits all alike; what counts are the medians of the ratios within a round, of wall-clock
and of CPU time. The rollout of five such episodes is timed with the trainer's own engine and a model of the same size
that samples replies of that length. Peak memory is that of a process of its own for each mode.

The shared prefix packs the policy's own trajectories too, which plain GRPO pads; so "policy packed" is that forward
without a branch, and forecasting's own cost is what the shared prefix adds to it.

Prints a table and writes forecast_overhead.json and forecast_overhead.png. Takes about four minutes on 2 idle cores.
"""

import argparse
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from apart import peak_mib, run_apart
from common import EpisodeShape, build_trainer, make_reciting, qwen2_config, reply, word_tokenizer
from matplotlib.figure import Figure
from measuring import OUTPUT_DIR, markdown_table, save_json
from transformers import Qwen2ForCausalLM

from cope_trl import CoPETrainer

EPISODES, WON = 5, 3
SHAPE = EpisodeShape(turns=15)
HIDDEN, LAYERS, VOCABULARY = 384, 2, 1024  # the LM head is a tenth of the work, as in models of some billion weights
POLICY, PACKED, SHARED, SEPARATE = "policy only", "policy packed", "shared prefix", "separate sequences"
MODES: dict[str, dict[str, Any]] = {
    POLICY: {"forecast_coef": 0.0},
    PACKED: {"forecast_engine": "shared_prefix"},
    SHARED: {"forecast_engine": "shared_prefix"},
    SEPARATE: {"forecast_engine": "separate", "forecast_batch_size": 4},
}
Batch = dict[str, Any]


def script(row: int, turn: int) -> str:
    """Replies of another length for each trajectory, so that trajectories differ in length."""
    shape = dataclasses.replace(SHAPE, thought=SHAPE.thought + 6 * (row - EPISODES // 2))
    return reply(shape, row < WON, random.Random(f"{row}-{turn}"))


def build(mode: str, folder: str) -> CoPETrainer:
    """A trainer whose episodes are scripted."""
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(qwen2_config(HIDDEN, LAYERS, VOCABULARY))
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, **MODES[mode]}
    trainer = build_trainer(model, SHAPE, folder, EPISODES, script, **settings)
    trainer.model.train()
    return trainer


def rollouts(trainer: CoPETrainer, mode: str = SHARED) -> Batch:
    """One group of episodes, scored and ready for the loss."""
    batch = trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(EPISODES)])
    if mode == PACKED:
        return {name: value[:, :0] if name.startswith("forecast_") else value for name, value in batch.items()}
    return batch


def split(batch: Batch, size: int) -> list[Batch]:
    """Micro-batches of that many trajectories."""
    rows = {name for name, value in batch.items() if isinstance(value, torch.Tensor) and value.dim()}
    return [
        {name: value[first : first + size] if name in rows else value for name, value in batch.items()}
        for first in range(0, EPISODES, size)
    ]


def update(trainer: CoPETrainer, batches: list[Batch]) -> None:
    """Forward and backward over the micro-batches of one optimizer step."""
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = len(batches)
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Wall-clock seconds and CPU seconds of this process."""
    started, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall": time.perf_counter() - started, "cpu": time.process_time() - cpu}


def rollout_seconds(repeats: int = 2) -> dict[str, float]:
    """The fastest rollout of as many tokens, sampled by a model of the same size on the trainer's own engine."""
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    model = Qwen2ForCausalLM(qwen2_config(HIDDEN, LAYERS, VOCABULARY, tied=False))
    make_reciting(model, tokenizer, SHAPE)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(model, SHAPE, folder, EPISODES, None, tokenizer, use_cpu=True, bf16=False)
        trainer.model.train()
        return min((timed(lambda: rollouts(trainer)) for _ in range(repeats)), key=lambda times: times["wall"])


def measure_memory(report: Callable[[float], None], mode: str, size: int, threads: int) -> None:
    """Report the peak of this process, in MiB, over the first micro-batch, which holds a success."""
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(mode, folder)
        update(trainer, split(rollouts(trainer, mode), size)[:1])
    report(peak_mib())


def count_forwarded(trainer: CoPETrainer) -> list[int]:
    """Tokens of each forward from now on, padding included."""
    seen: list[int] = []
    trainer.model.get_input_embeddings().register_forward_hook(lambda _, args, output: seen.append(args[0].numel()))
    return seen


def measure_updates(repeats: int, folder: str) -> dict[tuple[str, int], dict[str, Any]]:
    """For each mode and micro-batch: times of the rounds, tokens forwarded and how many of them are real.

    Separate sequences go once, one trajectory a micro-batch: with all five in one their activations need too much
    memory, and the time of a window does not depend on its micro-batch.
    """
    trainers = {mode: build(mode, folder) for mode in MODES}
    played = {mode: rollouts(trainer, mode) for mode, trainer in trainers.items()}
    real = dict.fromkeys(MODES, 0.0)
    for mode, trainer in trainers.items():
        logged = trainer._means["train"].flush()
        policy = sum(len(episode.ids) for episode in trainer.trajectories)
        real[mode] = policy + (0.0 if mode == PACKED else logged.get("tokens/forecast", 0.0))
        update(trainer, split(played[mode], 1)[-1:])  # a failed episode of each mode warms up
    forwarded = {mode: count_forwarded(trainer) for mode, trainer in trainers.items()}
    cells: dict[tuple[str, int], dict[str, Any]] = {}
    for size in (1, EPISODES):
        batches = {mode: split(batch, size) for mode, batch in played.items()}
        for repeat in range(repeats):
            for mode, trainer in trainers.items():
                if mode == SEPARATE and (repeat or size > 1):
                    continue
                forwarded[mode].clear()
                times = timed(partial(update, trainer, batches[mode]))
                tokens = sum(forwarded[mode])
                cell = cells.setdefault((mode, size), {"rounds": [], "tokens": tokens, "real_tokens": real[mode]})
                cell["rounds"].append(times)
                print(f"micro-batch {size}, round {repeat + 1}, {mode}: {times}", flush=True)
    return cells


def ratio(cell: dict[str, Any], base: dict[str, Any], clock: str) -> float:
    """Median over the rounds that both took part in."""
    return statistics.median(a[clock] / b[clock] for a, b in zip(cell["rounds"], base["rounds"], strict=False))


def summarize(cells: dict[tuple[str, int], dict[str, Any]], rollout: dict[str, float]) -> dict[str, float]:
    """The figures that matter, for each clock; additions are shares of plain GRPO's update or step."""
    result: dict[str, float] = {}
    for clock in ("wall", "cpu"):
        for size in (1, EPISODES):
            policy, packed, shared = (cells[mode, size] for mode in (POLICY, PACKED, SHARED))
            seconds = statistics.median(times[clock] for times in policy["rounds"])
            added = ratio(shared, policy, clock) - 1
            own = ratio(shared, policy, clock) - ratio(packed, policy, clock)
            for name, value in (("over_plain_grpo", added), ("own", own)):
                result[f"update_addition_{name}_micro_batch_{size}_{clock}"] = value
                result[f"step_addition_{name}_micro_batch_{size}_{clock}"] = (
                    value * seconds / (seconds + rollout[clock])
                )
            result[f"update_addition_over_packed_micro_batch_{size}_{clock}"] = ratio(shared, packed, clock) - 1
        separate = ratio(cells[SEPARATE, 1], cells[POLICY, 1], clock) - 1
        result[f"separate_addition_{clock}"] = separate
        own = result[f"update_addition_own_micro_batch_1_{clock}"]
        result[f"forecasting_separate_over_shared_{clock}"] = separate / own
    return result


def draw(cells: dict[tuple[str, int], dict[str, Any]], path: Path) -> None:
    """Time of each mode, as a multiple of the policy's alone."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.add_subplot()
    names = [f"{mode}\nmicro-batch {size}" for mode, size in cells]
    values = [ratio(cell, cells[POLICY, size], "wall") for (_, size), cell in cells.items()]
    axes.bar_label(axes.barh(names, values, color="#1f5fa8"), fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#2b2f36", linewidth=0.8)
    axes.margins(x=0.12)  # room for the figures
    axes.invert_yaxis()
    axes.set_xlabel("time of the update (policy only = 1)")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(OUTPUT_DIR))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    memory: dict[tuple[str, int], float] = {}
    for mode, size in [(mode, size) for size in (1, EPISODES) for mode in MODES]:
        if (mode, size) == (SEPARATE, EPISODES):
            continue  # see `measure_updates`

        def keep(peak: float, key: tuple[str, int] = (mode, size)) -> None:
            memory[key] = peak

        ending = run_apart(measure_memory, keep, timeout=300, mode=mode, size=size, threads=args.threads)
        if ending.error:
            raise SystemExit(f"{mode}, micro-batch {size}: {ending.error}")
    with tempfile.TemporaryDirectory() as folder:
        cells = measure_updates(args.repeats, folder)
    rollout = rollout_seconds()
    rows = []
    for (mode, size), cell in cells.items():
        seconds = statistics.median(times["wall"] for times in cell["rounds"])
        cell["padding"] = 1 - cell["real_tokens"] / cell["tokens"]
        cell["peak_mib"] = memory[mode, size]
        times = [ratio(cell, cells[POLICY, size], clock) for clock in ("wall", "cpu")]
        rows.append([mode, size, cell["tokens"], f"{cell['padding']:.1%}", seconds, *times, cell["peak_mib"]])
    head = ["mode", "micro-batch", "tokens", "padding", "seconds", "time ×", "CPU time ×", "peak MiB"]
    print(markdown_table(head, rows))
    figures = summarize(cells, rollout)
    print(f"rollout: {rollout}")
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    named = {f"{mode}, micro-batch {size}": cell for (mode, size), cell in cells.items()}
    content = {"cells": named, "rollout": rollout, "figures": figures, "threads": args.threads}
    save_json(args.output_dir / "forecast_overhead.json", content)
    draw(cells, args.output_dir / "forecast_overhead.png")


if __name__ == "__main__":
    main()
