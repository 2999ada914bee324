"""Trajectories on disk and as datasets: every field kept, one row an episode."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, List, Value

from cope_trl.errors import DataError
from cope_trl.types import TaskRef, Trajectory, Turn

_TURN = {
    "history_end": Value("int64"),
    "start": Value("int64"),
    "end": Value("int64"),
    "reply": Value("string"),
    "action": Value("string"),
    "target": Value("string"),
    "invalid": Value("bool"),
    "is_call": Value("bool"),
    "observation": Value("string"),
    "score": Value("float64"),
    "details": Value("string"),  # JSON: every environment has its own
}
# Columns carry the names of the fields of `Trajectory` and `Turn`; the fields of `TaskRef` are columns of their own.
FEATURES = Features(
    {
        "environment": Value("string"),
        "task_id": Value("string"),
        "family": Value("string"),
        "prompt_ids": List(Value("int32")),
        "completion_ids": List(Value("int32")),
        "completion_mask": List(Value("int8")),
        "turns": List(_TURN),
        "logprobs": List(Value("float64")),
        "layout": Value("string"),
        "success": Value("bool"),
        "score": Value("float64"),
        "truncated": Value("bool"),
        "failed": Value("bool"),
        "error": Value("string"),
        "first_observation": Value("string"),
        "environment_seconds": Value("float64"),
        "skip_no_call": Value("bool"),
    }
)
_SHARD = "step-{step:08d}-rank-{rank:05d}.parquet"
_SHARD_NAME = re.compile(r"step-(\d+)-rank-\d+\.parquet")
_TASK_FIELDS = tuple(field.name for field in fields(TaskRef))


def trajectories_to_dataset(trajectories: Iterable[Trajectory]) -> Dataset:
    """Return a dataset with one row a trajectory and the columns of [`FEATURES`]."""
    return Dataset(_to_table(trajectories))


def dataset_to_trajectories(dataset: Iterable[dict[str, Any]]) -> list[Trajectory]:
    """Return the trajectories a dataset (or any iterable of its rows) was made from.

    Raises:
        DataError: a column is missing.
    """
    return [_from_row(row) for row in dataset]


def read_trajectories(folder: str | os.PathLike[str]) -> list[Trajectory]:
    """Return every trajectory that a [`TrajectoryWriter`] left in a folder, in the order of steps and ranks.

    Raises:
        DataError: the folder holds no shard.
    """
    shards = sorted(Path(folder).glob("*.parquet"))
    if not shards:
        raise DataError(f"`folder` is {os.fspath(folder)!r}, which holds no trajectory shard (*.parquet).")
    return [trajectory for shard in shards for trajectory in dataset_to_trajectories(pq.read_table(shard).to_pylist())]


def step_of(shard: str | os.PathLike[str]) -> int | None:
    """Optimizer step of a [`TrajectoryWriter`]'s shard; `None` for any other file."""
    match = _SHARD_NAME.fullmatch(Path(shard).name)
    return int(match.group(1)) if match else None


class TrajectoryWriter:
    """Writes the trajectories of each step as one Parquet shard a rank.

    A shard appears whole or not at all, and a step that is run again after a resume replaces its shard, so a folder
    never holds half a file or the same step twice. Read the shards with [`read_trajectories`], or as a dataset:

    ```python
    datasets.load_dataset("parquet", data_files="out/trajectories/*.parquet", split="train")
    ```

    Args:
        folder: where the shards go; made if it does not exist.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, trajectories: Sequence[Trajectory], *, step: int, rank: int = 0) -> Path | None:
        """Write one shard and return its path, or `None` where there is nothing to write.

        Args:
            trajectories: the episodes of this rank; none leaves no shard, also not that of an earlier run.
            step: optimizer step the episodes were sampled at.
            rank: process index.
        """
        path = self.folder / _SHARD.format(step=step, rank=rank)
        if not trajectories:  # `load_dataset` cannot read a shard without rows
            path.unlink(missing_ok=True)
            return None
        # Hidden, so that no `*.parquet` pattern meets it; of a fixed name, so that a killed run leaves one at most.
        temporary = path.with_name(f".{path.name}.tmp")
        with open(temporary, "wb") as file:
            pq.write_table(_to_table(trajectories), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(self.folder)
        return path


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; a system that cannot open folders (Windows) needs no such call."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems refuse; the rename itself has happened
        pass
    finally:
        os.close(descriptor)


def _to_table(trajectories: Iterable[Trajectory]) -> pa.Table:
    # The schema carries the features, so that `load_dataset` restores the same column types from a shard.
    return pa.Table.from_pylist([_to_row(t) for t in trajectories], schema=FEATURES.arrow_schema)


def _to_row(trajectory: Trajectory) -> dict[str, Any]:
    row = asdict(trajectory)
    for turn in row["turns"]:
        turn["details"] = json.dumps(turn["details"], default=str)
    return {**row.pop("task"), **row}


def _from_row(row: dict[str, Any]) -> Trajectory:
    missing = [name for name in FEATURES if name not in row]
    if missing:
        raise DataError(
            f"A trajectory row has no column {', '.join(map(repr, missing))}; read datasets made by "
            "`trajectories_to_dataset` or written by `TrajectoryWriter`."
        )
    values = {name: row[name] for name in FEATURES}
    task = TaskRef(**{name: values.pop(name) for name in _TASK_FIELDS})
    values["turns"] = tuple(Turn(**{**turn, "details": json.loads(turn["details"])}) for turn in values["turns"])
    for name in ("prompt_ids", "completion_ids", "completion_mask"):
        values[name] = tuple(values[name])
    if values["logprobs"] is not None:
        values["logprobs"] = tuple(values["logprobs"])
    return Trajectory(task=task, **values)
