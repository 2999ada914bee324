"""One session of a server: an environment of its own, played through OpenEnv's `reset`, `step` and `state`."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, NamedTuple

from env_adapters.base import TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.openenv import wire
from env_adapters.openenv.errors import spoken
from env_adapters.openenv.library import load, types


class SpokenError(Exception):
    """An exception of the environment, as OpenEnv sends it: its message alone, which therefore names its class."""


class TextEnvSession:
    """The methods of an OpenEnv `Environment` around one [`TextEnv`]; mixed with that class by [`models`].

    The environment is made by the first `reset`. Every method but `kill` is called in one and the same thread.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    served: ClassVar[type[TextEnv]]
    options: ClassVar[dict[str, Any]]
    deadline: ClassVar[float]
    types: ClassVar[Any]
    observation_class: ClassVar[Any]
    live: ClassVar["weakref.WeakSet[TextEnvSession]"]

    def __init__(self) -> None:
        super().__init__()
        self._env: TextEnv | None = None
        self._episode_id: str | None = None
        self._steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
        """Start an episode.

        Args:
            seed: as `reset` of the environment takes it.
            episode_id: kept for `state`.
            options: as `reset` of the environment takes them: `task_id`, `admissible_actions`.
        """
        self._episode_id, self._steps = episode_id, 0
        with self._told("reset"):
            if self._env is None:
                self._env = self.served(**self.options)
                self.live.add(self)
            observation, info = self._env.reset(seed=seed, options=options)
            return self._observation(None, False, wire.pack_result(observation, False, info))

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        """Play one reply, or answer a question about the state of the episode, which goes on as if not asked."""
        with self._told("step"):
            if self._env is None:
                raise EpisodeStateError("No episode is running in this session; call `reset` first.")
            if action.question is not None:
                return self._observation(None, False, wire.pack_answer(getattr(self._env, action.question)()))
            reply = wire.unpack_reply(action.reply, action.escaped)
            observation, reward, terminated, truncated, info = self._env.step(reply)
            self._steps += 1
            return self._observation(reward, terminated or truncated, wire.pack_result(observation, truncated, info))

    @property
    def state(self) -> Any:
        """Id of the episode and number of its steps so far."""
        return self.types.State(episode_id=self._episode_id, step_count=self._steps)

    def get_metadata(self) -> Any:
        """Name and instruction of the environment."""
        return self.types.EnvironmentMetadata(name=self.served.name, description=self.served.instruction)

    def close(self) -> None:
        """End the environment."""
        env, self._env = self._env, None
        if env is not None:
            env.close()

    def kill(self) -> None:
        """End it at once, from another thread, while this one may hang in a `step`."""
        env, self._env = self._env, None
        if env is not None:
            env.kill()

    def _observation(self, reward: float | None, done: bool, fields: dict[str, Any]) -> Any:
        return self.observation_class(reward=reward, done=done, environment=self.served.name, **fields)

    @contextlib.contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Put a deadline on the call, and tell the client what it raises."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(self.deadline, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except Exception as error:
            raised: Exception = error
            if late.is_set():
                raised = EnvAdapterError(
                    f"`{what}` did not return within {self.deadline:g} s, the server's deadline; the environment was "
                    "ended. Allow more with `cope-trl envs serve --deadline`."
                )
            raise SpokenError(spoken(raised)) from error
        finally:
            timer.cancel()


class Models(NamedTuple):
    """The classes that a server's application is made of: those of OpenEnv with what a text environment adds."""

    action: Any
    observation: Any
    environment: Any


def models(served: type[TextEnv], options: dict[str, Any], deadline: float) -> Models:
    """Make them for one environment.

    Args:
        served: the environment class.
        options: arguments of its constructor.
        deadline: seconds until a `reset` or a `step` is given up on the server.
    """
    core, pydantic = types(), load("pydantic")
    action = pydantic.create_model(
        wire.ACTION,
        __base__=core.Action,
        reply=(str, pydantic.Field(description="the agent's whole reply, in which the environment finds the action")),
        escaped=(
            bool,
            pydantic.Field(False, description="whether `reply` is Base64, for what is no valid Unicode"),
        ),
        question=(
            Literal["admissible_actions", "expert_action"] | None,
            pydantic.Field(None, description="ask this instead of playing `reply`; the episode stays as it is"),
        ),
    )
    observation = pydantic.create_model(
        wire.OBSERVATION,
        __base__=core.Observation,
        text=(str, pydantic.Field("", description="what is shown to the agent")),
        success=(bool, False),
        score=(float, 0.0),
        action=(str, pydantic.Field("", description="what was executed; empty where the reply held no action")),
        invalid=(bool, pydantic.Field(False, description="whether the action had no effect")),
        truncated=(bool, False),
        details=(dict[str, Any], pydantic.Field(default_factory=dict, description="the rest of `info`")),
        answer=(Any, pydantic.Field(None, description="to a question")),
        environment=(str, pydantic.Field("", description="registry name of the environment")),
        exact=(str, pydantic.Field("", description="these fields, JSON in Base64, where they are no Unicode")),
    )
    attributes = {
        "served": served,
        "options": options,
        "deadline": deadline,
        "types": core,
        "observation_class": observation,
        "live": weakref.WeakSet(),
    }
    base = load("openenv.core.env_server.interfaces").Environment
    return Models(action, observation, type("TextEnvEnvironment", (TextEnvSession, base), attributes))
