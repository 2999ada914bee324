"""`cope-trl envs`: which environments there are, and whether one keeps its contract."""

import argparse

from rich.console import Console
from rich.table import Table

from env_adapters import registry
from env_adapters.base import TextEnv
from env_adapters.checker import check_env
from env_adapters.errors import MissingDependencyError


def main(argv: list[str]) -> None:
    """List environments, or check one of them."""
    parser = argparse.ArgumentParser(prog="cope-trl envs", description="List environments, or check one.")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="environments by name, and whether they can run here")
    check = commands.add_parser("check", help="test an environment against the contract")
    check.add_argument("name", help="registry name")
    check.add_argument("--task-id", help="task to play; the environment's choice by default")
    args = parser.parse_args(argv)
    console = Console()
    if args.command == "check":
        check_env(registry.make(args.name), task_id=args.task_id)
        console.print(f"{args.name}: keeps the contract.")
    else:
        console.print(_table())


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
