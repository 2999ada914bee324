"""Environments on other hosts, by OpenEnv: serve a registered one, play any one at an address.

`cope-trl envs serve NAME` puts an adapter behind an OpenEnv server, and the registry name `openenv:http://host:port`
stands for the environment served there, one of ours or another text environment. The engine (sessions, messages,
the web application) is the package openenv-core; nothing of it is imported before it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_adapters.openenv.client import OpenEnvEnv, ServedEnv
    from env_adapters.openenv.errors import OpenEnvError, OpenEnvTimeoutError, RemoteEnvironmentError
    from env_adapters.openenv.foreign import ForeignEnv
    from env_adapters.openenv.resolve import environment_class
    from env_adapters.openenv.server import build_app

_MODULE_OF = {
    **dict.fromkeys(("OpenEnvEnv", "ServedEnv"), "client"),
    **dict.fromkeys(("OpenEnvError", "OpenEnvTimeoutError", "RemoteEnvironmentError"), "errors"),
    "ForeignEnv": "foreign",
    "environment_class": "resolve",
    "build_app": "server",
}
__all__ = [
    "ForeignEnv",
    "OpenEnvEnv",
    "OpenEnvError",
    "OpenEnvTimeoutError",
    "RemoteEnvironmentError",
    "ServedEnv",
    "build_app",
    "environment_class",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
