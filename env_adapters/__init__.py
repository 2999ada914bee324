"""Text environments for training language agents: one contract, adapters by name, no training code.

Names are imported at first use, so `import env_adapters` costs nothing and needs no environment's dependencies.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_adapters.base import AnyText, Outcome, Task, TextEnv
    from env_adapters.checker import check_env
    from env_adapters.errors import (
        EnvAdapterError,
        EnvContractError,
        EnvDataError,
        EpisodeStateError,
        MissingDependencyError,
        UnknownEnvironmentError,
        UnknownSplitError,
        UnknownTaskError,
    )
    from env_adapters.protocols import Action, CodeBlock, Layout, Protocol, ReActText, ToolCall
    from env_adapters.registry import make, register, registered, resolve
    from env_adapters.trl_environment import as_trl_environment

__all__ = [
    # the contract
    "AnyText",
    "Outcome",
    "Task",
    "TextEnv",
    "check_env",
    # protocols
    "Action",
    "CodeBlock",
    "Layout",
    "Protocol",
    "ReActText",
    "ToolCall",
    # environments by name
    "make",
    "register",
    "registered",
    "resolve",
    # environments for TRL's own trainer
    "as_trl_environment",
    # errors
    "EnvAdapterError",
    "EnvContractError",
    "EnvDataError",
    "EpisodeStateError",
    "MissingDependencyError",
    "UnknownEnvironmentError",
    "UnknownSplitError",
    "UnknownTaskError",
]

_MODULE_OF = {
    **dict.fromkeys(("AnyText", "Outcome", "Task", "TextEnv"), "base"),
    "check_env": "checker",
    **dict.fromkeys(("Action", "CodeBlock", "Layout", "Protocol", "ReActText", "ToolCall"), "protocols"),
    **dict.fromkeys(("make", "register", "registered", "resolve"), "registry"),
    "as_trl_environment": "trl_environment",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF.get(name, 'errors')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
