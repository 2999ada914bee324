"""The AppWorld adapter."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from env_adapters.appworld.engine import Engine, Episode, acquire, release
from env_adapters.appworld.interpreter import find_python
from env_adapters.appworld.prompt import ACKNOWLEDGEMENT, INSTRUCTION
from env_adapters.appworld.root import SPLITS, check_task, find_root, task_ids
from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.isolated.process import Limits, RemoteError, WorkerEndedError, WorkerTimeoutError
from env_adapters.protocols import Action, CodeBlock

# Seconds between AppWorld's own interruption of a piece of code and the end of the process.
GRACE_SECONDS = 15


class AppWorldEnv(TextEnv):
    """Day-to-day tasks in nine simulated apps, done by writing Python (Trivedi et al., 2024), as the paper plays them.

    An action is the code of the last closed block of a reply; variables live on from one to the next. The first
    observation is the task. An episode ends when the code calls `apis.supervisor.complete_task`, in success if all of
    the task's state tests pass then (paper, B.3); the score is 1 or 0 with it. Invalid is code that ends in a
    traceback.

    The code runs in a process of its own, in AppWorld's own interpreter, in a data root without ground truth; another
    process scores what it left (docs/security.md says what else keeps it in). Code that has to be killed, because it
    went on after AppWorld interrupted it or ended its process, ends the episode with score 0: it is the policy's own
    doing, and what is not scored is not unlearnt. Everything else that goes wrong, scoring included, is raised.

    A task id fixes the whole episode; the seed of `reset` only draws a training task where no id is given.

    Args:
        root: the data root; by default `$APPWORLD_ROOT`, else `~/.cache/cope_trl/appworld`.
        python: the interpreter AppWorld is installed in; by default `$APPWORLD_PYTHON`, else that of
            `~/.cache/cope_trl/appworld-venv`.
        code_timeout: seconds after which a piece of code is interrupted (it can go on if it catches that); it is
            killed 15 seconds later.
        max_output_chars: characters of an output that are shown.
        memory_mb: address space of the process, in MB (2^20 bytes); AppWorld itself takes about half of the default.
        file_mb: size of the largest file it may write, in MB (2^20 bytes).

    Raises:
        EnvAdapterError: a number is out of range.
    """

    name = "appworld"
    protocol = CodeBlock()
    instruction = INSTRUCTION
    acknowledgement = ACKNOWLEDGEMENT
    score_range = (0.0, 1.0)
    splits = tuple(SPLITS)
    max_turns = 30
    max_turns_eval = 30
    installer = "env_adapters.appworld.install:main"

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        python: str | os.PathLike[str] | None = None,
        code_timeout: int = 60,
        max_output_chars: int = 10_000,
        memory_mb: int = 2048,
        file_mb: int = 64,
    ) -> None:
        at_least = {"code_timeout": 1, "max_output_chars": 1, "memory_mb": 512, "file_mb": 1}
        given = {
            "code_timeout": code_timeout,
            "max_output_chars": max_output_chars,
            "memory_mb": memory_mb,
            "file_mb": file_mb,
        }
        for name, value in given.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < at_least[name]:
                raise EnvAdapterError(f"`{name}` is {value!r}; use a whole number from {at_least[name]} on.")
        self._root = root
        self._python = python
        self._code_timeout = code_timeout
        self._max_output_chars = max_output_chars
        self._limits = Limits(memory_mb=memory_mb, file_mb=file_mb, processes=512)
        self._lock = threading.Lock()  # of the next two and `_closed`, which `kill` changes from another thread
        self._engine: Engine | None = None
        self._episode: Episode | None = None
        self.report: dict[str, Any] | None = None

    @classmethod
    def tasks(cls, split: str, root: str | os.PathLike[str] | None = None) -> Sequence[Task]:
        """Tasks of a split in the order of the benchmark's list; starts nothing, imports nothing of AppWorld.

        The family is the scenario, which comes in three variations: the benchmark's scenario goal completion is the
        share of families that were solved in all of them.

        Args:
            split: `"train"` (90 tasks), `"dev"` (57), `"test_normal"` (168) or `"test_challenge"` (417).
            root: as for the class.

        Raises:
            UnknownSplitError: there is no such split.
            EnvDataError: the data root does not hold it, or holds more tasks than the benchmark has.
        """
        cls.check_split(split)
        ids = task_ids(find_root(root), split)
        return [Task(cls.name, task_id, task_id.partition("_")[0], split) for task_id in ids]

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] unless AppWorld's interpreter is there; starts nothing."""
        find_python()

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] unless the default data root has the task; looks at one file."""
        check_task(find_root(), task_id)

    @property
    def player_pid(self) -> int | None:
        """Process id of the player of the current episode, or `None`."""
        episode = self._episode
        return None if episode is None else episode.pid

    @property
    def warm_pid(self) -> int | None:
        """Process id of the warm process that players are forked from, or `None`."""
        engine = self._engine
        return None if engine is None else engine.pid

    def close(self) -> None:
        """End the player and the environment. May be called again, and from any thread."""
        with self._lock:
            super().close()
            episode, self._episode = self._episode, None
            engine, self._engine = self._engine, None
        if episode is not None:
            episode.stop()
        if engine is not None:
            release(engine)

    def kill(self) -> None:
        """What `close` does: the player ends at once even while a `step` waits for it, which then raises."""
        self.close()

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        root = find_root(self._root)
        if task_id is None:
            drawn = task_ids(root, "train")
            task_id = drawn[int(self.np_random.integers(len(drawn)))]
        check_task(root, task_id)
        self.report = None
        episode = self._start(root, task_id)
        try:
            episode.open()
        except BaseException:
            episode.stop()
            raise
        return f"Task: {episode.instruction}"

    def _act(self, action: Action) -> Outcome:
        episode = self._episode
        if episode is None:
            raise EpisodeStateError("The 'appworld' environment was closed.")
        try:
            answer = episode.act(action.text, self._max_output_chars, self._code_timeout + GRACE_SECONDS)
        except EnvAdapterError as error:
            episode.stop()
            self._playing = False
            if _by_the_code(error):
                return Outcome(_observation(_ended(error, self._code_timeout)), done=True, invalid=True)
            raise
        observation = _observation(str(answer["output"]))
        if not answer["completed"]:
            return Outcome(observation, invalid=bool(answer["failed"]))
        self._playing = False
        try:
            self.report = episode.score()
        finally:
            episode.stop()
        success = bool(self.report["success"])
        return Outcome(observation, score=float(success), success=success, done=True, invalid=bool(answer["failed"]))

    def _start(self, root: Path, task_id: str) -> Episode:
        """A new episode in place of the old one; not yet opened, so that `kill` gets through while it is."""
        python = find_python(self._python)
        with self._lock:
            if self._closed:
                raise EpisodeStateError("The 'appworld' environment was closed while it was to start a task.")
            if self._engine is None:
                self._engine = acquire(python, root)
            old = self._episode
            self._episode = Episode(self._engine, task_id, self._limits, self._code_timeout)
            episode = self._episode
        if old is not None:
            old.stop()
        return episode


def _by_the_code(error: EnvAdapterError) -> bool:
    """Whether a call that failed while code ran failed because of the code.

    A process that was killed from outside (by the system when memory ran out, or by an operator) is no fault of the
    code, and neither is a full disk: those are raised, so that the rollout counts as failed and not as wrong.
    """
    if isinstance(error, WorkerTimeoutError):
        return True
    if isinstance(error, WorkerEndedError):
        return not error.stopped and error.returncode not in (None, -9, -15)
    return isinstance(error, RemoteError) and error.kind != "OSError"


def _ended(error: EnvAdapterError, code_timeout: int) -> str:
    if isinstance(error, WorkerTimeoutError):
        return f"Execution failed. The code did not stop within {code_timeout} seconds. The session is over."
    return "Execution failed. The code broke the Python session. The session is over."


def _observation(output: str) -> str:
    """An output as the instruction's worked example shows it."""
    return f"Output:\n```\n{output.rstrip()}\n```"
