"""Starting worker processes: afresh in any interpreter, or by forking one that has its imports done."""

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvAdapterError, MissingDependencyError
from env_adapters.isolated.process import Access, Limits, Worker, WorkerEndedError, WorkerError

PROTOCOL = 1  # the version that worker.py must speak too
SCRIPT = Path(__file__).with_name("worker.py")
# Variables a worker inherits; everything else, tokens and keys above all, stays here.
INHERITED = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "JAVA_HOME", "LD_LIBRARY_PATH")
FORK_SECONDS = 60.0


class _Started:
    """A process this one started."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        if self._process.returncode is None:  # not collected yet, so that the number is still its own
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        self._process.wait()


class _Forked:
    """A process that a forking worker started, and which that worker has to collect."""

    def __init__(self, pid: int, parent: "ForkingWorker") -> None:
        self.pid = pid
        self._parent = parent
        self._code: int | None = None
        self._given_up = False

    def poll(self) -> int | None:
        if self._code is None and not self._given_up:
            try:
                self._code = self._parent.call("reap", FORK_SECONDS, pid=self.pid)
            except WorkerError:  # the parent is gone, and its children with it as soon as their pipes close
                self._given_up = True
        return self._code

    def kill(self) -> None:
        if self._code is None and not self._given_up and self._parent.running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Leave the collecting to the next fork: this may run in the garbage collector, in the middle of a call."""
        if self._code is None and not self._given_up:
            self._given_up = True
            self._parent.ended.append(self.pid)


class ForkingWorker(Worker):
    """A worker that forks others: children with its imports done and its memory shared, ready in milliseconds."""

    def __init__(self, *args: Any, control: socket.socket) -> None:
        super().__init__(*args)
        self.ended: list[int] = []
        self._control = control
        self._handing_over = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether its process was not given up; asks nobody, so that it is safe anywhere."""
        return not self._stopped and self._end.alive

    def fork(self, name: str) -> Worker:
        """Fork a child that hosts the same object in the state it has now.

        Raises:
            WorkerError: the worker ended or did not answer.
        """
        ends = [os.pipe(), os.pipe(), os.pipe()]
        (ask_out, ask_in), (tell_out, tell_in), (life_out, life_in) = ends
        errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the worker
        theirs = [ask_out, tell_in, life_out]
        try:
            with self._handing_over:  # the pipes on the socket belong to the call that follows them
                ended, self.ended = self.ended, []
                socket.send_fds(self._control, [b"."], [*theirs, errors.fileno()])
                pid = int(self.call("fork", FORK_SECONDS, reap=ended))
        except BaseException as error:
            for end in (ask_in, tell_out, life_in):
                os.close(end)
            errors.close()
            if isinstance(error, OSError) and not isinstance(error, WorkerError):
                raise WorkerEndedError(f"{self.name} is not running any more.", None, self._stopped) from error
            raise
        finally:
            for end in theirs:
                os.close(end)
        return Worker(name, _Forked(pid, self), (ask_in, tell_out, life_in), errors, self.versions)

    def stop(self) -> None:
        super().stop()
        self._control.close()


def start_worker(
    name: str,
    host: tuple[str | Path, str],
    arguments: Mapping[str, Any],
    *,
    python: str,
    path: Sequence[str] = (),
    packages: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    deadline: float = 120.0,
) -> ForkingWorker:
    """Start a worker in an interpreter and load the object it hosts.

    Args:
        name: what messages call it.
        host: a Python file and the name of the class in it. The file is loaded by its path in that interpreter, so it
            may import only what is installed there.
        arguments: JSON arguments of the class.
        python: the interpreter, Python 3.9 or later.
        path: folders to append to its module search path.
        packages: distributions whose versions to report in `versions["packages"]`.
        environment: variables to set besides [`INHERITED`].
        folder: working folder; by default the root folder.
        deadline: seconds that loading may take.

    Raises:
        MissingDependencyError: the interpreter cannot be started.
        RemoteError: the file or the class raised an exception when it was loaded.
        WorkerError: the process ended, was too slow, or speaks another version of the protocol.
    """
    if os.name != "posix":
        raise EnvAdapterError("Isolated environments need a POSIX system (Linux, macOS); use WSL or a container here.")
    pipes, control, process, errors = _spawn(name, python, environment or {}, folder)
    worker = ForkingWorker(name, _Started(process), pipes, errors, {}, control=control)
    try:
        versions = worker.call(
            "start",
            deadline,
            protocol=PROTOCOL,
            file=str(host[0]),
            name=host[1],
            arguments=dict(arguments),
            path=list(path),
            packages=list(packages),
        )
        if versions["protocol"] != PROTOCOL:
            raise WorkerError(
                f"{name} speaks version {versions['protocol']} of the worker protocol, this process version "
                f"{PROTOCOL}; use the worker.py of the same installation."
            )
    except BaseException:
        worker.stop()
        raise
    worker.versions = versions
    return worker


def confine(worker: Worker, limits: Limits, access: Access | None = None, deadline: float = 60.0) -> dict[str, Any]:
    """Set a worker's resource limits and, with `access`, shut it in; neither can be undone.

    Returns:
        `{"landlock": version}` with `access`, 0 where the kernel has none; else an empty dict.
    """
    shut_in = None if access is None else asdict(access)
    return dict(worker.call("confine", deadline, limits=asdict(limits), access=shut_in))


def _spawn(name: str, python: str, environment: Mapping[str, str], folder: str | None) -> Any:
    kept = {key: value for key, value in os.environ.items() if key in INHERITED}
    # A fixed hash seed: the order of sets, hence of what is printed, is the same in every worker.
    variables = {**kept, "PYTHONHASHSEED": "0", **environment}
    ours, theirs = socket.socketpair()
    life_out, life_in = os.pipe()
    errors = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - closed with the worker
    try:
        process = subprocess.Popen(
            [python, "-s", str(SCRIPT), str(life_out), str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            cwd=folder or "/",
            env=variables,
            pass_fds=(life_out, theirs.fileno()),
            start_new_session=True,  # Ctrl-C is for the trainer, which may want to finish its step
        )
    except OSError as error:
        for end in (life_out, life_in):
            os.close(end)
        ours.close()
        errors.close()
        raise MissingDependencyError(f"{name}: the interpreter {python!r} cannot be started: {error}.") from error
    finally:
        theirs.close()
    os.close(life_out)
    assert process.stdin is not None
    assert process.stdout is not None
    pipes = (os.dup(process.stdin.fileno()), os.dup(process.stdout.fileno()), life_in)
    process.stdin.close()
    process.stdout.close()
    return pipes, ours, process, errors
