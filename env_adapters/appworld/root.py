"""The data root: where the benchmark's data lies, its task lists, and the part of it that a player may see."""

import functools
import os
import re
import shutil
import warnings
from pathlib import Path

from env_adapters.errors import EnvDataError, UnknownTaskError, did_you_mean

DEFAULT_ROOT = Path("~/.cache/cope_trl/appworld")
# Tasks in each split of the benchmark (paper, Appendix A.3, Table 7).
SPLITS = {"train": 90, "dev": 57, "test_normal": 168, "test_challenge": 417}
# Folders of the data that hold no task's ground truth and are read by every world.
SHARED = ("base_dbs", "api_docs")
_TASK_ID = re.compile(r"[A-Za-z0-9]+_[0-9]+", re.ASCII)


def find_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The data root: the folder whose `data` folder holds the benchmark.

    Args:
        root: its path; by default `$APPWORLD_ROOT`, else `~/.cache/cope_trl/appworld`.

    Raises:
        EnvDataError: it does not hold the data.
    """
    given = root or os.environ.get("APPWORLD_ROOT")
    source = "`root`" if root else "$APPWORLD_ROOT" if given else "the default data root"
    found = Path(given or DEFAULT_ROOT).expanduser().absolute()
    missing = [name for name in ("datasets", "tasks", *SHARED) if not (found / "data" / name).is_dir()]
    if missing:
        raise EnvDataError(
            f"AppWorld's data is not in {str(found)!r} ({source}): {', '.join(f'data/{name}' for name in missing)} is "
            "missing. Download it once (its licence does not allow us to pass it on): `cope-trl envs install appworld "
            f"--data`, or `APPWORLD_ROOT={found} /path/to/venv/bin/appworld download data`; then name the folder with "
            "`root` or $APPWORLD_ROOT."
        )
    return found


def task_ids(root: Path, split: str) -> tuple[str, ...]:
    """Ids of a split, in the order of the benchmark's file.

    A root with other counts than the benchmark's is taken for a test root if it has fewer tasks, and a warning says
    so: a result on it is no result on AppWorld. One with more tasks is refused.

    Raises:
        EnvDataError: the split's file is missing or malformed, or lists more tasks than the benchmark has.
    """
    path = root / "data" / "datasets" / f"{split}.txt"
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise EnvDataError(
            f"AppWorld's data root {str(root)!r} has no list of the split {split!r}: {error}."
        ) from error
    return _read_ids(path, split, changed)


@functools.lru_cache(maxsize=64)
def _read_ids(path: Path, split: str, changed: int) -> tuple[str, ...]:
    # A line may carry a tag after a colon.
    lines = [line.partition(":")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    ids = tuple(line for line in lines if line)
    wrong = [line for line in ids if not _TASK_ID.fullmatch(line)]
    if wrong or len(set(ids)) != len(ids):
        what = f"{wrong[0]!r}, which is no task id" if wrong else "a task twice"
        raise EnvDataError(f"AppWorld's task list {str(path)!r} holds {what}; download the data again.")
    if len(ids) > SPLITS[split]:
        raise EnvDataError(
            f"AppWorld's task list {str(path)!r} holds {len(ids)} tasks, but the split {split!r} has {SPLITS[split]}; "
            "download the data again."
        )
    if len(ids) < SPLITS[split]:
        warnings.warn(
            f"AppWorld's split {split!r} has {SPLITS[split]} tasks, but {str(path)!r} lists {len(ids)}: this is not "
            "the benchmark's data, and results on it compare with nobody's.",
            stacklevel=2,
        )
    return ids


def check_task(root: Path, task_id: str) -> None:
    """Raise [`UnknownTaskError`] unless the root has the task; looks at one file."""
    if _TASK_ID.fullmatch(task_id) and (root / "data" / "tasks" / task_id / "specs.json").is_file():
        return
    known = [name for name in os.listdir(root / "data" / "tasks") if _TASK_ID.fullmatch(name)]
    raise UnknownTaskError(
        f"`task_id` is {task_id!r}, but AppWorld's data root {str(root)!r} has no such task; its {len(known)} "
        f"tasks are folders of data/tasks.{did_you_mean(task_id, known)}"
    )


def lay_out_for_play(root: Path, task_id: str, folder: Path) -> None:
    """Make a data root for playing one task: a copy of the task without its ground truth, links to what is shared.

    Args:
        root: the data root.
        task_id: the task.
        folder: an empty or missing folder.
    """
    task = folder / "data" / "tasks" / task_id
    try:
        shutil.copytree(root / "data" / "tasks" / task_id / "dbs", task / "dbs")
        shutil.copy(root / "data" / "tasks" / task_id / "specs.json", task)
    except OSError as error:
        raise EnvDataError(f"AppWorld's task {task_id!r} in {str(root)!r} cannot be read: {error}.") from error
    for name in SHARED:
        (folder / "data" / name).symlink_to(root / "data" / name)


def lay_out_for_scoring(root: Path, play: Path, folder: Path) -> None:
    """Make a data root for scoring: a link to all of the data, and one to what the player left."""
    folder.mkdir(parents=True)
    (folder / "data").symlink_to(root / "data")
    (folder / "experiments").symlink_to(play / "experiments")
