"""Keeps the episodes of a run on disk, one shard a step and rank."""

import os
from collections.abc import Sequence

from cope_trl.data.trajectories import TrajectoryWriter
from cope_trl.types import Trajectory


class TrajectoryRecorder:
    """Writes episodes as they are played; several batches of one step share a shard.

    Args:
        folder: where training episodes go; evaluation episodes go to `eval` below it.
        rank: index of this process.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.rank = rank
        self._folders = {"train": folder, "eval": os.path.join(folder, "eval")}
        self._writers: dict[str, TrajectoryWriter] = {}
        self._current: dict[str, tuple[int, list[Trajectory]]] = {}

    def record(self, mode: str, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Add episodes of `mode` (`"train"` or `"eval"`) played at optimizer step `step`."""
        known_step, known = self._current.get(mode, (None, []))
        batch = [*known, *trajectories] if known_step == step else list(trajectories)
        self._current[mode] = (step, batch)
        if mode not in self._writers:
            self._writers[mode] = TrajectoryWriter(self._folders[mode])
        self._writers[mode].write(batch, step=step, rank=self.rank)
