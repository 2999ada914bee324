"""The parent's side of a worker process: start it, call it under a deadline, and be certain that it ends.

A worker is a child in a session of its own, spoken to over two pipes (see [`~env_adapters.isolated.worker`] for the
protocol). It ends when it is stopped, when its handle is collected, and when this process ends in whatever way: the
kernel kills its process group as soon as a third pipe, which only this process holds open, breaks.
"""

import contextlib
import json
import os
import select
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Protocol

from env_adapters.errors import EnvAdapterError

# A longer answer is taken for an attack on this process's memory. In bytes.
MAX_ANSWER = 64 << 20


class WorkerError(EnvAdapterError):
    """A worker process could not be started or did not answer as it should."""


class WorkerEndedError(WorkerError):
    """A worker process ended while it was to answer.

    Attributes:
        returncode: its exit code, negative for a signal; `None` where that is unknown.
        stopped: whether this process stopped it on purpose.
    """

    def __init__(self, message: str, returncode: int | None, stopped: bool) -> None:
        super().__init__(message)
        self.returncode = returncode
        self.stopped = stopped


class WorkerTimeoutError(WorkerError, TimeoutError):
    """A worker process did not answer in time and was killed."""


class RemoteError(WorkerError):
    """The hosted object raised an exception; the worker lives on.

    Attributes:
        kind: class name of that exception.
        text: its message.
    """

    def __init__(self, name: str, method: str, kind: str, text: str) -> None:
        super().__init__(f"{name}: `{method}` raised {kind}: {text}")
        self.kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Limits:
    """Resource limits of a worker; `None` sets none.

    Attributes:
        memory_mb: address space, in MB (2^20 bytes).
        file_mb: size of any one file it writes, in MB (2^20 bytes).
        processes: processes and threads the user may have beyond those running at the start (no effect for root).
    """

    memory_mb: int | None = None
    file_mb: int | None = None
    processes: int | None = None


@dataclass(frozen=True, slots=True)
class Access:
    """What a shut-in worker may reach: files and folders to read, folders to read and write, nothing else."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class Process(Protocol):
    """A child process, however it came to be; `kill` ends its whole group."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> None: ...


class Worker:
    """A running worker process that hosts one object.

    Use `start_worker` or `ForkingWorker.fork` to make one. Calls from several threads wait for one another; `stop`
    does not wait.

    Attributes:
        name: what messages call it.
        pid: its process id.
        versions: what it said of itself at the start: `python`, and `packages` by name.
    """

    def __init__(
        self,
        name: str,
        process: Process,
        pipes: "tuple[int, int, int]",
        errors: IO[bytes],
        versions: Mapping[str, Any],
    ) -> None:
        self.name = name
        self.pid = process.pid
        self.versions = versions
        self._process = process
        self._errors = errors
        self._requests, self._answers, _ = pipes
        self._number = 0
        self._stopped = False
        self._lock = threading.Lock()
        for pipe in pipes[:2]:
            os.set_blocking(pipe, False)
        # Also ends the process when the handle is dropped, and at a normal exit.
        self._end = weakref.finalize(self, _end, process, pipes, errors, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether it can be called."""
        return not self._stopped and self._end.alive and self._process.poll() is None

    def call(self, method: str, deadline: float, /, **arguments: Any) -> Any:
        """Call a method of the hosted object with JSON arguments; return its JSON result.

        Args:
            method: its name.
            deadline: seconds until the whole process group is killed.
            arguments: passed by name.

        Raises:
            RemoteError: the method raised.
            WorkerTimeoutError: the deadline passed.
            WorkerEndedError: the process ended, or was ended by `stop`.
            WorkerError: it answered what is not the protocol's.
        """
        with self._lock:
            if self._stopped or not self._end.alive:
                raise WorkerEndedError(f"{self.name} is not running any more.", None, self._stopped)
            self._number += 1
            request = {"id": self._number, "method": method, "arguments": arguments}
            until = time.monotonic() + deadline
            try:
                self._send(json.dumps(request).encode("ascii") + b"\n", until, method)
                answer = self._receive(until, method)
            except _TooLate:
                self._process.kill()
                message = f"{self.name}: `{method}` did not return within {deadline:g} s; the process was killed."
                self._end()
                raise WorkerTimeoutError(message) from None
            except WorkerError:
                self._end()
                raise
            except BaseException:  # a request or an answer may be half way through the pipe
                self._end()
                raise
        if "error" in answer:
            raise RemoteError(self.name, method, str(answer["error"]), str(answer.get("message")))
        return answer["result"]

    def stop(self) -> None:
        """Kill the process group at once, from any thread, also while another waits for an answer. May be repeated."""
        self._stopped = True
        if self._end.alive:
            self._process.kill()
        with self._lock:  # a thread that waits for an answer has been woken by the end of the pipe
            self._end()

    def clear_last_words(self) -> None:
        """Forget what the process printed so far."""
        with contextlib.suppress(OSError, ValueError):
            self._errors.truncate(0)

    def _send(self, data: bytes, until: float, method: str) -> None:
        rest = memoryview(data)
        while rest:
            _wait(self._requests, select.POLLOUT, until)
            try:
                rest = rest[os.write(self._requests, rest) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise self._ended(method) from None

    def _receive(self, until: float, method: str) -> dict[str, Any]:
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            _wait(self._answers, select.POLLIN, until)
            try:
                part = os.read(self._answers, 1 << 20)
            except BlockingIOError:
                continue
            if not part:
                raise self._ended(method)
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER:
                raise WorkerError(f"{self.name}: the answer to `{method}` exceeds {MAX_ANSWER >> 20} MB.")
        try:
            answer = json.loads(b"".join(parts))
            if answer["id"] == self._number and ("result" in answer or "error" in answer):
                return dict(answer)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise WorkerError(f"{self.name}: the answer to `{method}` is not the protocol's: {b''.join(parts)[:200]!r}")

    def _ended(self, method: str) -> WorkerEndedError:
        """The error to raise after the pipe broke, with what the process printed last."""
        until = time.monotonic() + 2.0
        while (code := self._process.poll()) is None and time.monotonic() < until:
            time.sleep(0.01)
        if self._stopped:
            return WorkerEndedError(f"{self.name} was stopped while it was to `{method}`.", code, True)
        said = ""
        with contextlib.suppress(OSError, ValueError):
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 600))
            said = self._errors.read().decode("utf-8", "replace").strip()
        return WorkerEndedError(
            f"{self.name} ended (exit code {code}) while it was to `{method}`. Its last words: {said or 'none'}",
            code,
            False,
        )


class _TooLate(Exception):
    pass


def _wait(descriptor: int, event: int, until: float) -> None:
    """Wait until a pipe can be read or written, or its other end closed."""
    poll = select.poll()  # not `select`, which cannot take descriptors above 1,023
    poll.register(descriptor, event)
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise _TooLate
        if poll.poll(min(left, 60.0) * 1000):
            return


def _end(process: Process, pipes: "tuple[int, int, int]", errors: IO[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy of the handle, not the process
        return
    process.kill()
    for pipe in pipes:
        with contextlib.suppress(OSError):
            os.close(pipe)
    process.wait()
    errors.close()
