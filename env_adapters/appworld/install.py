"""`cope-trl envs install appworld`: a virtual environment for AppWorld, with the source of its apps unpacked."""

import argparse
import os
import re
import shlex
import subprocess
import sys
import venv
from pathlib import Path

from env_adapters.appworld.interpreter import APPWORLD, DEFAULT_VENV, find_python, venv_python
from env_adapters.appworld.root import DEFAULT_ROOT, SPLITS, find_root, task_ids
from env_adapters.errors import EnvAdapterError, MissingDependencyError

MIN_PYTHON = (3, 11)  # what AppWorld requires


def main(argv: list[str]) -> None:
    """Make the virtual environment and, with `--data`, download the benchmark's data.

    Args:
        argv: command-line arguments after `cope-trl envs install appworld`.

    Raises:
        MissingDependencyError: the interpreter to make it with is missing or too old.
        EnvAdapterError: the folder is in use for something else, or a command failed.
    """
    parser = argparse.ArgumentParser(
        prog="cope-trl envs install appworld",
        description="Make a virtual environment for AppWorld, whose dependencies exclude those of the trainer.",
    )
    parser.add_argument("--venv", default=str(DEFAULT_VENV), help="folder of the virtual environment (%(default)s)")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter to make it with, 3.11 or later (this one)"
    )
    parser.add_argument("--data", action="store_true", help="also download the benchmark's data (needs the network)")
    parser.add_argument("--root", default=str(DEFAULT_ROOT), help="data root to download it to (%(default)s)")
    args = parser.parse_args(argv)
    folder = Path(args.venv).expanduser().absolute()
    root = Path(args.root).expanduser().absolute()
    install(folder, args.python)
    if args.data:
        root.mkdir(parents=True, exist_ok=True)
        _run([str(venv_python(folder)), "-m", "appworld.cli", "download", "data"], _environment(folder, root))
        counts = ", ".join(f"{split} {len(task_ids(find_root(root), split))}" for split in SPLITS)
        print(f"AppWorld's data is in {root} ({counts} tasks).")
    print(f"AppWorld is installed in {folder}.")
    if folder != DEFAULT_VENV.expanduser().absolute():
        print(f"Tell the environment so: export APPWORLD_PYTHON={shlex.quote(str(venv_python(folder)))}")
    if args.data and root != DEFAULT_ROOT.expanduser().absolute():
        print(f"And where the data is: export APPWORLD_ROOT={shlex.quote(str(root))}")


def install(folder: Path, python: str = sys.executable) -> None:
    """Make the virtual environment, or bring one made earlier to the version wanted.

    Args:
        folder: where to make it; missing, empty, or such an environment.
        python: the interpreter to make it with.

    Raises:
        MissingDependencyError: the interpreter is missing or too old.
        EnvAdapterError: the folder is in use for something else, or a command failed.
    """
    if not (folder / "pyvenv.cfg").exists():
        if folder.exists() and any(folder.iterdir()):
            raise EnvAdapterError(
                f"`--venv` is {str(folder)!r}, a folder that holds something else than a virtual environment; "
                "name one that is empty or does not exist."
            )
        _check_version(python)
        print(f"Making a virtual environment in {folder} ...", flush=True)
        if python == sys.executable:
            venv.create(folder, with_pip=True, symlinks=os.name == "posix")
        else:
            _run([python, "-m", "venv", str(folder)], dict(os.environ))
    own = str(venv_python(folder))
    environment = _environment(folder, folder)
    print(f"Installing {APPWORLD} ...", flush=True)
    _run([own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", APPWORLD], dict(os.environ))
    _run([own, "-m", "appworld.cli", "install"], environment)
    # Compiled once here: the processes that play may not write there.
    _run([own, "-m", "compileall", "-q", _package(folder)], environment, check=False)
    find_python(own)


def _package(folder: Path) -> str:
    return str(next(folder.glob("lib/python3*/site-packages/appworld"), folder))


def _check_version(python: str) -> None:
    try:
        answer = subprocess.run([python, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MissingDependencyError(f"`--python` is {python!r}, which cannot be run: {error}.") from error
    found = re.search(r"Python (\d+)\.(\d+)", answer.stdout + answer.stderr)
    if found is None or (int(found[1]), int(found[2])) < MIN_PYTHON:
        raise MissingDependencyError(
            f"`--python` is {python!r} ({(answer.stdout + answer.stderr).strip()!r}), but AppWorld needs Python "
            f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later; name such an interpreter."
        )


def _environment(folder: Path, root: Path) -> dict[str, str]:
    return {**os.environ, "APPWORLD_ROOT": str(root), "APPWORLD_CACHE": str(folder / "appworld-cache")}


def _run(command: list[str], environment: dict[str, str], *, check: bool = True) -> None:
    try:
        done = subprocess.run(command, env=environment, cwd="/" if os.name == "posix" else None)
    except OSError as error:
        raise MissingDependencyError(f"`{shlex.join(command)}` cannot be run: {error}.") from error
    if check and done.returncode:
        raise EnvAdapterError(
            f"`{shlex.join(command)}` failed with exit code {done.returncode}; its own message is above. Nothing else "
            "was changed: run the same again when the cause is removed."
        )
