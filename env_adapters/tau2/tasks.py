"""Domains, splits and task ids, as the benchmark ships them (paper A.3)."""

import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from env_adapters.errors import EnvAdapterError, UnknownTaskError, did_you_mean
from env_adapters.tau2.library import data_errors, heavy, load, new_environment

# In the order in which the paper joins them.
DOMAINS = ("retail", "airline", "telecom")
SPLITS = ("train", "test")

_locks = {domain: threading.Lock() for domain in DOMAINS}


@dataclass(frozen=True, slots=True)
class Desk:
    """What all conversations of one domain share.

    Attributes:
        domain: its name.
        tasks: the benchmark's task by task id, in the benchmark's order.
        splits: task ids by split, in the same order.
        policy: the rules the agent has to follow.
        tools: one OpenAI schema a tool of the agent.
        writing_tools: names of the tools that change the database.
    """

    domain: str
    tasks: dict[str, Any]
    splits: dict[str, tuple[str, ...]]
    policy: str
    tools: tuple[dict[str, Any], ...]
    writing_tools: frozenset[str]


def parse_domains(domain: str) -> list[str]:
    """Names of the domains in a text such as `"retail+airline"`.

    Raises:
        EnvAdapterError: a name is unknown, or comes twice.
    """
    names = [name.strip() for name in str(domain).split("+")]
    for name in names:
        if name not in DOMAINS:
            raise EnvAdapterError(
                f"`domain` is {domain!r}, but {name!r} is none of {list(DOMAINS)} (several are joined by '+')."
                + did_you_mean(name, DOMAINS)
            )
    if len(set(names)) < len(names):
        raise EnvAdapterError(f"`domain` is {domain!r}, which names a domain twice; name each once.")
    return names


def desk(domain: str) -> Desk:
    """The shared part of a domain, read at the first call (seconds for telecom, which has 2,285 tasks in all).

    Raises:
        MissingDependencyError, EnvDataError: the package is not installed, or damaged.
    """
    with _locks[domain]:
        return _read(domain)


@functools.cache
def _read(domain: str) -> Desk:
    library = load()
    with heavy(), data_errors(f"the tasks of the domain {domain!r}"):
        # Not asked for by split: the package parses every task each time.
        tasks = {f"{domain}_{task.id}": task for task in library.registry.get_tasks_loader(domain)("base")}
        members = {split: frozenset(ids) for split, ids in library.registry.get_task_splits_loader(domain)().items()}
        splits = {
            split: tuple(task_id for task_id, task in tasks.items() if task.id in members[split]) for split in SPLITS
        }
    environment = new_environment(library, domain)
    tools = environment.get_tools()
    return Desk(
        domain=domain,
        tasks=tasks,
        splits=splits,
        policy=environment.get_policy(),
        tools=tuple(tool.openai_schema for tool in tools),
        writing_tools=frozenset(
            tool.name for tool in tools if environment.tools.tool_type(tool.name) is library.tool_type.WRITE
        ),
    )


def split_ids(split: str, domains: Sequence[str]) -> list[tuple[str, str]]:
    """(domain, task id) of every task of a split, domain after domain."""
    return [(domain, task_id) for domain in domains for task_id in desk(domain).splits[split]]


def find(task_id: str) -> tuple[Desk, Any]:
    """The domain and the benchmark's own task behind a task id such as `"retail_12"`.

    Raises:
        UnknownTaskError: no task has that id.
    """
    domain = task_id.partition("_")[0]
    if domain not in DOMAINS:
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but the tasks of 'tau2' are named after their domain, one of {list(DOMAINS)}, "
            "for example 'retail_12'." + did_you_mean(domain, DOMAINS)
        )
    found = desk(domain)
    if task_id not in found.tasks:
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, which is none of the {len(found.tasks)} tasks of the domain {domain!r}."
            + did_you_mean(task_id, found.tasks)
        )
    return found, found.tasks[task_id]
