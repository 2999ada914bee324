"""Trajectories → branches: windows, the plan-ahead turn around each, and where it leaves the episode."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cope_trl.chat import ChatFormat
from cope_trl.forecast.windows import forecast_windows
from cope_trl.types import Branch, ForecastWindow, Trajectory


@dataclass(frozen=True, slots=True)
class BranchSettings:
    """Which windows a trajectory gives; see the `forecast_*` fields of [`~cope_trl.CoPEConfig`].

    Attributes:
        horizon: K, largest future offset.
        skip_invalid: leave actions without effect out of the targets.
        max_windows: most windows a trajectory, or `None`.
    """

    horizon: int
    skip_invalid: bool = False
    max_windows: int | None = None


def build_branches(
    trajectories: Sequence[Trajectory],
    weights: Sequence[float],
    chat: ChatFormat,
    settings: BranchSettings,
    rng: random.Random,
) -> list[list[tuple[int, Branch]]]:
    """Branches of each trajectory as `(cut, branch)`, none for a weight of 0.

    Args:
        trajectories: B episodes.
        weights: B trajectory weights.
        chat: renders the branches.
        settings: which windows to take.
        rng: draws the windows kept under `max_windows`.
    """
    rows: list[list[tuple[int, Branch]]] = []
    for trajectory, weight in zip(trajectories, weights, strict=True):
        if weight <= 0:
            rows.append([])
            continue
        windows = forecast_windows(
            trajectory,
            settings.horizon,
            skip_invalid=settings.skip_invalid,
            skip_no_call=trajectory.skip_no_call,
            max_windows=settings.max_windows,
            rng=rng,
        )
        rows.append([(chat.history_cut(w.history_end), _branch(trajectory, w, chat)) for w in windows])
    return rows


def _branch(trajectory: Trajectory, window: ForecastWindow, chat: ChatFormat) -> Branch:
    branch = chat.branch(window.targets, trajectory.layout)
    if trajectory.layout == "turns":
        branch = replace(branch, calls=tuple(trajectory.turns[turn].is_call for turn in window.turns))
    return branch
