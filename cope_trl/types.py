"""The data that flows between stages: frozen dataclasses, every field with its shape and unit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Layout = Literal["list", "turns"]


@dataclass(frozen=True, slots=True)
class TaskRef:
    """What to play: one dataset row, without the prompt.

    Attributes:
        environment: registry name of the environment.
        task_id: the environment's own id of the task.
        family: group the result is reported under, or an empty string.
    """

    environment: str
    task_id: str
    family: str = ""


@dataclass(frozen=True, slots=True)
class Turn:
    """One policy turn of an episode and the environment's answer to it.

    Positions count tokens from the start of the episode's unpadded `prompt_ids + completion_ids`.

    Attributes:
        history_end: end (exclusive) of h_t: everything the turn answers, without the generation prompt.
        start, end: half-open span of the policy's own tokens, its end-of-turn token included.
        reply: decoded text of those tokens, without special tokens.
        action: what the environment executed; empty when nothing was.
        target: literal span of the reply that a forecast repeats; empty exactly when `action` is.
        invalid: whether the action had no effect.
        is_call: whether the action is a tool call.
        observation: the environment's answer; empty when the turn was cut and never executed.
        score: the benchmark's graded score after the turn.
        details: what else the environment's `info` said.
    """

    history_end: int
    start: int
    end: int
    reply: str
    action: str = ""
    target: str = ""
    invalid: bool = False
    is_call: bool = False
    observation: str = ""
    score: float = 0.0
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One episode: a prompt, then turns of policy tokens with environment tokens between them.

    Attributes:
        task: what was played.
        prompt_ids: (P,) tokens up to and including the first generation prompt.
        completion_ids: (C,) tokens sampled by the policy and tokens of the environment, in order; never empty.
        completion_mask: (C,) 1 where the policy sampled the token, 0 where the environment wrote it.
        logprobs: (C,) natural-log probabilities at sampling time, 0.0 on environment tokens, or `None`.
        turns: the turns, in order.
        layout: how the environment's actions are laid out in a forecast.
        success: the environment's own criterion Y (paper B.3); `False` when truncated or failed.
        score: the benchmark's graded score at the end, on the benchmark's scale.
        truncated: whether a limit on turns or tokens ended the episode.
        failed: whether the environment broke; such an episode carries no learning signal.
        error: what broke, or `None`.
        first_observation: text of the first observation.
        environment_seconds: wall time spent inside the environment.
        skip_no_call: whether a forecast without any tool call is left out (the protocol decides).
    """

    task: TaskRef
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    completion_mask: tuple[int, ...]
    turns: tuple[Turn, ...] = ()
    logprobs: tuple[float, ...] | None = None
    layout: Layout = "list"
    success: bool = False
    score: float = 0.0
    truncated: bool = False
    failed: bool = False
    error: str | None = None
    first_observation: str = ""
    environment_seconds: float = 0.0
    skip_no_call: bool = False

    @property
    def ids(self) -> tuple[int, ...]:
        """(P+C,) the whole episode."""
        return self.prompt_ids + self.completion_ids

    @property
    def refusal(self) -> bool:
        """Whether the episode succeeded without a change of the database, where the environment counts `writes`."""
        return self.success and bool(self.turns) and self.turns[-1].details.get("writes") == 0


@dataclass(frozen=True, slots=True)
class ForecastWindow:
    """What the policy is trained to forecast from one history of a successful episode (paper Eq. 4 and 5).

    Attributes:
        turn: index t of the turn whose history the window starts from.
        history_end: end (exclusive) of h_t in tokens of the unpadded episode.
        targets: (1..K+1,) literal action texts a_t, a_t+1, …, each non-empty.
        turns: (1..K+1,) index of the turn each target was executed at.
    """

    turn: int
    history_end: int
    targets: tuple[str, ...]
    turns: tuple[int, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Branch:
    """The tokens of one forecast window, appended to a history (paper C.6).

    Attributes:
        ids: (F,) the plan-ahead turn, the generation prompt, and the target actions.
        loss_mask: (F,) 1 on the target and its end-of-turn token, 0 elsewhere.
        offsets: (F,) offset k of the action a target token belongs to, -1 on every other token.
        calls: for each target action, whether it is a tool call; empty where the protocol knows no calls.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    offsets: tuple[int, ...]
    calls: tuple[bool, ...] = ()
