"""The child's side of an isolated environment: hosts one object and answers calls on it, one JSON line a call.

This file is run as a script by whatever interpreter the environment lives in, so it uses the standard library only,
imports nothing of its own package, and runs on Python 3.9 or later:

    python worker.py LIFELINE CONTROL

Requests come from what was the standard input, answers go to what was the standard output; both are moved away first,
so that nothing the hosted code reads or prints can disturb them. `LIFELINE` is the reading end of a pipe that nobody
writes to: when the parent ends, however it ends, the pipe closes and this process is killed. `CONTROL` is a socket
over which the parent hands in the pipes of a forked child.

    request   {"id": 3, "method": "act", "arguments": {"text": "look"}}
    answer    {"id": 3, "result": ...}  or  {"id": 3, "error": "ValueError", "message": "..."}

The methods `start`, `confine`, `fork` and `reap` are the worker's own; every other name is a public method of the
hosted object.
"""

from __future__ import annotations

import fcntl
import gc
import importlib.util
import json
import os
import platform
import signal
import socket
import sys
import threading
from importlib import metadata
from typing import Any

PROTOCOL = 1


def load_file(path: str, name: str) -> Any:
    """Import a Python file under a name of its own, without making its folder importable."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def end_with(lifeline: int) -> None:
    """Have this process group killed when the parent's end of the lifeline closes.

    On Linux the kernel does it, so that no lock held and no loop in C delays it. Elsewhere a thread waits for it.
    """
    group = os.getpgrp()
    if sys.platform == "linux":
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
        os.set_blocking(lifeline, False)
        try:
            gone = os.read(lifeline, 1) == b""
        except BlockingIOError:
            gone = False
        if gone:  # closed before the signal was armed
            os.killpg(group, signal.SIGKILL)
        return

    def wait() -> None:
        os.read(lifeline, 1)
        os.killpg(group, signal.SIGKILL)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


class Server:
    """Answers requests until their pipe closes.

    Args:
        lifeline, control: descriptors, see the module.
    """

    def __init__(self, lifeline: int, control: int) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._answers = os.dup(1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lifeline = lifeline
        self._control: socket.socket | None = socket.socket(fileno=control)
        self._host: Any = None
        self._ended: list[int] = []  # forked children given up, some of which may still be ending
        self._sandbox: Any = None
        # Bound now: hosted code may replace these in their modules.
        self._write = os.write
        self._dumps = json.dumps
        self._loads = json.loads
        end_with(lifeline)

    def run(self) -> None:
        while True:
            line = self._requests.readline()
            if not line:
                os._exit(0)
            request = self._loads(line)
            answer: dict[str, Any] = {"id": request["id"]}
            try:
                result = self._call(request["method"], request["arguments"])
                if result is self:  # the forked child, whose pipes are new and to which nobody has spoken yet
                    continue
                answer["result"] = result
                text = self._dumps(answer)
            except BaseException as error:
                answer.pop("result", None)
                answer["error"] = type(error).__name__
                answer["message"] = str(error)[:10_000]
                text = self._dumps(answer)
            self._send(text)

    def _send(self, text: str) -> None:
        data = memoryview(text.encode("ascii") + b"\n")
        while data:
            data = data[self._write(self._answers, data) :]

    def _call(self, method: str, arguments: dict[str, Any]) -> Any:
        own: Any = {"start": self._start, "confine": self._confine, "fork": self._fork, "reap": self._reap}.get(method)
        if own is not None:
            return own(**arguments)
        if method.startswith("_"):
            raise AttributeError(f"{method!r} is not public")
        return getattr(self._host, method)(**arguments)

    # ---------------------------------------------------------------- the worker's own methods

    def _start(
        self, protocol: int, file: str, name: str, arguments: dict[str, Any], path: list[str], packages: list[str]
    ) -> dict[str, Any]:
        """Load the hosted object, and say what is speaking here."""
        if protocol == PROTOCOL:
            self._sandbox = load_file(
                os.path.join(os.path.dirname(os.path.abspath(__file__)), "sandbox.py"), "_sandbox"
            )
            sys.path.extend(path)  # at the end: this interpreter's own packages come first
            self._host = getattr(load_file(file, "_isolated_host"), name)(**arguments)
        versions: dict[str, str | None] = {}
        for package in packages:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        return {"protocol": PROTOCOL, "python": platform.python_version(), "packages": versions}

    def _confine(self, limits: dict[str, int | None], access: dict[str, list[str]] | None) -> dict[str, Any]:
        """Set resource limits and, where `access` is given, shut the process in; neither can be undone."""
        self._sandbox.set_limits(**limits)
        return {} if access is None else self._sandbox.shut_in(**access)

    def _fork(self, reap: list[int]) -> Any:
        """Fork a child that serves the pipes handed in over the control socket; return its process id."""
        if self._control is None:
            raise RuntimeError("a forked worker does not fork again")
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, 4)
        gc.collect()
        gc.freeze()  # what is alive now stays shared between parent and child
        child = os.fork()
        if child:
            for descriptor in descriptors:
                os.close(descriptor)
            self._ended = [pid for pid in [*self._ended, *reap] if self._reap(pid) is None]
            return child
        os.setsid()
        requests, answers, lifeline, errors = descriptors
        self._requests.close()
        self._control.close()
        os.close(self._answers)
        os.close(self._lifeline)
        os.dup2(errors, 2)
        os.dup2(errors, 1)
        os.close(errors)
        self._requests = os.fdopen(requests, "rb")
        self._answers, self._lifeline, self._control = answers, lifeline, None
        end_with(lifeline)
        return self

    @staticmethod
    def _reap(pid: int) -> int | None:
        """Exit code of a forked child, negative for a signal; `None` while it runs."""
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return 0
        if not ended:
            return None
        return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


if __name__ == "__main__":
    del sys.path[0]  # this folder
    Server(int(sys.argv[1]), int(sys.argv[2])).run()
