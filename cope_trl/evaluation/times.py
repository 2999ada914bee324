"""The table that `profile` prints: where the time of a step went."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.table import Table

from cope_trl.metrics import ROLLOUT_TIMES

# What is shown below what; the forecast's share of a joint update is by tokens, see docs/metrics.md.
_ROWS = (
    ("rollout", ROLLOUT_TIMES),
    ("update", ("policy", "forecast", "reference", "optimizer")),
)


def mean_times(history: Iterable[Mapping[str, Any]], before: int = 0) -> tuple[dict[str, float], int]:
    """Seconds a step of each `time/…` metric over a run, and the steps they are of.

    Args:
        history: the Trainer's log entries, each a mean over the steps since the one before.
        before: step the run began at.
    """
    sums: dict[str, float] = {}
    steps = 0
    for entry in history:
        if "time/rollout" not in entry or entry["step"] <= before:
            continue
        count, before = entry["step"] - before, entry["step"]
        steps += count
        for name, value in entry.items():
            if name.startswith("time/"):
                sums[name.removeprefix("time/")] = sums.get(name.removeprefix("time/"), 0.0) + value * count
    return {name: total / max(steps, 1) for name, total in sums.items()}, steps


def time_table(history: Iterable[Mapping[str, Any]], seconds: float, before: int = 0) -> Table:
    """Seconds and share of a step by what was done.

    Args:
        history: the Trainer's log entries.
        seconds: wall time of the run.
        before: step the run began at.
    """
    times, steps = mean_times(history, before)
    whole = seconds / max(steps, 1)
    title = f"Where a step's time goes (mean of {steps} steps, {whole:.2f} s each)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, min_width=len(title))
    table.add_column("")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")

    def row(label: str, value: float) -> None:
        table.add_row(label, f"{value:.3f}", f"{value / whole:.1%}" if whole else "")

    accounted = 0.0
    for group, names in _ROWS:
        parts = {name: times[name] for name in names if times.get(name)}
        total = times.get(group, sum(parts.values()))
        accounted += total
        row(group, total)
        for name, value in parts.items():
            row(f"  {name}", value)
    row("other", max(0.0, whole - accounted))
    return table
