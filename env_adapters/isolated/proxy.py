"""A registered environment in a process of its own: `isolate("household")` makes the class that plays it there."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import env_adapters
from env_adapters import errors
from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.isolated.process import Limits, RemoteError, Worker
from env_adapters.isolated.starting import confine, start_worker
from env_adapters.protocols import Action, CodeBlock, Protocol, ReActText, ToolCall

HOST = Path(__file__).with_name("textenv_host.py")
PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (ReActText(), CodeBlock(), ToolCall())}
START_SECONDS = 120.0


class IsolatedEnv(TextEnv):
    """Plays the episodes of another environment class in a worker process; make a subclass with [`isolate`].

    The process is started by the first `reset` and kept. The next `reset` replaces it after it died, or after
    `recycle_after` resets, so that memory it loses does not add up. Whatever goes wrong in it is raised as it would be
    in this process where the exception is one of this package's, and as [`RemoteError`] otherwise; a call that passes
    the deadline kills it and raises [`WorkerTimeoutError`].

    Args:
        options: arguments of the isolated class.
    """

    entry_point: ClassVar[str]
    python: ClassVar[str]
    path: ClassVar[tuple[str, ...]]
    limits: ClassVar[Limits]
    deadline: ClassVar[float]
    recycle_after: ClassVar[int | None]

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._lock = threading.Lock()  # of `_worker` and `_closed`, which `kill` changes from another thread
        self._worker: Worker | None = None
        self._resets = 0

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Sequence[Task]:
        cls.check_split(split)
        return [Task(**row) for row in cls._ask("tasks", split=split, options=options)]

    @classmethod
    def check_requirements(cls) -> None:
        cls._ask("check_requirements")

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        cls._ask("check_task_id", task_id=task_id)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, or `None` while there is none."""
        worker = self._worker
        return worker.pid if worker is not None and worker.alive else None

    def admissible_actions(self) -> list[str] | None:
        found = self._call("admissible_actions")
        return None if found is None else list(found)

    def expert_action(self) -> str | None:
        found = self._call("expert_action")
        return None if found is None else str(found)

    def close(self) -> None:
        """End the process and the environment. May be called again, and from any thread."""
        with self._lock:
            super().close()
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()

    def kill(self) -> None:
        """What `close` does: the process ends at once even while a `step` waits for it, which then raises."""
        self.close()

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        with self._lock:
            worker = self._worker
            spent = self.recycle_after is not None and self._resets >= self.recycle_after
            if worker is not None and (spent or not worker.alive):
                self._worker = None
        if worker is not None and self._worker is None:
            worker.stop()
        if self._worker is None:
            self._resets = 0
            self._start()
        self._resets += 1
        return str(self._call("begin", task_id=task_id, seed=seed))

    def _act(self, action: Action) -> Outcome:
        try:
            return Outcome(**self._call("act", text=action.text, target=action.target, is_call=action.is_call))
        except EnvAdapterError:
            self._playing = False  # the state of the world is lost
            raise

    def _current_score(self) -> float:
        return float(self._call("current_score"))

    def _start(self) -> None:
        worker = self._new_worker(self._options)
        with self._lock:
            if not self._closed:
                self._worker = worker
                return
        worker.stop()
        raise EpisodeStateError(f"The {self.name!r} environment was closed while it was to start a task.")

    def _call(self, method: str, **arguments: Any) -> Any:
        worker = self._worker
        if worker is None:
            state = "was closed" if self._closed else "has no task loaded; call `reset` first"
            raise EpisodeStateError(f"The {self.name!r} environment {state}.")
        return _translated(worker, method, self.deadline, **arguments)

    @classmethod
    def _new_worker(cls, options: dict[str, Any]) -> Worker:
        try:
            worker = start_worker(
                f"The process of {cls.name!r}",
                (HOST, "TextEnvHost"),
                {"entry_point": cls.entry_point, "options": options},
                python=cls.python,
                path=cls.path,
                deadline=START_SECONDS,
            )
        except RemoteError as error:
            raise _as_here(error) from error
        try:
            confine(worker, cls.limits)
        except BaseException:
            worker.stop()
            raise
        return worker

    @classmethod
    def _ask(cls, method: str, **arguments: Any) -> Any:
        """Call a method of the class, in a process of its own."""
        worker = cls._new_worker({})
        try:
            return _translated(worker, method, START_SECONDS, **arguments)
        finally:
            worker.stop()


def isolate(
    environment: str,
    *,
    python: str | None = None,
    path: Sequence[str] = (),
    limits: Limits | None = None,
    deadline: float = 60.0,
    recycle_after: int | None = None,
) -> type[IsolatedEnv]:
    """Make a class that plays an environment in a process of its own, with the same episodes.

    Args:
        environment: a registry name (built in, or of a distribution installed there), or `"package.module:Class"`. It
            is looked up and imported in the process only.
        python: an interpreter that has Gymnasium and what the environment needs; by default this one. This package is
            put on its path.
        path: folders to import from there, besides what is installed.
        limits: resource limits of the process.
        deadline: seconds that a `reset` or a `step` may take before the process is killed.
        recycle_after: replace the process after this many resets; `None` keeps it.

    Returns:
        A subclass of [`IsolatedEnv`], to register or to use as it is; its constructor takes that environment's
        arguments.

    Raises:
        UnknownEnvironmentError: no environment has that name.
        EnvAdapterError: the class cannot be loaded there, or has a protocol of its own.
    """
    if not deadline > 0:
        raise EnvAdapterError(f"`deadline` is {deadline!r}; use a number of seconds above 0.")
    if recycle_after is not None and recycle_after < 1:
        raise EnvAdapterError(f"`recycle_after` is {recycle_after!r}; use 1 or more, or None to keep the process.")
    settings: dict[str, Any] = {
        "name": environment,
        "entry_point": environment,
        "python": python or sys.executable,
        "path": (str(Path(env_adapters.__file__).parents[1]), *map(str, path)),
        "limits": limits or Limits(),
        "deadline": deadline,
        "recycle_after": recycle_after,
    }
    loader: type[IsolatedEnv] = type("IsolatedEnv", (IsolatedEnv,), settings)
    described = loader._ask("describe")
    protocol = PROTOCOLS.get(described["protocol"])
    if protocol is None:
        raise EnvAdapterError(
            f"`environment` is {environment!r}, whose protocol {described['protocol']!r} is none of "
            f"{list(PROTOCOLS)}; replies are parsed in this process, so only those can be isolated."
        )
    described.update(protocol=protocol, score_range=tuple(described["score_range"]), splits=tuple(described["splits"]))
    return type("IsolatedEnv", (IsolatedEnv,), {**settings, **described})


def _translated(worker: Worker, method: str, deadline: float, **arguments: Any) -> Any:
    try:
        return worker.call(method, deadline, **arguments)
    except RemoteError as error:
        raise _as_here(error) from error


def _as_here(error: RemoteError) -> EnvAdapterError:
    """The exception to raise here: of the same class where that is one of this package's."""
    kind = getattr(errors, error.kind, None)
    return kind(error.text) if isinstance(kind, type) and issubclass(kind, EnvAdapterError) else error
