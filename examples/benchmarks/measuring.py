"""How the benchmarks measure training steps, fit growth, and write tables and files."""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback

from cope_trl import CoPETrainer

OUTPUT_DIR = "out/benchmarks"


class StepTimes(TrainerCallback):
    """Seconds and CUDA memory of every optimizer step, rollout included.

    Args:
        on_step: called after every step with what was logged of it and, under `step/…`, its `seconds`, `cpu_seconds`
            (user and system time of the process) and on CUDA `cuda_mib`, the peak of allocated memory.
        seconds: of training after which no further step is begun.
    """

    def __init__(self, on_step: Callable[[dict[str, float]], None], seconds: float = float("inf")) -> None:
        self._on_step = on_step
        self._until = time.perf_counter() + seconds
        self._started = (0.0, 0.0)
        self._measured: dict[str, float] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._started = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        measured = {}
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            measured["step/cuda_mib"] = torch.cuda.max_memory_allocated() / 2**20
        measured["step/seconds"] = time.perf_counter() - self._started[0]
        measured["step/cpu_seconds"] = time.process_time() - self._started[1]
        self._measured = measured
        if time.perf_counter() > self._until:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in (logs or {}):  # not the summary at the end
            self._on_step({**logs, "step": state.global_step, **self._measured})


def timed_training(trainer: CoPETrainer, **arguments: Any) -> list[dict[str, float]]:
    """Train under [`StepTimes`], whose further arguments may be given; return what it says of every step."""
    steps: list[dict[str, float]] = []
    report = arguments.pop("on_step", lambda step: None)

    def on_step(step: dict[str, float]) -> None:
        steps.append(step)
        report(step)

    trainer.add_callback(StepTimes(on_step, **arguments))
    trainer.train()
    return steps


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """b of the least-squares fit of y = a·x^b in log-log; NaN where a value is not positive.

    Args:
        x, y: (N,) at least two values each.
    """
    if min(*x, *y) <= 0:
        return float("nan")
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; numbers get three significant digits or none after the point."""

    def cell(value: Any) -> str:
        if not isinstance(value, float):
            return str(value)
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"

    lines = [[cell(value) for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in [list(head), ["---"] * len(head), *lines])


def save_json(path: Path, content: Any) -> None:
    """Write a JSON file in one piece, so that whoever is killed while writing leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    partial.replace(path)
