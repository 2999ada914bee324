"""`cope-trl envs`: which environments there are, whether one keeps its contract, and the data files of one."""

import argparse
import importlib

from rich.console import Console
from rich.table import Table

from env_adapters import registry
from env_adapters.base import TextEnv
from env_adapters.checker import check_env
from env_adapters.errors import EnvAdapterError, MissingDependencyError


def main(argv: list[str]) -> None:
    """List environments, check one, or write the data files of one."""
    parser = argparse.ArgumentParser(
        prog="cope-trl envs", description="List environments, check one, or write the data files of one."
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="environments by name, and whether they can run here")
    check = commands.add_parser("check", help="test an environment against the contract")
    check.add_argument("name", help="registry name")
    check.add_argument("--task-id", help="task to play; the environment's choice by default")
    make = commands.add_parser("make-data", help="write the data files an environment plays from", add_help=False)
    make.add_argument("name", help="registry name")
    make.add_argument("options", nargs=argparse.REMAINDER, help="the environment's own options; see --help after NAME")
    args = parser.parse_args(argv)
    console = Console()
    if args.command == "check":
        check_env(registry.make(args.name), task_id=args.task_id)
        console.print(f"{args.name}: keeps the contract.")
    elif args.command == "make-data":
        _make_data(args.name, args.options)
    else:
        console.print(_table())


def _make_data(name: str, options: list[str]) -> None:
    maker = getattr(registry.resolve(name), "data_maker", None)
    if maker is None:
        raise EnvAdapterError(f"`name` is {name!r}, an environment that plays from no data files; none need be made.")
    module, _, function = maker.partition(":")
    getattr(importlib.import_module(module), function)(options)


def _table() -> Table:
    table = Table("Environment", "Splits", "Turns (train, eval)", "Runs here", box=None, header_style="bold")
    for name in registry.registered():
        cls = registry.resolve(name)
        if not issubclass(cls, TextEnv):
            table.add_row(name, "", "", "a Gymnasium environment of its own kind")
            continue
        try:
            cls.check_requirements()
            state = "yes"
        except MissingDependencyError as error:
            state = str(error)
        table.add_row(name, ", ".join(cls.splits), f"{cls.max_turns}, {cls.max_turns_eval}", state)
    return table
