"""The turn loop: tasks × an environment pool × a policy → trajectories.

All episodes of a process advance together, one policy call a turn; finished ones drop out. Where ranks must call the
policy equally often, `any_active` tells a rank that has finished to keep calling with a placeholder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cope_trl.chat import ChatFormat, Message
from cope_trl.rollout.generation import Generation, Policy
from cope_trl.rollout.pool import Call, EnvHandle, EnvironmentPool, Failure
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


@dataclass(slots=True)
class _Episode:
    """An episode while it is played."""

    task: TaskRef
    messages: Sequence[Message]
    handle: EnvHandle
    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    first_observation: str = ""
    success: bool = False
    score: float = 0.0
    truncated: bool = False
    error: str | None = None
    active: bool = True
    seconds_before: float = 0.0

    @property
    def length(self) -> int:
        return len(self.prompt_ids) + len(self.completion_ids)

    def append(self, ids: Sequence[int], sampled: bool, logprobs: Sequence[float] | None = None) -> None:
        self.completion_ids.extend(ids)
        self.mask.extend([int(sampled)] * len(ids))
        if sampled and logprobs is None:
            self.logprobs = None
        if self.logprobs is not None:
            self.logprobs.extend(logprobs if logprobs is not None else [0.0] * len(ids))

    def truncate(self) -> None:
        self.truncated, self.active, self.success = True, False, False

    def fail(self, message: str) -> None:
        self.error, self.active, self.success = message, False, False


# What `info` holds in every environment; a turn has fields of its own for it.
_OWN_FIELDS = ("success", "score", "action", "invalid", "admissible_actions")


class EpisodePlayer:
    """Plays episodes.

    Args:
        pool: where environments come from.
        policy: samples one turn a prompt.
        chat: renders what lies between two turns.
        stop_ids: ids that end a policy turn.
        any_active: tells whether any rank still plays, given whether this one does; the default asks nobody else.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        policy: Policy,
        chat: ChatFormat,
        stop_ids: Sequence[int],
        any_active: Callable[[bool], bool] = bool,
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.chat = chat
        self.stop_ids = frozenset(stop_ids) | {chat.end_of_turn_id}
        self.any_active = any_active

    def play(
        self,
        tasks: Sequence[TaskRef],
        messages: Sequence[Sequence[Message]],
        limits: EpisodeLimits,
        seeds: Sequence[int | None] | None = None,
    ) -> list[Trajectory]:
        """Play each task once.

        Args:
            tasks: B tasks; the same task may appear several times (a group).
            messages: B lists of standing messages (a dataset's `prompt` column).
            limits: when an episode is cut.
            seeds: B seeds for `reset`, or `None`.

        Returns:
            B trajectories in the order of the tasks. Failures and truncations are marked, never raised.
        """
        seeds = seeds or [None] * len(tasks)
        episodes = [
            _Episode(task, rows, self.pool.acquire(task.environment))
            for task, rows in zip(tasks, messages, strict=True)
        ]
        for episode in episodes:
            episode.seconds_before = episode.handle.seconds
        try:
            self._reset(episodes, seeds, limits)
            while self.any_active(any(episode.active for episode in episodes)):
                self._turn([episode for episode in episodes if episode.active], limits)
            return [self._finish(episode) for episode in episodes]
        finally:
            for episode in episodes:
                self.pool.release(episode.handle)

    # ---------------------------------------------------------------- one stage each

    def _reset(self, episodes: list[_Episode], seeds: Sequence[int | None], limits: EpisodeLimits) -> None:
        calls = [
            Call(episode.handle, "reset", kwargs={"seed": seed, "options": {"task_id": episode.task.task_id}})
            for episode, seed in zip(episodes, seeds, strict=True)
        ]
        for episode, result in zip(episodes, self.pool.run(calls), strict=True):
            if isinstance(result, Failure):
                if isinstance(result.cause, USER_MISTAKES):
                    raise result.cause
                episode.fail(result.message)
                continue
            episode.first_observation = result[0]
            list_tools = getattr(episode.handle.env, "tools", None)
            tools = list_tools(episode.task.task_id) if callable(list_tools) else None
            episode.prompt_ids = self.chat.prompt_ids(episode.messages, result[0], tools)
            limit = limits.max_prompt_length
            if limit is not None and len(episode.prompt_ids) > limit:
                episode.fail(
                    f"the prompt of task {episode.task.task_id!r} has {len(episode.prompt_ids)} tokens, more than "
                    f"`max_prompt_length`={limit}; raise the limit (nothing is cut silently)"
                )
            elif self._budget(episode, limits) < 1:
                episode.fail(
                    f"the prompt of task {episode.task.task_id!r} has {len(episode.prompt_ids)} tokens and leaves no "
                    f"room in the model's context of {limits.max_total_tokens}"
                )

    def _budget(self, episode: _Episode, limits: EpisodeLimits) -> int:
        """Tokens the policy may still sample in this turn."""
        room = [limits.max_tokens_per_turn, limits.max_completion_length - len(episode.completion_ids)]
        if limits.max_total_tokens is not None:
            room.append(limits.max_total_tokens - episode.length)
        return min(room)

    def _turn(self, active: list[_Episode], limits: EpisodeLimits) -> None:
        if not active:  # another rank still plays: keep the collective calls in step
            self.policy([[self.chat.end_of_turn_id]], 1)
            return
        budgets = [self._budget(episode, limits) for episode in active]
        prompts = [episode.prompt_ids + episode.completion_ids for episode in active]
        generations = self.policy(prompts, max(budgets))
        answered = []
        for episode, generation, budget in zip(active, generations, budgets, strict=True):
            if self._record(episode, generation, budget):
                answered.append(episode)
        calls = [Call(episode.handle, "step", (episode.turns[-1].reply,)) for episode in answered]
        for episode, result in zip(answered, self.pool.run(calls), strict=True):
            if isinstance(result, Failure):
                episode.fail(result.message)
                continue
            try:
                self._observe(episode, result, limits)
            except Exception as error:
                episode.handle.discard()
                name = episode.task.environment
                episode.fail(f"environment {name!r}: its answer could not be used: {type(error).__name__}: {error}")

    def _record(self, episode: _Episode, generation: Generation, budget: int) -> bool:
        """Append a sampled turn; return whether it is complete and goes to the environment."""
        ids, logprobs = generation.ids[:budget], generation.logprobs
        start = episode.length
        episode.append(ids, sampled=True, logprobs=None if logprobs is None else logprobs[:budget])
        complete = bool(ids) and ids[-1] in self.stop_ids
        episode.turns.append(
            Turn(
                history_end=start - len(self.chat.generation_prompt_ids),
                start=start,
                end=episode.length,
                reply=self.chat.decode(ids[:-1] if complete else ids),
                score=episode.score,
            )
        )
        if not complete:
            episode.truncate()
        return complete

    def _observe(self, episode: _Episode, result: tuple[Any, ...], limits: EpisodeLimits) -> None:
        observation, reward, terminated, truncated, info = result
        turn = _executed(episode.turns[-1], episode.handle.env, observation, info)
        episode.turns[-1] = turn
        episode.score = turn.score
        if terminated:
            episode.success = bool(info.get("success", float(reward) >= 1.0))
            episode.active = False
        elif truncated or len(episode.turns) >= limits.turns(episode.task.environment):
            episode.truncate()
        else:
            suffix = self.chat.turn_suffix_ids(observation, episode.completion_ids[-1])
            room = limits.max_completion_length - len(episode.completion_ids) - len(suffix)
            if limits.max_total_tokens is not None:
                room = min(room, limits.max_total_tokens - episode.length - len(suffix))
            if room < 1:
                episode.truncate()
            else:
                episode.append(suffix, sampled=False)

    def _finish(self, episode: _Episode) -> Trajectory:
        protocol = getattr(episode.handle.env, "protocol", None)
        turns, completion, mask, logprobs = episode.turns, episode.completion_ids, episode.mask, episode.logprobs
        if protocol is not None and turns and episode.error is None:
            turns = _final_invalid(protocol, turns)
        if not completion:  # failed before the first turn: one placeholder token that nothing is learned from
            completion, mask = [self.chat.end_of_turn_id], [0]
            logprobs = [0.0] if logprobs is not None else None
        return Trajectory(
            task=episode.task,
            prompt_ids=tuple(episode.prompt_ids or [self.chat.end_of_turn_id]),
            completion_ids=tuple(completion),
            completion_mask=tuple(mask),
            turns=tuple(turns),
            logprobs=None if logprobs is None else tuple(logprobs),
            layout=getattr(protocol, "layout", "list"),
            skip_no_call=getattr(protocol, "skip_no_call", False),
            success=episode.success,
            score=episode.score,
            truncated=episode.truncated,
            failed=episode.error is not None,
            error=episode.error,
            first_observation=episode.first_observation,
            environment_seconds=episode.handle.seconds - episode.seconds_before,
        )


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
