"""Plays what an OpenEnv server serves: sessions that are opened, kept, lost and replaced, and one of our environments.

Classes to play are made for one address each, by [`~env_adapters.openenv.resolve.environment_class`].
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import gymnasium

from env_adapters.base import Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.openenv import wire
from env_adapters.openenv.address import Address, Hosts
from env_adapters.openenv.connection import RefusedError, Session
from env_adapters.openenv.describe import Description
from env_adapters.openenv.errors import OpenEnvError

# Less than the 120 s that a rollout waits for an environment, so that the message is the one with the address.
DEADLINE = 110.0
# A session that has just ended may still count on its server: how long a full one is asked again, in seconds.
FULL_SECONDS = 10.0
_ASK_AGAIN_SECONDS = 0.1


class OpenEnvEnv(TextEnv):
    """An environment on another host, one session of a server for each object.

    The session is opened by the first `reset` and kept. A `reset` that finds it lost opens another one, on any host
    that lets it in; a `step` that finds it lost raises, for the episode is lost too.

    Args:
        deadline: seconds until a `reset` or a `step` is given up.
    """

    address: ClassVar[Address]
    hosts: ClassVar[Hosts]

    def __init__(self, deadline: float = DEADLINE) -> None:
        if not deadline > 0:
            raise EnvAdapterError(f"`deadline` is {deadline!r}; use a number of seconds above 0.")
        self.deadline = deadline
        self._lock = threading.Lock()  # of `_session` and `_closed`, which `kill` changes from another thread
        self._session: Session | None = None

    def close(self) -> None:
        """End the session and the environment. May be called again, and from any thread."""
        self._leave(wait=2.0)

    def kill(self) -> None:
        """End both at once: a `step` that waits for the server raises."""
        self._leave(wait=0.0)

    @property
    def url(self) -> str | None:
        """The host the session is with, or `None` while there is none."""
        session = self._session
        return session.url if session is not None else None

    # ---------------------------------------------------------------- for subclasses

    def _start(self, **arguments: Any) -> Any:
        """Start an episode over there; returns OpenEnv's step result."""
        session = self._session
        if session is not None and session.connected:
            try:
                return session.reset(**arguments)
            except OpenEnvError as error:
                self._lose(session, failed=True)
                if isinstance(error, TimeoutError):  # asking a second time would double the deadline
                    raise
        elif session is not None:
            self._lose(session)
        return self._open(lambda session: session.reset(**arguments))

    def _step(self, action: dict[str, Any]) -> Any:
        """Send one action; returns OpenEnv's step result."""
        session = self._session
        if session is None:
            raise EpisodeStateError(f"The {self.name!r} environment has no session; call `reset` first.")
        try:
            return session.step(action)
        except EnvAdapterError:
            self._playing = False  # the state of the world is lost
            if not session.connected:
                self._lose(session, failed=not self._closed)
            raise

    # ---------------------------------------------------------------- sessions

    def _open(self, begin: Callable[[Session], Any]) -> Any:
        """Begin on the first host that lets a new session in."""
        tried: set[str] = set()
        refusals: list[OpenEnvError] = []
        until = time.monotonic() + min(FULL_SECONDS, self.deadline)
        while True:
            url = self.hosts.take(tried)
            if url is None:
                full = [error for error in refusals if isinstance(error, RefusedError)]
                if not full or time.monotonic() > until:
                    raise _refused(self.address, refusals)
                time.sleep(_ASK_AGAIN_SECONDS)
                tried -= {error.url for error in full}
                refusals = [error for error in refusals if error not in full]
                continue
            tried.add(url)
            session = self._enter(Session(url, self.deadline))
            try:
                session.connect()
                return begin(session)
            except OpenEnvError as error:
                self._lose(session, failed=True)
                if isinstance(error, RefusedError) and error.code != "CAPACITY_REACHED":
                    raise
                refusals.append(error)
            except EpisodeStateError:
                self._lose(session)
                raise

    def _enter(self, session: Session) -> Session:
        with self._lock:
            if not self._closed:
                self._session = session
                return session
        self.hosts.give_back(session.url)
        raise EpisodeStateError(f"The {self.name!r} environment was closed while it was to start a task.")

    def _lose(self, session: Session, failed: bool = False) -> None:
        with self._lock:
            if self._session is not session:
                return
            self._session = None
        session.drop()
        self.hosts.give_back(session.url, failed)

    def _leave(self, wait: float) -> None:
        with self._lock:
            super().close()
            session, self._session = self._session, None
        if session is not None:
            session.drop(wait)
            self.hosts.give_back(session.url)


class ServedEnv(OpenEnvEnv):
    """An environment of this package, or of a third party's adapter, that `cope-trl envs serve` serves.

    Its observations, rewards and `info` are those the environment returns over there; what the class says of itself,
    the server said.
    """

    described: ClassVar[Description]

    @classmethod
    def tasks(cls, split: str, **options: Any) -> Sequence[Task]:
        cls.check_split(split)
        return cls.described.tasks(cls.name, split, options)

    @classmethod
    def check_requirements(cls) -> None:
        cls.described.check_requirements()

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        cls.described.check_task_id(task_id)

    @classmethod
    def standing_messages(cls, task_id: str | None = None) -> list[dict[str, str]]:
        if not cls.described.prompt_by_task:
            return super().standing_messages(task_id)
        return cls.described.prompt(task_id)["messages"]

    @classmethod
    def tools(cls, task_id: str | None = None) -> list[dict[str, Any]] | None:
        return cls.described.prompt(task_id)["tools"] if cls.described.tools_by_task else cls.described.common_tools

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self._closed:
            raise EpisodeStateError(f"`reset` was called on a closed {self.name!r} environment; make a new one.")
        gymnasium.Env.reset(self, seed=seed)
        self._playing = False
        answer = self._start(seed=None if seed is None else int(seed), **dict(options or {}))
        serves = answer.observation.get("environment")
        if serves != self.described.name:
            self.kill()
            raise OpenEnvError(
                f"The OpenEnv server at {self.address.name!r} serves {serves!r} now, where it served "
                f"{self.described.name!r} when this process began; start the process again."
            )
        observation, _, _, _, info = wire.unpack_result(answer.observation, 0.0, False)
        self._playing = True
        return observation, info

    def step(self, reply: str) -> wire.Result:
        if not self._playing:
            raise EpisodeStateError(
                f"`step` was called on the {self.name!r} environment with no episode running; call `reset` first."
            )
        if not isinstance(reply, str):
            raise TypeError(f"`reply` must be a str, got {type(reply).__name__}: {reply!r}.")
        answer = self._step(wire.pack_reply(reply))
        result = wire.unpack_result(answer.observation, answer.reward or 0.0, bool(answer.done))
        self._playing = not answer.done
        return result

    def admissible_actions(self) -> list[str] | None:
        found = self._ask("admissible_actions")
        return None if found is None else list(found)

    def expert_action(self) -> str | None:
        found = self._ask("expert_action")
        return None if found is None else str(found)

    def _ask(self, question: str) -> Any:
        return wire.unpack(self._step({"reply": "", "question": question}).observation)["answer"]


def _refused(address: Address, refusals: Sequence[OpenEnvError]) -> OpenEnvError:
    """One error for all hosts of an address."""
    if len(refusals) == 1 and not isinstance(refusals[0], RefusedError):
        return refusals[0]
    remedy = ""
    if any(isinstance(error, RefusedError) for error in refusals):
        remedy = " Start it with a larger `--max-sessions`, add a host, or play fewer episodes at a time."
    said = " ".join(str(error) for error in refusals)
    return OpenEnvError(f"No OpenEnv server of {address.name!r} has room for one more session. {said}{remedy}")
