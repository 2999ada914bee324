"""Environments in processes of their own: another interpreter, limits on what they use, a deadline on every call.

[`~env_adapters.isolated.starting.start_worker`] hosts any object of another interpreter; [`isolate`] makes an
environment class that plays a registered one so. Neither listens on a socket, and no process outlives the one that
started it.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_adapters.isolated.process import Access, Limits, RemoteError, Worker, WorkerEndedError, WorkerError
    from env_adapters.isolated.process import WorkerTimeoutError as WorkerTimeoutError
    from env_adapters.isolated.proxy import isolate
    from env_adapters.isolated.starting import ForkingWorker, confine, start_worker

_MODULE_OF = {
    **dict.fromkeys(
        ("Access", "Limits", "RemoteError", "Worker", "WorkerEndedError", "WorkerError", "WorkerTimeoutError"),
        "process",
    ),
    "isolate": "proxy",
    **dict.fromkeys(("ForkingWorker", "confine", "start_worker"), "starting"),
}
__all__ = [
    "Access",
    "ForkingWorker",
    "Limits",
    "RemoteError",
    "Worker",
    "WorkerEndedError",
    "WorkerError",
    "WorkerTimeoutError",
    "confine",
    "isolate",
    "start_worker",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
