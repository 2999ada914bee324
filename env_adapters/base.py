"""The environment contract: text in, text out, on top of the Gymnasium API.

An adapter subclasses [`TextEnv`] and fills in two methods, `_begin` (start one task, return the first observation) and
`_act` (execute one action, return an [`Outcome`]). Everything the contract promises (parsing the reply, the reward,
the `info` keys, the order of calls) is done once, here.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gymnasium

from env_adapters.errors import EpisodeStateError, UnknownSplitError, did_you_mean
from env_adapters.protocols import Action, Protocol


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a task list: what to play, and the family it is reported under."""

    environment: str
    task_id: str
    family: str
    split: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the environment answers to one action.

    Attributes:
        observation: text shown to the agent.
        score: the benchmark's own graded score so far (a metric only, never the reward).
        success: whether the benchmark's own success criterion holds now (paper B.3).
        done: whether the episode is over, in success or in failure.
        invalid: whether the action had no effect because the environment did not accept it.
        details: more about the step, for logs and analysis; becomes part of `info`, whose own keys it cannot replace.
    """

    observation: str
    score: float = 0.0
    success: bool = False
    done: bool = False
    invalid: bool = False
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


class AnyText(gymnasium.Space[str]):
    """The space of all Python strings (Gymnasium's `Text` space fixes an alphabet and a length)."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        letters = self.np_random.integers(97, 123, size=int(self.np_random.integers(1, 12)))
        return "".join(map(chr, letters))


class TextEnv(gymnasium.Env[str, str]):
    """A text environment that can be trained on.

    `reset(options={"task_id": ...})` returns `(observation, info)`; `step(reply)` takes the agent's whole reply, lets
    the class's `protocol` find the action in it, and returns `(observation, reward, terminated, truncated, info)`.
    The reward is 1.0 on the step that reaches success and 0.0 otherwise. `info` holds `success` (`bool`), `score`
    (`float`, on the scale named by `score_range`), `action` (`str`, the text that was executed), `invalid` (`bool`).
    With `options={"admissible_actions": True}` it also holds `admissible_actions` (`list[str]`).

    Class attributes:
        name: registry name, also the value of a dataset's `environment` column.
        protocol: how a reply is turned into an action.
        instruction: the standing instruction, the first message of every episode.
        acknowledgement: the fixed assistant reply to the instruction, or `None` to send it as a system message.
        score_range: smallest and largest score the benchmark gives.
        splits: names of the splits that `tasks` accepts.
        max_turns, max_turns_eval: turn limits of the paper (Tables 9 to 11) in training and in evaluation.
        mean_over_families: whether results are the unweighted mean of the families' (paper B.4), not of all episodes.
        data_maker: `"package.module:function"` that writes the data files the environment plays from, called with the
            command-line arguments after `cope-trl envs make-data NAME`; `None` where there are none to write.
        installer: the same for `cope-trl envs install NAME`, where the environment lives in an interpreter of its own.
    """

    name: ClassVar[str]
    protocol: ClassVar[Protocol]
    instruction: ClassVar[str]
    acknowledgement: ClassVar[str | None] = None
    score_range: ClassVar[tuple[float, float]] = (0.0, 1.0)
    splits: ClassVar[tuple[str, ...]] = ("train", "test")
    max_turns: ClassVar[int] = 20
    max_turns_eval: ClassVar[int] = 30
    mean_over_families: ClassVar[bool] = False
    data_maker: ClassVar[str | None] = None
    installer: ClassVar[str | None] = None
    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - as gymnasium.Env declares it

    observation_space = AnyText()
    action_space = AnyText()

    _playing = False
    _closed = False
    _list_admissible = False

    # ---------------------------------------------------------------- to be written by an adapter

    @classmethod
    @abstractmethod
    def tasks(cls, split: str) -> Sequence[Task]:
        """All tasks of a split, in a fixed order. Raises [`UnknownSplitError`] for a name not in `splits`."""

    @abstractmethod
    def _begin(self, task_id: str | None, seed: int | None) -> str:
        """Start the task (any, drawn with the seed, when `task_id` is `None`); return the first observation."""

    @abstractmethod
    def _act(self, action: Action) -> Outcome:
        """Execute one action. `action.text` is never empty here."""

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] if something the environment needs is not installed; must be cheap."""

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] for an id no task has, without starting anything; must be cheap."""

    def admissible_actions(self) -> list[str] | None:
        """Actions that would have an effect now, or `None` where the environment cannot list them."""
        return None

    def expert_action(self) -> str | None:
        """The next action of a scripted expert, or `None` where the environment has none."""
        return None

    def kill(self) -> None:
        """Release everything at once, from any thread, while another thread may hang in `step`."""
        self.close()

    # ---------------------------------------------------------------- the Gymnasium API

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        if self._closed:
            raise EpisodeStateError(f"`reset` was called on a closed {self.name!r} environment; make a new one.")
        super().reset(seed=seed)
        options = dict(options or {})
        task_id = options.get("task_id")
        self._list_admissible = bool(options.get("admissible_actions", False))
        self._playing = False
        observation = self._begin(None if task_id is None else str(task_id), seed)
        self._playing = True
        return observation, self._info(Outcome(observation), action="")

    def step(self, reply: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if not self._playing:
            raise EpisodeStateError(
                f"`step` was called on the {self.name!r} environment with no episode running; call `reset` first."
            )
        if not isinstance(reply, str):
            raise TypeError(f"`reply` must be a str, got {type(reply).__name__}: {reply!r}.")
        action = self.protocol.parse(reply)
        if action.text:
            outcome = self._act(action)
        else:
            outcome = Outcome(self.protocol.no_action_observation, score=self._current_score(), invalid=True)
        self._playing = not outcome.done
        return (
            outcome.observation,
            1.0 if outcome.success and outcome.done else 0.0,
            outcome.done,
            False,
            self._info(outcome, action.text),
        )

    def close(self) -> None:
        self._playing = False
        self._closed = True

    # ---------------------------------------------------------------- for callers

    @classmethod
    def standing_messages(cls, task_id: str | None = None) -> list[dict[str, str]]:
        """The messages an episode begins with, before the first observation (paper Appendix C).

        Args:
            task_id: the task; only environments whose instruction differs from task to task look at it.
        """
        if cls.acknowledgement is None:
            return [{"role": "system", "content": cls.instruction}]
        return [
            {"role": "user", "content": cls.instruction},
            {"role": "assistant", "content": cls.acknowledgement},
        ]

    @classmethod
    def tools(cls, task_id: str | None = None) -> list[dict[str, Any]] | None:
        """JSON schemas of the tools that the chat template shows to the agent, or `None` where there are none.

        Args:
            task_id: the task; only environments whose tools differ from task to task look at it.
        """
        return None

    @classmethod
    def check_split(cls, split: str) -> None:
        """Raise [`UnknownSplitError`] unless `split` is one of `splits`."""
        if split not in cls.splits:
            raise UnknownSplitError(
                f"`split` is {split!r}, but {cls.name!r} has the splits {list(cls.splits)}."
                + did_you_mean(split, cls.splits)
            )

    def _current_score(self) -> float:
        """Score to report for a reply in which no action was found."""
        return 0.0

    def _info(self, outcome: Outcome, action: str) -> dict[str, Any]:
        info: dict[str, Any] = {
            **outcome.details,
            "success": outcome.success,
            "score": outcome.score,
            "action": action,
            "invalid": outcome.invalid,
        }
        if self._list_admissible and not outcome.done:
            info["admissible_actions"] = self.admissible_actions()
        return info
