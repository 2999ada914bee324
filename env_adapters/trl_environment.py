"""Any adapter as an environment that TRL's own `GRPOTrainer` plays: one tool, `act(action: str)`, and a reward.

TRL reads the class by reflection: every public method but `reset` and `get_reward` becomes a tool, and the docstring
its schema. Nothing of TRL is imported here.
"""

import contextlib
import copyreg
import json
import re
import weakref
from functools import partial
from types import new_class
from typing import Any, ClassVar

import gymnasium

from env_adapters.base import TextEnv
from env_adapters.errors import USER_MISTAKES, EnvAdapterError
from env_adapters.protocols import CodeBlock, Protocol, ReActText, ToolCall
from env_adapters.registry import resolve

OVER = "The episode is over; `act` has no effect any more."
FAILED = "The environment broke down; the episode is over."
FENCED = "The code was not run: it holds ``` fences or thinking tags, which a block of code cannot. Write it without."
DEFAULT_TURNS = 30  # where neither the caller nor the environment names a limit


class _MadeByName(type):
    """Class of the classes made here; they are pickled as the call that made them."""

    origin: tuple[str, int | None, dict[str, Any]]


class TrlEnvironment(metaclass=_MadeByName):
    """One environment as TRL plays it: `reset(**row)`, tool calls, `get_reward()`. Made by [`as_trl_environment`].

    Attributes:
        success: whether the episode has ended in the environment's own success.
        score: the benchmark's graded score so far (a metric only, never the reward).
        turns: calls of `act` while the episode ran.
        error: what broke, or `None`; such an episode has no reward.
    """

    env_class: ClassVar[type[Any]]
    env_options: ClassVar[dict[str, Any]]
    max_turns: ClassVar[int]
    how_to_act: ClassVar[str] = (
        "You act by calling the tool `act`: its argument `action` is what you reply. Its result is the next "
        "observation. Call it once a turn until the episode is over."
    )

    def __init__(self) -> None:
        self._env: gymnasium.Env[str, str] | None = None
        self._closing: weakref.finalize[..., Any] | None = None
        self._start()

    # ---------------------------------------------------------------- what TRL calls

    def reset(self, **row: Any) -> str:
        """Start an episode; return the first observation, which TRL appends to the last message of the prompt.

        Args:
            **row: the dataset's row. `task_id` says what to play; without one any task is, drawn with `seed`.

        Raises:
            UnknownTaskError, MissingDependencyError: the user's mistakes; any other error fails the episode only.
        """
        self._start()
        try:
            if self._env is None:
                self._env = self.env_class(**self.env_options)
                self._closing = weakref.finalize(self, _close, self._env)
            options = {} if row.get("task_id") is None else {"task_id": str(row["task_id"])}
            observation, _ = self._env.reset(seed=row.get("seed"), options=options)
        except USER_MISTAKES:
            raise
        except Exception as error:
            return self._fail(error)
        self._playing = True
        return observation

    def get_reward(self) -> float | None:
        """Return 1.0 after success and 0.0 otherwise (paper B.3); `None`, which TRL leaves out, after a failure."""
        return None if self.error is not None else float(self.success)

    def act(self, action: str) -> str:
        """Reply to the environment.

        Args:
            action: The reply.

        Returns:
            The next observation.
        """
        return self._play(action)

    # ---------------------------------------------------------------- for the user

    @classmethod
    def rows(cls, split: str = "train", limit: int | None = None, **task_options: Any) -> list[dict[str, Any]]:
        """Return the tasks of a split as dataset rows, for `datasets.Dataset.from_list`.

        Args:
            split: one of the environment's splits.
            limit: the first so many tasks only.
            **task_options: passed to the environment's `tasks`, such as `size="tiny"` in the household.

        Returns:
            Rows with `prompt` (the standing messages, with how to act by the tool, and a user message that the first
            observation is appended to), `environment`, `task_id` and `family`.

        Raises:
            EnvAdapterError: the environment lists no tasks.
            UnknownSplitError: there is no such split.
        """
        env = cls.env_class
        if not issubclass(env, TextEnv):
            raise EnvAdapterError(
                f"The environment {cls.origin[0]!r} is a {env.__name__}, which is no TextEnv and so lists no tasks; "
                "make the rows yourself: 'prompt' holds the messages an episode begins with, 'task_id' what to play."
            )
        env.check_split(split)
        columns = ("environment", "task_id", "family")
        return [
            {"prompt": cls._prompt(env, task.task_id), **{name: getattr(task, name) for name in columns}}
            for task in env.tasks(split, **task_options)[:limit]
        ]

    # ---------------------------------------------------------------- one episode

    @classmethod
    def _prompt(cls, env: type[TextEnv], task_id: str) -> list[dict[str, str]]:
        first, *others = env.standing_messages(task_id)
        parts = [first["content"], cls.how_to_act]
        tools = env.tools(task_id)
        if tools:  # TRL shows the model the tool `act` only
            parts.append("The calls you can make:\n" + "\n".join(json.dumps(tool) for tool in tools))
        return [{**first, "content": "\n\n".join(parts)}, *others, {"role": "user", "content": ""}]

    def _start(self) -> None:
        self.success, self.score, self.turns = False, 0.0, 0
        self.error: str | None = None
        self._playing = False

    def _reply(self, action: str) -> str | None:
        """The reply in which the environment's protocol finds the action; `None` where none can carry it."""
        return action

    def _play(self, action: Any) -> str:
        if not self._playing or self._env is None:
            return OVER if self.error is None else FAILED
        # Models also write a call as the JSON object itself.
        reply = self._reply(action if isinstance(action, str) else json.dumps(action))
        observation, over = FENCED, False
        if reply is not None:
            try:
                observation, reward, terminated, truncated, info = self._env.step(reply)
                self.score = float(info.get("score", reward))
                self.success = bool(terminated and info.get("success", float(reward) >= 1.0))
            except Exception as error:
                return self._fail(error)
            over = terminated or truncated
        self.turns += 1
        self._playing = not (over or self.turns >= self.max_turns)
        return observation if self._playing else f"{observation}\n{OVER}"

    def _fail(self, error: Exception) -> str:
        """Give the environment up; the next `reset` makes another."""
        self.error, self.success, self._playing = f"{type(error).__name__}: {error}", False, False
        if self._closing is not None:
            self._closing()
        self._env = self._closing = None
        return FAILED


class _Command(TrlEnvironment):
    how_to_act = (
        "You act by calling the tool `act`, which takes the place of the reply format above: its argument `action` is "
        "the action alone, without a thought and without 'Action:'. Its result is the next observation. Call it once "
        "a turn until the episode is over."
    )

    def act(self, action: str) -> str:
        """Carry out one action in the environment.

        Args:
            action: The action, without any other words.

        Returns:
            What happens then.
        """
        return self._play(action)

    def _reply(self, action: str) -> str:
        return f"Action: {action}"


class _Code(TrlEnvironment):
    how_to_act = (
        "You run code by calling the tool `act`, which takes the place of the code blocks above: its argument "
        "`action` is the code, without fences. Its result is the output. Call it once a turn until the end."
    )

    def act(self, action: str) -> str:
        """Run Python code in the environment.

        Args:
            action: The code, without fences.

        Returns:
            The output.
        """
        return self._play(action)

    def _reply(self, action: str) -> str | None:
        protocol: Protocol = self.env_class.protocol
        given = action.strip()
        if given.startswith("```") and protocol.parse(given).target == given:
            return given
        reply = f"```python\n{action}\n```"
        return reply if protocol.parse(reply).text == action.strip("\r\n").rstrip() else None


class _Call(TrlEnvironment):
    how_to_act = (
        "You act by calling the tool `act`, which takes the place of the reply format above: its argument `action` is "
        'either one call, as a JSON object with "name" and "arguments", or the text of a message. Its result is the '
        "answer. Call it once a turn until the episode is over."
    )

    def act(self, action: str) -> str:
        """Make one call, or send one message.

        Args:
            action: The call as a JSON object with the keys "name" and "arguments", or else the text of the message.

        Returns:
            The result of the call, or the answer to the message.
        """
        return self._play(action)

    def _reply(self, action: str) -> str:
        given = action.strip()
        return f"<tool_call>\n{given}\n</tool_call>" if given.startswith("{") else action


_KINDS: dict[type[Protocol], type[TrlEnvironment]] = {ReActText: _Command, CodeBlock: _Code, ToolCall: _Call}


def as_trl_environment(name: str, *, max_turns: int | None = None, **env_options: Any) -> type[TrlEnvironment]:
    """Make the class that plain [`~trl.GRPOTrainer`] plays an adapter with.

    ```python
    Household = as_trl_environment("household")
    GRPOTrainer(..., environment_factory=Household, train_dataset=Dataset.from_list(Household.rows("train")))
    ```

    Args:
        name: registry name of the environment.
        max_turns: calls of `act` in one episode; `None` takes the environment's own limit in training.
        **env_options: passed to the environment's constructor.

    Returns:
        A class named after the environment (`HouseholdEnvironment`), by which TRL names its reward; it can be pickled.

    Raises:
        UnknownEnvironmentError, MissingDependencyError: there is no such environment, or it cannot be imported.
        EnvAdapterError: `max_turns` is not positive.
    """
    if max_turns is not None and max_turns < 1:
        raise EnvAdapterError(f"`max_turns` is {max_turns!r}; it must be at least 1 (`None` takes the environment's).")
    env_class = resolve(name)
    protocol = getattr(env_class, "protocol", None)
    kind = next((made for known, made in _KINDS.items() if isinstance(protocol, known)), TrlEnvironment)
    limit = getattr(env_class, "max_turns", DEFAULT_TURNS) if max_turns is None else max_turns
    title = "".join(word[0].upper() + word[1:] for word in re.findall(r"[^\W_]+", name))
    members: dict[str, Any] = {"origin": (name, max_turns, env_options), "max_turns": limit}
    members |= {"env_class": env_class, "env_options": env_options, "__doc__": f"The environment {name!r} for TRL."}
    made: type[TrlEnvironment] = new_class(f"{title}Environment", (kind,), exec_body=lambda body: body.update(members))
    return made


def _close(env: gymnasium.Env[str, str]) -> None:
    with contextlib.suppress(Exception):
        getattr(env, "kill", env.close)()


def _reduce(made: _MadeByName) -> Any:
    if "origin" not in vars(made):  # one of this module's own classes, found by its name
        return made.__qualname__
    name, max_turns, env_options = made.origin
    return partial(as_trl_environment, name, max_turns=max_turns, **env_options), ()


copyreg.pickle(_MadeByName, _reduce)
