"""The engine, openenv-core, imported at first use."""

import importlib
from typing import Any

from env_adapters.errors import MissingDependencyError

INSTALL = "pip install 'cope_trl[openenv]'"


def load(module: str) -> Any:
    """A module of openenv-core, or of a package it brings (the first one takes seconds: it imports a web interface).

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"Environments on other hosts need the package 'openenv-core', of which {module!r} cannot be imported "
            f"({error}): {INSTALL}."
        ) from error


def types() -> Any:
    """The module of OpenEnv's `Action`, `Observation`, `State` and `EnvironmentMetadata`."""
    return load("openenv.core.env_server.types")
