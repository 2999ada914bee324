"""
How time and memory grow with batch, turns, observation length, horizon K and model size.

    python examples/benchmarks/growth.py [--quick] [--output_dir out/benchmarks]

One factor at a time is doubled around a base point; every other length stays. Measured are

- the update: the steps of a real `train()` on scripted episodes, half of them successful (`time/policy` and
  `time/forecast` of its logs, the fastest step after the first);
- the rollout: `evaluate_tasks` with a model that samples replies of known length, on the trainer's own engine.

Each is measured in a process of its own. Memory is the peak of that process above the peak of one that does
everything up to that point: for the update it builds the trainer and plays the episodes, for the rollout it builds
the trainer. A last table holds the branch tokens and changes the number of windows they are divided into.

Prints exponents (least squares in log-log over all values; in brackets, over the last doubling) and writes
growth.json, growth.md and growth.png. Takes about five minutes on 2 cores, `--quick` one.
"""

import argparse
import dataclasses
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import apart
import measuring
import numpy as np
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
from matplotlib.figure import Figure
from transformers import Qwen2ForCausalLM

from cope_trl.chat import ChatFormat


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        batch: episodes, all in one micro-batch.
        turns, observation, thought, action: see [`EpisodeShape`].
        horizon: K.
        windows: `forecast_max_windows`.
        hidden, layers: size of the model.
    """

    batch: int = 2
    turns: int = 8
    observation: int = 64
    thought: int = 16
    action: int = 8
    horizon: int = 2
    windows: int | None = None
    hidden: int = 128
    layers: int = 4

    @property
    def shape(self) -> EpisodeShape:
        return EpisodeShape(self.turns, self.observation, self.thought, self.action, instruction=16)


# Values of each factor, doubled from one to the next; a model's parameters grow with the square of its width.
UPDATE_SWEEPS: dict[str, list[dict[str, int]]] = {
    "batch": [{"batch": n} for n in (2, 4, 8, 16)],
    "turns": [{"turns": n} for n in (4, 8, 16, 32)],
    "observation": [{"observation": n} for n in (64, 128, 256, 512)],
    "horizon + 1": [{"horizon": n - 1} for n in (1, 2, 4, 8)],
    "parameters": [{"hidden": n} for n in (128, 192, 256, 384)],
}
ROLLOUT_SWEEPS = {name: cells for name, cells in UPDATE_SWEEPS.items() if name != "horizon + 1"}
# The same branch tokens in ever fewer windows; see `equal_tokens`.
WINDOWS = (16, 8, 4)
CPU = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}


# ---------------------------------------------------------------- in the process that is measured


def measure_update(report: Callable[[dict], None], cell: Cell, steps: int, threads: int) -> None:
    """Report one cell's update; with 0 steps, the peak of a process that only plays the episodes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(qwen2_config(cell.hidden, cell.layers))
    script = half_winning_script(cell.shape, cell.batch // 2)
    changes = {"max_steps": steps, "forecast_horizon": cell.horizon, "forecast_max_windows": cell.windows}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(model, cell.shape, folder, cell.batch, script, **CPU, **changes)
        if not steps:
            trainer.evaluate_tasks(task_rows(cell.shape, cell.batch))
            report({"peak_mib": apart.peak_mib()})
            return
        later = measuring.timed_training(trainer)[1:]  # the first step sets everything up
        trainer.close()
    best = min(later, key=lambda step: step["time/policy"] + step["time/forecast"])
    report(
        {
            "parameters": model.num_parameters(),
            "windows": best["forecast/windows"],
            "branch_tokens": best["tokens/forecast"],
            "tokens": best["tokens/policy"] + best["tokens/forecast"],
            "seconds": best["time/policy"] + best["time/forecast"],
            "cpu_seconds": best["step/cpu_seconds"],
            "peak_mib": apart.peak_mib(),
        }
    )


def measure_rollout(report: Callable[[dict], None], cell: Cell, steps: int, threads: int) -> None:
    """Report one cell's rollout; with 0 steps, the peak of a process that only builds the trainer."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    tokenizer = word_tokenizer()
    model = Qwen2ForCausalLM(qwen2_config(cell.hidden, cell.layers, tied=False))
    make_reciting(model, tokenizer, cell.shape)
    times, played = [], []
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(model, cell.shape, folder, cell.batch, None, tokenizer, **CPU)
        for _ in range(steps):
            started, cpu = time.perf_counter(), time.process_time()
            played = trainer.evaluate_tasks(task_rows(cell.shape, cell.batch))
            times.append((time.perf_counter() - started, time.process_time() - cpu))
        trainer.close()
    if any(len(episode.turns) != cell.turns for episode in played):
        raise RuntimeError(f"an episode has not {cell.turns} turns: {[len(episode.turns) for episode in played]}")
    seconds, cpu_seconds = min(times, default=(0.0, 0.0))
    report(
        {
            "parameters": model.num_parameters(),
            "tokens": sum(len(episode.ids) for episode in played),
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "peak_mib": apart.peak_mib(),
        }
    )


MEASURES = {"update": measure_update, "rollout": measure_rollout}


# ---------------------------------------------------------------- in the process that asks


def measure(kind: str, cell: Cell, steps: int, threads: int, alone: bool = True) -> dict[str, Any]:
    """One cell with its memory above the process that does nothing of what is measured.

    Raises:
        RuntimeError: a process failed.
    """
    results: list[dict[str, Any]] = []
    run = partial(apart.run_apart, timeout=300.0) if alone else apart.run_here
    for count in (0, steps):
        ending = run(MEASURES[kind], results.append, cell=cell, steps=count, threads=threads)
        if ending.error:
            raise RuntimeError(f"{kind} of {cell} failed:\n{ending.error}")
    idle, done = results
    memory = max(done["peak_mib"] - idle["peak_mib"], 0.0)
    factors = {**dataclasses.asdict(cell), "horizon + 1": cell.horizon + 1}
    return {"kind": kind, **factors, **done, "idle_mib": idle["peak_mib"], "memory_mib": memory}


def sweep(kind: str, factors: dict[str, list[dict[str, int]]], steps: int, threads: int, alone: bool) -> list[dict]:
    """Measure every cell, each different one once; one entry a factor with its rows and exponents."""
    known: dict[Cell, dict[str, Any]] = {}
    fits = []
    for factor, changes in factors.items():
        cells = [Cell(**change) for change in changes]
        for cell in cells:
            if cell not in known:
                known[cell] = row = measure(kind, cell, steps, threads, alone)
                print(f"{kind} {factor}: {row['seconds']:.2f} s, {row['memory_mib']:.0f} MiB", flush=True)
        rows = [known[cell] for cell in cells]
        values = [float(row[factor]) for row in rows]
        measured = {name: [row[name] for row in rows] for name in ("tokens", "seconds", "cpu_seconds", "memory_mib")}
        fit = {name: measuring.exponent(values, column) for name, column in measured.items()}
        last = {name: measuring.exponent(values[-2:], column[-2:]) for name, column in measured.items()}
        fits.append({"kind": kind, "factor": factor, "values": values, "exponents": fit, "last": last, "rows": rows})
    return fits


def equal_tokens(windows: Sequence[int], turns: int) -> list[Cell]:
    """Cells with the same replies and the same number of branch tokens, divided into that many windows a trajectory.

    With K = 0 a window is the request and the action itself. Fewer windows have longer actions, taken from the
    thoughts, so that the trajectories stay as long.

    Args:
        windows: falling numbers, the first at most `turns`.
        turns: of every episode.
    """
    chat = ChatFormat(word_tokenizer())
    request = len(chat.branch(["win"], "list").ids) - 1
    total = windows[0] * (request + 4)
    actions = [round(total / count) - request for count in windows]
    base = Cell(turns=turns, observation=16, horizon=0)
    return [
        dataclasses.replace(base, thought=actions[-1] - action + 1, action=action, windows=count)
        for count, action in zip(windows, actions, strict=True)
    ]


# ---------------------------------------------------------------- what is shown


def growth_table(fits: Sequence[dict[str, Any]], clock: str) -> str:
    """Exponents over all values of a factor and, in brackets, over the last doubling."""

    def both(fit: dict[str, Any], name: str) -> str:
        return f"{fit['exponents'][name]:.2f} ({fit['last'][name]:.2f})"

    rows = [
        (
            fit["kind"],
            fit["factor"],
            ", ".join(f"{value:,.0f}" for value in fit["values"]),
            both(fit, "tokens"),
            both(fit, clock),
            both(fit, "memory_mib"),
            fit["rows"][-1][clock],
            fit["rows"][-1]["memory_mib"],
        )
        for fit in fits
    ]
    head = ["", "factor", "values", "tokens", "time", "memory", "seconds at the last", "MiB there"]
    return measuring.markdown_table(head, rows)


def windows_table(rows: Sequence[dict[str, Any]], clock: str) -> str:
    columns = ("windows", "branch_tokens", "tokens", clock, "idle_mib", "memory_mib")
    head = ["windows", "branch tokens", "all tokens", "seconds", "MiB without an update", "MiB more with one"]
    return measuring.markdown_table(head, [[float(row[name]) for name in columns] for row in rows])


def draw(fits: Sequence[dict[str, Any]], clock: str, path: Path) -> None:
    """Time and memory of update and rollout over each factor, relative to its smallest value."""
    figure = Figure(figsize=(10, 7.5), layout="constrained")
    for index, axes in enumerate(figure.subplots(2, 2).flat):
        kind, name = ("update", "rollout")[index // 2], (clock, "memory_mib")[index % 2]
        for fit in (fit for fit in fits if fit["kind"] == kind):
            x = np.array(fit["values"]) / fit["values"][0]
            label = f"{fit['factor']}$^{{{fit['exponents'][name]:.2f}}}$"
            axes.plot(x, [row[name] for row in fit["rows"]], marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_title(f"{kind}: {'seconds' if name == clock else 'MiB above an idle process'}")
        axes.set_xlabel("factor over its smallest value")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(measuring.OUTPUT_DIR))
    parser.add_argument("--quick", action="store_true", help="two values a factor, one step each, half the layers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=["seconds", "cpu_seconds"], default="seconds", help="for a busy machine")
    parser.add_argument("--here", dest="alone", action="store_false", help="no processes; memory means nothing then")
    args = parser.parse_args(arguments)
    points, smaller, steps = (2, {"layers": 2}, 1) if args.quick else (None, {}, 2)
    updates, rollouts = (
        {name: [{**smaller, **cell} for cell in cells[:points]] for name, cells in factors.items()}
        for factors in (UPDATE_SWEEPS, ROLLOUT_SWEEPS)
    )
    cells = [dataclasses.replace(cell, **smaller) for cell in equal_tokens(WINDOWS, WINDOWS[0])]
    windows = [measure("update", cell, 2, args.threads, args.alone) for cell in cells]
    fits = sweep("update", updates, steps + 1, args.threads, args.alone)  # the first step is not counted
    fits += sweep("rollout", rollouts, steps, args.threads, args.alone)
    result = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "base": dataclasses.asdict(Cell(**smaller)),
        "fits": fits,
        "windows": windows,
    }
    tables = f"{growth_table(fits, args.clock)}\n\n{windows_table(windows, args.clock)}\n"
    print(tables)
    measuring.save_json(args.output_dir / "growth.json", result)
    (args.output_dir / "growth.md").write_text(tables, encoding="utf-8")
    draw(fits, args.clock, args.output_dir / "growth.png")
    return result


if __name__ == "__main__":
    main()
