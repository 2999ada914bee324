"""Playing a task dataset once, for evaluation."""

from collections.abc import Callable, Sequence

from datasets import Dataset

from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.types import TaskRef, Trajectory


def play_dataset(
    player: EpisodePlayer,
    dataset: Dataset,
    limits: EpisodeLimits,
    seed: str = "0",
    numbers: Sequence[int] | None = None,
    on_finished: Callable[[list[Trajectory]], None] = lambda finished: None,
) -> list[Trajectory]:
    """Play every row once.

    Args:
        player: plays the episodes, as many at a time as it allows.
        dataset: rows with `prompt`, `environment`, `task_id` and (optionally) `family`.
        limits: when an episode is cut.
        seed: of the sampling.
        numbers: a number for each row, which seeds its environment and (with `seed`) its sampling; their position
            unless the rows are part of a larger dataset.
        on_finished: called with the episodes that have just ended, for progress.

    Returns:
        Trajectories in the order of the rows.
    """
    rows = list(dataset)
    numbers = range(len(rows)) if numbers is None else numbers
    return player.play(
        [TaskRef(row["environment"], str(row["task_id"]), row.get("family") or "") for row in rows],
        [row["prompt"] for row in rows],
        limits,
        list(numbers),
        [f"{seed}-{number}" for number in numbers],
        on_finished,
    )
