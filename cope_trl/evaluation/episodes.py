"""Playing a task dataset once, for evaluation."""

from collections.abc import Callable

from datasets import Dataset

from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.types import TaskRef, Trajectory


def play_dataset(
    player: EpisodePlayer,
    dataset: Dataset,
    limits: EpisodeLimits,
    batch_size: int,
    on_batch: Callable[[list[Trajectory]], None] = lambda batch: None,
) -> list[Trajectory]:
    """Play every row once.

    Args:
        player: plays the episodes.
        dataset: rows with `prompt`, `environment`, `task_id` and (optionally) `family`.
        limits: when an episode is cut.
        batch_size: episodes played at the same time.
        on_batch: called with each finished batch, for progress.

    Returns:
        Trajectories in the order of the rows.
    """
    played: list[Trajectory] = []
    for start in range(0, len(dataset), batch_size):
        rows = [dataset[index] for index in range(start, min(start + batch_size, len(dataset)))]
        tasks = [TaskRef(row["environment"], str(row["task_id"]), row.get("family") or "") for row in rows]
        batch = player.play(tasks, [row["prompt"] for row in rows], limits, [start + i for i in range(len(rows))])
        on_batch(batch)
        played.extend(batch)
    return played
