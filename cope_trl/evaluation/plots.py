"""The learning curve of a run, as a picture, from what the Trainer logged."""

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, float]]
# Heading, pattern of the logged key, range of the vertical axis (None: from the data).
Panel = tuple[str, str, tuple[float, float] | None]

# Panels in reading order.
_PANELS: tuple[Panel, ...] = (
    ("Success rate", r"episode/success", (-0.03, 1.03)),
    ("Turns an episode", r"episode/turns", None),
    ("Forecast loss", r"forecast/loss", None),
    ("Forecast NLL by offset k", r"forecast/nll_k(\d+)", None),
)
_TRAIN, _EVAL, _GRID, _TEXT = "#1f5fa8", "#d1495b", "#e3e6ea", "#2b2f36"
_WIDTH, _HEIGHT = 5.0, 3.2  # inches a panel


def learning_curve(
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    window: int | None = None,
) -> Path:
    """Draw a run's success rate, turns and forecast metrics over its optimizer steps; return the picture's path.

    What was logged at each step is drawn pale, its running mean strong; evaluations (`eval_` keys) are drawn as dots.
    Metrics that were never logged have no panel; a history without any gives a picture that says so.

    Args:
        log_history: `trainer.state.log_history`.
        path: where the picture goes; the suffix chooses the format (`.png` if there is none).
        title: heading of the picture.
        window: number of points in the running mean; `None` takes a twelfth of the history.
    """
    return _draw(_PANELS, log_history, path, title, window)


def success_curve(log_history: Sequence[Mapping[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Draw the first panel of [`learning_curve`] alone, the success rate; return the picture's path.

    Args:
        log_history: `trainer.state.log_history`.
        path: where the picture goes; the suffix chooses the format (`.png` if there is none).
    """
    return _draw(_PANELS[:1], log_history, path, None, None)


def _draw(
    wanted: Sequence[Panel],
    log_history: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    title: str | None,
    window: int | None,
) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(heading, limits, found) for heading, key, limits in wanted if (found := _series(log_history, key))]
    columns = min(2, max(1, len(panels)))
    rows = max(1, math.ceil(len(panels) / columns))
    # A figure of its own, without pyplot: no global state, no display, and nothing to close.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows + 0.3), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, (heading, limits, found) in zip(axes, panels, strict=False):
        _draw_panel(axis, heading, limits, found, window)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    if not panels:
        axes[0].text(0.5, 0.5, "No metric was logged.", ha="center", va="center", color=_TEXT)
    if title:
        figure.suptitle(title, color=_TEXT, fontsize=13, fontweight="bold")
    target = Path(path)
    target = target if target.suffix else target.with_suffix(".png")
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)
    return target


def _series(log_history: Sequence[Mapping[str, Any]], pattern: str) -> dict[str, Points]:
    """Points of every logged key that matches, labelled `"training"` or `"k=0"`, `"k=1"` …, then `"eval"`."""
    found: dict[tuple[bool, int], dict[float, float]] = {}
    for position, entry in enumerate(log_history):
        step = float(entry.get("step", position))
        for key, value in entry.items():
            match = re.fullmatch(f"(eval_)?{pattern}", key)
            if match is None or not isinstance(value, int | float) or not math.isfinite(value):
                continue
            evaluation, *offset = match.groups()
            curve = found.setdefault((evaluation is not None, int(offset[0]) if offset else -1), {})
            curve[step] = float(value)  # a step logged again after a resume replaces itself
    return {_label(*curve): sorted(found[curve].items()) for curve in sorted(found)}


def _label(evaluation: bool, offset: int) -> str:
    if offset < 0:
        return "eval" if evaluation else "training"
    return f"eval k={offset}" if evaluation else f"k={offset}"


def _draw_panel(
    axis: "Axes", heading: str, limits: tuple[float, float] | None, found: dict[str, Points], window: int | None
) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    offsets = [label for label in found if label.startswith("k=")]
    for label, points in found.items():
        steps, values = zip(*points, strict=True)
        if label.startswith("eval"):
            axis.plot(steps, values, "o--", color=_EVAL, markersize=5, linewidth=1, label=label)
            continue
        color: Any = _TRAIN
        if label in offsets:
            color = colormaps["viridis"](0.85 * offsets.index(label) / max(1, len(offsets) - 1))
        means = _running_mean(values, window or max(1, len(values) // 12))
        if len(values) == 1:
            axis.plot(steps, values, "o", color=color, markersize=6, label=label)
            continue
        axis.plot(steps, values, color=color, linewidth=1, alpha=0.25)
        axis.plot(steps, means, color=color, linewidth=2, label=label)
    axis.set_title(heading, loc="left", fontsize=11, color=_TEXT)
    axis.set_xlabel("optimizer step", fontsize=9, color=_TEXT)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6, steps=[1, 2, 5, 10]))
    steps_seen = {step for points in found.values() for step, _ in points}
    if len(steps_seen) == 1:  # or the axis would be divided into hundredths of a step
        axis.set_xlim(min(steps_seen) - 1, min(steps_seen) + 1)
    if limits is not None:
        axis.set_ylim(*limits)
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=9, colors=_TEXT, length=0)
    for side in ("top", "right", "left", "bottom"):
        axis.spines[side].set_visible(side == "bottom")
        axis.spines[side].set_color(_GRID)
    if len(found) > 1:
        axis.legend(frameon=False, fontsize=9, labelcolor=_TEXT)


def _running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each point, of fewer at the start."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means
