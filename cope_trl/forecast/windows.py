"""Trajectory to forecast windows: which actions are forecast from which history (paper Eq. 4). Pure Python."""

import random
from collections.abc import Sequence

from cope_trl.errors import ConfigError
from cope_trl.types import ForecastWindow, Trajectory, Turn


def forecast_windows(
    trajectory: Trajectory,
    horizon: int,
    *,
    skip_invalid: bool = False,
    skip_no_call: bool = False,
    max_windows: int | None = None,
    rng: random.Random | None = None,
) -> list[ForecastWindow]:
    """Return the windows of one trajectory, in the order of its turns.

    The window of turn t starts from h_t and holds the actions executed at turns t to t+K, fewer at the end of the
    episode. A turn that executed nothing (an empty action) has no window and is nobody's target; it still counts as an
    offset, so the window around it is shorter, never longer.

    Args:
        trajectory: the episode. Success is not looked at: which episodes count is decided by the loss weights.
        horizon: K, the largest offset in turns; 0 forecasts only the action taken now.
        skip_invalid: leave out actions that had no effect and look past them, to the end of the episode, until K+1
            effective ones are found. A turn whose own action had no effect keeps its window, which then starts with
            the next effective action.
        skip_no_call: drop a window in which no target is a tool call.
        max_windows: at most this many windows, drawn uniformly without replacement; `None` keeps all.
        rng: source of that draw; needed with `max_windows`.

    Returns:
        A list of at most T windows, each with 1 to K+1 targets.

    Raises:
        ConfigError: `horizon` is negative, `max_windows` is below 1, or `rng` is missing.

    Source: paper Eq. 4, the ablations of §8 Q2 (`skip_invalid`) and the τ²-bench settings (`skip_no_call`).
    """
    if horizon < 0:
        raise ConfigError(f"`horizon` is {horizon}; use 0 or more (0 forecasts only the action taken now).")
    if max_windows is not None and max_windows < 1:
        raise ConfigError(f"`max_windows` is {max_windows}; use 1 or more, or None to keep every window.")
    if max_windows is not None and rng is None:
        raise ConfigError(f"`max_windows` is {max_windows} but `rng` is None; pass a seeded random.Random.")

    turns = trajectory.turns
    windows = []
    for t, turn in enumerate(turns):
        if not turn.action:
            continue
        chosen = _effective_turns(turns, t, horizon) if skip_invalid else _next_turns(turns, t, horizon)
        if not chosen or (skip_no_call and not any(turns[i].is_call for i in chosen)):
            continue
        windows.append(
            ForecastWindow(
                turn=t,
                history_end=turn.history_end,
                targets=tuple(turns[i].target for i in chosen),
                turns=tuple(chosen),
            )
        )
    if max_windows is not None and rng is not None and len(windows) > max_windows:
        kept = sorted(rng.sample(range(len(windows)), max_windows))
        windows = [windows[i] for i in kept]
    return windows


def _next_turns(turns: Sequence[Turn], t: int, horizon: int) -> list[int]:
    return [i for i in range(t, min(t + horizon + 1, len(turns))) if turns[i].action]


def _effective_turns(turns: Sequence[Turn], t: int, horizon: int) -> list[int]:
    chosen: list[int] = []
    for i in range(t, len(turns)):
        if turns[i].action and not turns[i].invalid:
            chosen.append(i)
            if len(chosen) == horizon + 1:
                break
    return chosen
