"""One episode: what it holds while it is played, and what each event does to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cope_trl.chat import ChatFormat, Message
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import Call, EnvHandle, Failure
from cope_trl.types import TaskRef, Trajectory, Turn
from env_adapters.errors import USER_MISTAKES


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of one episode; reaching any of them truncates it.

    Attributes:
        max_turns: policy turns, by environment name; the key `""` holds the limit of every other environment.
        max_tokens_per_turn: tokens the policy may sample in one turn.
        max_completion_length: tokens of the whole episode after its prompt, the environment's included.
        max_total_tokens: tokens of prompt and completion together (the model's context), or `None`.
        max_prompt_length: tokens of the prompt, or `None`; a longer one fails the episode, never a silent cut.
    """

    max_turns: Mapping[str, int]
    max_tokens_per_turn: int
    max_completion_length: int
    max_total_tokens: int | None = None
    max_prompt_length: int | None = None

    def turns(self, environment: str) -> int:
        """Turn limit of an environment."""
        return self.max_turns.get(environment, self.max_turns.get("", 30))


# What `info` holds in every environment; a turn has fields of its own for it.
_OWN_FIELDS = ("success", "score", "action", "invalid", "admissible_actions")


@dataclass(slots=True, eq=False)
class Episode:
    """An episode while it is played.

    Attributes:
        index: its number among those played together.
        task: what it plays.
        messages: standing messages of its prompt.
        handle: its environment.
        active: it is not over.
    """

    index: int
    task: TaskRef
    messages: Sequence[Message]
    handle: EnvHandle
    active: bool = True
    turns: list[Turn] = field(default_factory=list)
    error: str | None = None
    _prompt_ids: list[int] = field(default_factory=list)
    _completion_ids: list[int] = field(default_factory=list)
    _mask: list[int] = field(default_factory=list)
    _logprobs: list[float] | None = field(default_factory=list)
    _first_observation: str = ""
    _success: bool = False
    _score: float = 0.0
    _truncated: bool = False
    _seconds_before: float = 0.0

    def __post_init__(self) -> None:
        self._seconds_before = self.handle.seconds

    @property
    def ids(self) -> list[int]:
        """The whole history so far."""
        return self._prompt_ids + self._completion_ids

    @property
    def _length(self) -> int:
        return len(self._prompt_ids) + len(self._completion_ids)

    # ---------------------------------------------------------------- events, in the order they come

    def begin(self, result: Any, chat: ChatFormat, limits: EpisodeLimits) -> None:
        """Take what `reset` returned.

        Raises:
            One of `USER_MISTAKES`: the environment cannot be made, or does not know the task.
        """
        if isinstance(result, Failure):
            if isinstance(result.cause, USER_MISTAKES):
                raise result.cause
            self._fail(result.message)
            return
        self._first_observation = result[0]
        list_tools = getattr(self.handle.env, "tools", None)
        tools = list_tools(self.task.task_id) if callable(list_tools) else None
        self._prompt_ids = chat.prompt_ids(self.messages, result[0], tools)
        limit, length = limits.max_prompt_length, len(self._prompt_ids)
        if limit is not None and length > limit:
            self._fail(
                f"the prompt of task {self.task.task_id!r} has {length} tokens, more than "
                f"`max_prompt_length`={limit}; raise the limit (nothing is cut silently)"
            )
        elif self.budget(limits) < 1:
            self._fail(
                f"the prompt of task {self.task.task_id!r} has {length} tokens and leaves no room in the model's "
                f"context of {limits.max_total_tokens}"
            )

    def budget(self, limits: EpisodeLimits) -> int:
        """Tokens the policy may still sample in this turn."""
        room = [limits.max_tokens_per_turn, limits.max_completion_length - len(self._completion_ids)]
        if limits.max_total_tokens is not None:
            room.append(limits.max_total_tokens - self._length)
        return min(room)

    def record(
        self, generation: Generation, chat: ChatFormat, limits: EpisodeLimits, stop_ids: frozenset[int]
    ) -> bool:
        """Append a sampled turn; return whether it is complete and goes to the environment."""
        budget = self.budget(limits)
        ids, logprobs = generation.ids[:budget], generation.logprobs
        start = self._length
        self._append(ids, sampled=True, logprobs=None if logprobs is None else logprobs[:budget])
        complete = bool(ids) and ids[-1] in stop_ids
        self.turns.append(
            Turn(
                history_end=start - len(chat.generation_prompt_ids),
                start=start,
                end=self._length,
                reply=chat.decode(ids[:-1] if complete else ids),
                score=self._score,
            )
        )
        if not complete:
            self._truncate()
        return complete

    def step_call(self) -> Call:
        """The call that hands the policy's last turn to the environment."""
        return Call(self.handle, "step", (self.turns[-1].reply,))

    def observe(self, result: Any, chat: ChatFormat, limits: EpisodeLimits) -> None:
        """Take what `step` returned. An answer that cannot be used fails the episode and gives its environment up."""
        if isinstance(result, Failure):
            self._fail(result.message)
            return
        try:
            self._observe(result, chat, limits)
        except Exception as error:
            self.handle.discard()
            name = self.task.environment
            self._fail(f"environment {name!r}: its answer could not be used: {type(error).__name__}: {error}")

    def _observe(self, result: tuple[Any, ...], chat: ChatFormat, limits: EpisodeLimits) -> None:
        observation, reward, terminated, truncated, info = result
        turn = _executed(self.turns[-1], self.handle.env, observation, info)
        self.turns[-1] = turn
        self._score = turn.score
        if terminated:
            self._success = bool(info.get("success", float(reward) >= 1.0))
            self.active = False
        elif truncated or len(self.turns) >= limits.turns(self.task.environment):
            self._truncate()
        else:
            suffix = chat.turn_suffix_ids(observation, self._completion_ids[-1])
            room = limits.max_completion_length - len(self._completion_ids) - len(suffix)
            if limits.max_total_tokens is not None:
                room = min(room, limits.max_total_tokens - self._length - len(suffix))
            if room < 1:
                self._truncate()
            else:
                self._append(suffix, sampled=False)

    def finish(self, chat: ChatFormat) -> Trajectory:
        """The trajectory."""
        protocol = getattr(self.handle.env, "protocol", None)
        turns, completion, mask, logprobs = self.turns, self._completion_ids, self._mask, self._logprobs
        if protocol is not None and turns and self.error is None:
            turns = _final_invalid(protocol, turns)
        if not completion:  # failed before the first turn: one placeholder token that nothing is learned from
            completion, mask = [chat.end_of_turn_id], [0]
            logprobs = [0.0] if logprobs is not None else None
        return Trajectory(
            task=self.task,
            prompt_ids=tuple(self._prompt_ids or [chat.end_of_turn_id]),
            completion_ids=tuple(completion),
            completion_mask=tuple(mask),
            turns=tuple(turns),
            logprobs=None if logprobs is None else tuple(logprobs),
            layout=getattr(protocol, "layout", "list"),
            skip_no_call=getattr(protocol, "skip_no_call", False),
            success=self._success,
            score=self._score,
            truncated=self._truncated,
            failed=self.error is not None,
            error=self.error,
            first_observation=self._first_observation,
            environment_seconds=self.handle.seconds - self._seconds_before,
        )

    # ---------------------------------------------------------------- changes

    def _append(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float] | None = None) -> None:
        self._completion_ids.extend(ids)
        self._mask.extend([int(sampled)] * len(ids))
        if sampled and logprobs is None:
            self._logprobs = None
        if self._logprobs is not None:
            self._logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))

    def _truncate(self) -> None:
        self._truncated, self.active, self._success = True, False, False

    def _fail(self, message: str) -> None:
        self.error, self.active, self._success = message, False, False


def _executed(turn: Turn, env: Any, observation: str, info: Mapping[str, Any]) -> Turn:
    """The turn with what the environment made of it. Environments without a protocol execute the whole reply."""
    protocol = getattr(env, "protocol", None)
    action = str(info.get("action", turn.reply.strip()))
    if protocol is None:
        target, is_call = (action if action in turn.reply else turn.reply.strip()), False
    else:
        parsed = protocol.parse(turn.reply)
        target, is_call = (parsed.target or parsed.text), parsed.is_call
    return replace(
        turn,
        action=action,
        target=target if action else "",
        is_call=is_call,
        invalid=bool(info.get("invalid", False)),
        observation=observation,
        score=float(info.get("score", 0.0)),
        details={name: value for name, value in info.items() if name not in _OWN_FIELDS},
    )


def _final_invalid(protocol: Any, turns: Sequence[Turn]) -> list[Turn]:
    """Turns with the invalid flags the protocol gives once the whole episode is known."""
    actions = [protocol.parse(turn.reply) if turn.action else protocol.parse("") for turn in turns]
    flags = protocol.invalid_turns(actions, [turn.invalid for turn in turns])
    return [replace(turn, invalid=flag) for turn, flag in zip(turns, flags, strict=True)]
