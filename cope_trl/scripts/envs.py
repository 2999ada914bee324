"""`cope-trl envs`: which environments there are, whether one keeps its contract; its installation, data, server."""

import argparse
import importlib

from rich.console import Console
from rich.table import Table

from env_adapters import registry
from env_adapters.base import TextEnv
from env_adapters.checker import check_env
from env_adapters.errors import EnvAdapterError, MissingDependencyError
from env_adapters.openenv.serve import add_arguments as add_serve_arguments
from env_adapters.openenv.serve import serve

# Commands whose work an environment does itself: the attribute that says where, what it is, and what others are told.
_OWN_COMMANDS = {
    "install": (
        "installer",
        "make the interpreter an environment lives in",
        "lives in this interpreter; its extra is all it needs",
    ),
    "make-data": (
        "data_maker",
        "write the data files an environment plays from",
        "plays from no data files; none need be made",
    ),
}


def main(argv: list[str]) -> None:
    """List environments, check one, install one, write the data files of one, or serve one to other hosts."""
    parser = argparse.ArgumentParser(
        prog="cope-trl envs",
        description="List environments, check one, install one, write the data files of one, or serve one.",
    )
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("list", help="environments by name, and whether they can run here")
    check = commands.add_parser("check", help="test an environment against the contract")
    check.add_argument("name", help="registry name")
    check.add_argument("--task-id", help="task to play; the environment's choice by default")
    add_serve_arguments(commands.add_parser("serve", help="put an environment behind an OpenEnv server"))
    for name, (_, text, _) in _OWN_COMMANDS.items():
        own = commands.add_parser(name, help=text, add_help=False)
        own.add_argument("name", help="registry name")
        own.add_argument("options", nargs=argparse.REMAINDER, help="the environment's own; see --help after NAME")
    args = parser.parse_args(argv)
    console = Console()
    if args.command == "check":
        check_env(registry.make(args.name), task_id=args.task_id)
        console.print(f"{args.name}: keeps the contract.")
    elif args.command == "serve":
        serve(args)
    elif args.command in _OWN_COMMANDS:
        _run_own(args.command, args.name, args.options)
    else:
        console.print(_table())


def _run_own(command: str, name: str, options: list[str]) -> None:
    attribute, _, otherwise = _OWN_COMMANDS[command]
    place = getattr(registry.resolve(name), attribute, None)
    if place is None:
        raise EnvAdapterError(f"`name` is {name!r}, an environment that {otherwise}.")
    module, _, function = place.partition(":")
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
