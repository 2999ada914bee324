"""Task datasets: which tasks to play, as rows a trainer can shuffle and repeat."""

import inspect
import json
import os
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, List, Value

from cope_trl.errors import DataError
from env_adapters.base import Task, TextEnv
from env_adapters.errors import UnknownTaskError, did_you_mean
from env_adapters.registry import resolve

FEATURES = Features(
    {
        "prompt": List({"role": Value("string"), "content": Value("string")}),
        "environment": Value("string"),
        "task_id": Value("string"),
        "family": Value("string"),
    }
)
REQUIRED_COLUMNS = ("prompt", "environment", "task_id")


def load_tasks(
    name: str | Sequence[str],
    split: str = "train",
    *,
    ids: str | os.PathLike[str] | Sequence[str] | None = None,
    limit: int | None = None,
    families: Sequence[str] | None = None,
    shuffle_seed: int | None = None,
    **env_options: Any,
) -> Dataset:
    """Return the tasks of a split as a dataset, one row a task.

    The columns are `prompt` (the environment's standing messages), `environment`, `task_id` and `family`. The order is
    the environment's own, so the same arguments give the same rows everywhere.

    Args:
        name: registry name of the environment, or several; the rows of several follow one another.
        split: one of the environment's splits.
        ids: which tasks, instead of a split: a list, or a file that holds a JSON list of ids or of objects with an
            `item_id` (as AgentGym's files do), or one id a line. They are looked up in all splits and come in the
            order given, repetitions included. For one environment only.
        limit: exactly this many tasks of each environment, the first ones after shuffling.
        families: only tasks of these families.
        shuffle_seed: shuffle with this seed; `None` keeps the order.
        env_options: passed on to the environment's `tasks`.

    Raises:
        UnknownEnvironmentError, UnknownSplitError: the environment or the split does not exist.
        UnknownTaskError: `ids` names tasks the environment does not have.
        DataError: `ids` cannot be read, a family or an option does not exist, fewer tasks than `limit` are left, or
            the environment lists no tasks.
    """
    names = [name] if isinstance(name, str) else list(name)
    if not names:
        raise DataError("`name` is an empty list; name at least one environment.")
    if limit is not None and limit < 1:
        raise DataError(f"`limit` is {limit}; use 1 or more, or None for every task.")
    if ids is not None and len(names) > 1:
        raise DataError(
            f"`ids` was given for the environments {names}, but ids belong to one environment; call `load_tasks` once "
            "for each and join the results with `datasets.concatenate_datasets`."
        )
    rng = None if shuffle_seed is None else random.Random(shuffle_seed)
    rows = []
    for one in names:
        env = _text_env(one)
        tasks = _select(env, split, ids, families, env_options)
        if rng is not None:
            rng.shuffle(tasks)
        if limit is not None:
            if len(tasks) < limit:
                raise DataError(
                    f"`limit` is {limit}, but only {len(tasks)} tasks of {one!r} (split {split!r}) match; lower "
                    "`limit` or ask for more families."
                )
            tasks = tasks[:limit]
        rows += [_row(task, env) for task in tasks]
    if rng is not None and len(names) > 1:
        rng.shuffle(rows)
    return Dataset.from_list(rows, features=FEATURES)


def check_dataset(dataset: Any, argument: str = "train_dataset") -> None:
    """Raise [`DataError`] unless the rows say what to play.

    Args:
        dataset: a map-style or iterable dataset, or a dict of them; only column names and the first row are read.
        argument: how the caller names the dataset, for the message.
    """
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_dataset(part, f"{argument}[{key!r}]")
        return
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise DataError(f"`{argument}` is empty; there is nothing to play.")
    columns = dataset_columns(dataset)
    missing = [column for column in REQUIRED_COLUMNS if column not in columns]
    if missing:
        raise DataError(
            f"`{argument}` has no column {', '.join(map(repr, missing))} (it has {sorted(columns)}). Make it with "
            "`load_tasks(...)`, or add the columns: 'environment' and 'task_id' say what to play, 'prompt' holds the "
            "messages an episode begins with."
        )


def dataset_columns(dataset: Any) -> list[str]:
    """Column names of a map-style or iterable dataset."""
    columns = getattr(dataset, "column_names", None)
    if columns is None:  # a stream does not know its columns before the first row
        columns = list(next(iter(dataset), {}))
    return list(columns)


def read_ids(ids: str | os.PathLike[str] | Sequence[str]) -> list[str]:
    """Return task ids from a list, or from a file in any of the formats that [`load_tasks`] accepts.

    Raises:
        DataError: the file cannot be read, holds something else, or holds nothing.
    """
    if not isinstance(ids, str | os.PathLike):
        found: Iterable[Any] = ids
        source = "the list"
    else:
        source = repr(os.fspath(ids))
        try:
            text = Path(ids).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"`ids` is {source}, which cannot be read as a text file: {error}") from error
        found = _parse_ids(text)
    result: list[str] = []
    for position, entry in enumerate(found):
        item = entry.get("item_id") if isinstance(entry, dict) else entry
        if not isinstance(item, str) or not item:
            raise DataError(
                f"`ids`: entry {position} of {source} is {item!r}; each entry must be a task id or an object with an "
                "'item_id'."
            )
        result.append(item)
    if not result:
        raise DataError(f"`ids`: {source} holds no task id.")
    return result


def _parse_ids(text: str) -> list[Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError:  # one id, or one JSON object, a line
        lines = [line.strip() for line in text.splitlines()]
        return [_parse_line(line) for line in lines if line]
    return parsed if isinstance(parsed, list) else [parsed]


def _parse_line(line: str) -> Any:
    try:
        return json.loads(line) if line.startswith("{") else line
    except json.JSONDecodeError:
        return line


def _text_env(name: str) -> type[TextEnv]:
    env = resolve(name)
    if not issubclass(env, TextEnv):
        raise DataError(
            f"`name` is {name!r}, a {env.__name__} that is no TextEnv and so lists no tasks; make a dataset with the "
            f"columns {list(REQUIRED_COLUMNS)} yourself."
        )
    return env


def _select(
    env: type[TextEnv],
    split: str,
    ids: str | os.PathLike[str] | Sequence[str] | None,
    families: Sequence[str] | None,
    env_options: dict[str, Any],
) -> list[Task]:
    env.check_split(split)
    tasks = _tasks(env, split, env_options) if ids is None else _by_id(env, read_ids(ids), env_options)
    if families is None:
        return tasks
    known = sorted({task.family for task in tasks})
    for family in families:
        if family not in known:
            raise DataError(
                f"`families` names {family!r}, but these tasks of {env.name!r} have the families {known}."
                + did_you_mean(family, known)
            )
    return [task for task in tasks if task.family in families]


def _tasks(env: type[TextEnv], split: str, env_options: dict[str, Any]) -> list[Task]:
    accepted = inspect.signature(env.tasks).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        options = [name for name in accepted if name != "split"]
        for name in env_options:
            if name not in options:
                raise DataError(
                    f"`load_tasks` got the option {name!r}, but the tasks of {env.name!r} have the options {options}."
                    + did_you_mean(name, options)
                )
    return list(env.tasks(split, **env_options))


def _by_id(env: type[TextEnv], ids: list[str], env_options: dict[str, Any]) -> list[Task]:
    # An id file is a split of its own, drawn by others: it may cut across the splits of the adapter.
    known = {task.task_id: task for split in env.splits for task in _tasks(env, split, env_options)}
    unknown = [task_id for task_id in ids if task_id not in known]
    if unknown:
        raise UnknownTaskError(
            f"`ids` names {unknown[0]!r}, which is no task of {env.name!r} ({len(unknown)} of {len(ids)} ids are "
            f"unknown); its ids look like {next(iter(known), '')!r}." + did_you_mean(unknown[0], known)
        )
    return [known[task_id] for task_id in ids]


def _row(task: Task, env: type[TextEnv]) -> dict[str, Any]:
    return {
        "prompt": env.standing_messages(task.task_id),
        "environment": task.environment,
        "task_id": task.task_id,
        "family": task.family,
    }
