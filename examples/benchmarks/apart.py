"""A process of its own for a measurement: peak memory that is its own, and a crash or a hang that ends nothing else.

Imports nothing heavy, since every such process imports it.
"""

import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

# What takes seconds to import; what is not installed is skipped.
STACK = ("trl.trainer.grpo_trainer", "cope_trl.cope_trainer", "deepspeed", "matplotlib.figure")


def peak_mib() -> float:
    """Peak resident memory of this process so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


@dataclass(frozen=True)
class Ending:
    """How a function ended that ran in a process of its own.

    Attributes:
        seconds: until then.
        error: the traceback, or what happened to the process; `None` when the function returned.
    """

    seconds: float
    error: str | None = None


def _report_from_child(connection: Any, function: Callable[..., None], arguments: Mapping[str, Any]) -> None:
    os.setsid()  # so that what it starts can be ended with it
    try:
        function(connection.send, **arguments)
    except BaseException:
        connection.send(Ending(0.0, traceback.format_exc()))
    else:
        connection.send(Ending(0.0))


def run_apart(
    function: Callable[..., None],
    on_report: Callable[[Any], None],
    timeout: float,
    fork: bool = True,
    preload: Sequence[str] = STACK,
    **arguments: Any,
) -> Ending:
    """Call `function(report, **arguments)` in a process of its own, and pass on what it reports while it runs.

    So peak memory is that of this call, and whatever happens to it (a crash, a hang) ends nothing but this call.

    Args:
        function: importable, as for `multiprocessing`.
        on_report: called here with each value given to `report` there.
        timeout: seconds after which the process and what it started are ended.
        fork: fork from a server process that has imported what takes seconds and computed nothing. Not for CUDA,
            which some imports may have touched: `False` starts afresh.
        preload: what that server imports, once in the life of this process.
        arguments: picklable.
    """
    context: Any = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        context.set_forkserver_preload(list(preload))
    started = time.monotonic()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report_from_child, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        while ours.poll(max(0.0, started + timeout - time.monotonic())):
            value = ours.recv()
            if isinstance(value, Ending):
                return Ending(time.monotonic() - started, value.error)
            on_report(value)
        return Ending(time.monotonic() - started, f"not done after {timeout:.0f} s, so it was ended")
    except EOFError:
        process.join()
        return Ending(time.monotonic() - started, f"its process died (exit code {process.exitcode})")
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        ours.close()


def run_here(function: Callable[..., None], on_report: Callable[[Any], None], **arguments: Any) -> Ending:
    """As [`run_apart`], in this process: for a debugger, and where memory does not matter."""
    started = time.monotonic()
    try:
        function(on_report, **arguments)
    except Exception:
        return Ending(time.monotonic() - started, traceback.format_exc())
    return Ending(time.monotonic() - started)
