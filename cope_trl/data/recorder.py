"""Keeps the episodes of a run on disk, one shard a step and rank."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from cope_trl.data.trajectories import TrajectoryWriter, step_of
from cope_trl.types import Trajectory


class TrajectoryRecorder:
    """Writes episodes as they are played; several batches of one step share a shard.

    Args:
        folder: where training episodes go; evaluation episodes go to `eval` below it.
        rank: index of this process.

    Attributes:
        superseded: where [`set_aside`] moves shards, beside the folder. Its name begins with an underscore, so that
            the Trainer leaves it out of what it pushes.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.rank = rank
        self._folders = {"train": folder, "eval": os.path.join(folder, "eval")}
        self.superseded = Path(folder).with_name(f"_superseded_{Path(folder).name}")
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

    def restart(self) -> None:
        """Forget the batches of the current step: the run begins or resumes, and the step will be played again."""
        self._current = {}

    def set_aside(self, step: int) -> int:
        """Move away what a run that begins or resumes at `step` has not played: it would stand beside the real thing.

        Args:
            step: optimizer steps done. Episodes of training steps from there on will be played again; an evaluation
                at that very step came before its checkpoint.

        Returns:
            Number of shards moved, of all ranks.
        """
        moved = 0
        for mode, first in (("train", step), ("eval", step + 1)):
            folder = Path(self._folders[mode])
            target = self.superseded / folder.relative_to(self._folders["train"])
            for leftover in folder.glob(".*.parquet.tmp"):  # of a run killed while it wrote
                leftover.unlink(missing_ok=True)
            for shard in sorted(folder.glob("*.parquet")):
                found = step_of(shard)
                if found is not None and found >= first:
                    target.mkdir(parents=True, exist_ok=True)
                    with contextlib.suppress(FileNotFoundError):  # another machine on the same disk was first
                        os.replace(shard, target / shard.name)
                        moved += 1
        return moved
