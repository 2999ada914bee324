"""The interpreter AppWorld lives in: where it is, and whether it is there."""

import os
from pathlib import Path

from env_adapters.errors import MissingDependencyError

# The newest on the package index; its dependencies exclude those of a current training stack.
APPWORLD = "appworld==0.1.3.post1"
DEFAULT_VENV = Path("~/.cache/cope_trl/appworld-venv")
INSTALL = "cope-trl envs install appworld"


def venv_python(venv: str | os.PathLike[str]) -> Path:
    """The interpreter of a virtual environment."""
    return Path(venv).expanduser() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def find_python(python: str | os.PathLike[str] | None = None) -> str:
    """The interpreter to run AppWorld in.

    Args:
        python: its path; by default `$APPWORLD_PYTHON`, else that of the default virtual environment.

    Raises:
        MissingDependencyError: there is no such program, or AppWorld is not (fully) installed beside it. Nothing is
            started to find that out.
    """
    given = python or os.environ.get("APPWORLD_PYTHON")
    source = "`python`" if python else "$APPWORLD_PYTHON" if given else "the default virtual environment"
    found = Path(given).expanduser() if given else venv_python(DEFAULT_VENV)
    remedy = f"Make a virtual environment for it with `{INSTALL}`, or name one with `python` or $APPWORLD_PYTHON."
    if not os.access(found, os.X_OK):
        raise MissingDependencyError(
            f"The environment 'appworld' runs in an interpreter of its own, but {source} is {str(found)!r}, which "
            f"is no program. {remedy}"
        )
    package = next(found.parent.parent.glob("lib/python3*/site-packages/appworld"), None)
    if (found.parent.parent / "pyvenv.cfg").exists() and package is None:
        raise MissingDependencyError(
            f"The environment 'appworld' needs the package `{APPWORLD}` in the interpreter {str(found)!r} "
            f"({source}), which does not have it. {remedy}"
        )
    if package is not None and not (package / "apps" / "supervisor").is_dir():
        raise MissingDependencyError(
            f"AppWorld in {str(found)!r} ({source}) lacks the source of its apps: `{found} -m appworld.cli install` "
            f"unpacks it, as does `{INSTALL}`."
        )
    return str(found)
