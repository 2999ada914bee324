"""AppWorld, day-to-day tasks in simulated apps, played by code in an interpreter of its own.

Names are imported at first use, so that the modules that need no environment can be used alone.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_adapters.appworld.env import AppWorldEnv

__all__ = ["AppWorldEnv"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("env_adapters.appworld.env"), name)
