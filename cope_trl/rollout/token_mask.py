"""Completions that somebody else rolled out → trajectories, with the turns read off the token mask. No torch.

TRL's own loops (`tools`, `environment_factory`, `rollout_func`) hand over token ids and a mask that tells sampled
tokens from the environment's. Everything a forecast needs is in there: a run of sampled tokens is a turn, what lies
between two runs is the environment's answer, and the action is the first tool call of the turn.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from cope_trl.chat import ChatFormat
from cope_trl.types import TaskRef, Trajectory, Turn
from env_adapters.protocols import Action, ToolCall

# How TRL reports a call that raised, and how most tools report one that did not work.
_ERRORS = ("{'error'", '{"error"')


@dataclass(frozen=True, slots=True)
class Completion:
    """One row of a batch that was rolled out elsewhere.

    Attributes:
        task: what was played, as far as the row says.
        prompt_ids: (P,) ids of the rendered prompt.
        ids: (C,) ids of the completion.
        mask: (C,) 1 on sampled tokens, 0 on the environment's; `None` when every token was sampled.
        logprobs: (C,) log-probabilities at sampling time, or `None`.
        messages: the completion as messages (assistant and tool), or as a text.
        runs_tools: whether the calls were executed by a tool loop, which ends at a turn without a call.
    """

    task: TaskRef
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[int] | None = None
    logprobs: Sequence[float | None] | None = None
    messages: Sequence[Mapping[str, Any]] | str = ""
    runs_tools: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a completion.

    Attributes:
        success: Y, by the success rule in force.
        score: total reward.
        failed: whether no reward function could score it.
    """

    success: bool
    score: float
    failed: bool = False


def policy_spans(mask: Sequence[int]) -> list[tuple[int, int]]:
    """Half-open spans of the runs of ones in a (C,) mask: one policy turn each."""
    spans, position = [], 0
    for sampled, run in groupby(mask, key=bool):
        end = position + sum(1 for _ in run)
        if sampled:
            spans.append((position, end))
        position = end
    return spans


def holds_several_turns(ids: Sequence[int], stop_ids: Sequence[int], generation_prompt_ids: Sequence[int]) -> bool:
    """Whether ids go on to another policy turn after one has ended, whatever a mask says."""
    stop = next((position for position, token in enumerate(ids) if token in stop_ids), len(ids))
    rest, prompt = list(ids[stop + 1 :]), list(generation_prompt_ids)
    if not prompt:
        return bool(rest)
    return any(rest[i : i + len(prompt)] == prompt for i in range(len(rest) - len(prompt) + 1))


class TurnReader:
    """Reads trajectories off token masks.

    Args:
        decode: ids to text, without control tokens.
        stop_ids: ids that end a policy turn.
        chat: the chat format that branches are rendered in; without one, no turn gets a window.

    Attributes:
        unread: turns so far that do not follow the template's generation prompt; nothing is forecast from them.
        turns: all turns so far.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], stop_ids: Sequence[int], chat: ChatFormat | None = None
    ) -> None:
        self.decode = decode
        self.stop_ids = frozenset(stop_ids)
        self.chat = chat
        self.protocol = ToolCall()
        self.unread = 0
        self.turns = 0

    def read(self, completion: Completion, verdict: Verdict) -> Trajectory:
        """The trajectory of one completion.

        Raises:
            ValueError: the mask and the completion differ in length.
        """
        mask = [1] * len(completion.ids) if completion.mask is None else list(completion.mask)
        if len(mask) != len(completion.ids):
            raise ValueError(f"the mask holds {len(mask)} tokens and the completion {len(completion.ids)}.")
        spans = policy_spans(mask)
        answers = _answers(completion.messages, len(spans))
        turns, actions = [], []
        for index, span in enumerate(spans):
            following = spans[index + 1][0] if index + 1 < len(spans) else len(mask)
            turn, action = self._turn(completion, span, following, None if answers is None else answers[index])
            turns.append(replace(turn, score=verdict.score if index + 1 == len(spans) else 0.0))
            actions.append(action)
        flags = self.protocol.invalid_turns(actions, [turn.invalid for turn in turns])
        turns = [replace(turn, invalid=flag) for turn, flag in zip(turns, flags, strict=True)]
        logprobs = completion.logprobs
        return Trajectory(
            task=completion.task,
            prompt_ids=tuple(completion.prompt_ids),
            completion_ids=tuple(completion.ids),
            completion_mask=tuple(mask),
            turns=tuple(turns),
            logprobs=None if logprobs is None else tuple(float("nan") if p is None else p for p in logprobs),
            layout="turns",
            success=verdict.success and not verdict.failed,
            score=verdict.score,
            truncated=not (spans and mask[-1] == 0) and completion.ids[-1] not in self.stop_ids,
            failed=verdict.failed,
            error="no reward function could score this completion" if verdict.failed else None,
            skip_no_call=completion.runs_tools or any(turn.is_call for turn in turns),
        )

    def _turn(
        self, completion: Completion, span: tuple[int, int], following: int, answer: "_Answer | None"
    ) -> tuple[Turn, Action]:
        begin, stop = span
        ids, offset = list(completion.ids), len(completion.prompt_ids)
        ended = ids[stop - 1] in self.stop_ids
        reply = self.decode(ids[begin : stop - ended])
        observation = answer.observation if answer is not None else self.decode(ids[stop:following]).strip()
        action = self._action(reply, answer)
        # A turn that was cut, or whose call nobody executed, did nothing.
        if not (ended or following > stop) or (action.is_call and completion.runs_tools and not observation):
            action = Action("")
        history_end = self._history_end([*completion.prompt_ids, *ids[:begin]])
        self.turns += 1
        if history_end is None:
            self.unread += 1
            action = Action("")
        turn = Turn(
            history_end=offset + begin if history_end is None else history_end,
            start=offset + begin,
            end=offset + stop,
            reply=reply,
            action=action.text,
            target=action.target,
            invalid=observation.lstrip().startswith(_ERRORS),
            is_call=action.is_call,
            observation=observation,
            details={"num_calls": answer.calls} if answer is not None and answer.calls else {},
        )
        return turn, action

    def _action(self, reply: str, answer: "_Answer | None") -> Action:
        action = self.protocol.parse(reply)
        if action.text and not action.is_call and answer is not None and answer.calls:
            return replace(action, is_call=True)  # a call in another notation: the whole reply is its literal text
        return action

    def _history_end(self, before: Sequence[int]) -> int | None:
        """End of h_t among the tokens before a turn, or `None` where they do not end as the template ends them."""
        if self.chat is None:
            return None
        end = len(before) - len(self.chat.generation_prompt_ids)
        close = list(self.chat.user_close_ids) if self.chat.merged else []
        if end < 1 or list(before[end - len(close) :]) != close + list(self.chat.generation_prompt_ids):
            return None
        return end


@dataclass(frozen=True, slots=True)
class _Answer:
    """What followed one assistant message: how many calls it made, and what the first of them gave."""

    calls: int
    observation: str


def _answers(messages: Sequence[Mapping[str, Any]] | str, turns: int) -> list[_Answer] | None:
    """One answer a turn, or `None` where the messages do not follow the turns."""
    if isinstance(messages, str):
        return None
    starts = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if len(starts) != turns or any(message.get("role") not in ("assistant", "tool") for message in messages):
        return None
    answers = []
    for start, end in zip(starts, [*starts[1:], len(messages)], strict=True):
        results = [str(message.get("content", "")) for message in messages[start + 1 : end]]
        answers.append(_Answer(len(messages[start].get("tool_calls") or ()), results[0] if results else ""))
    return answers
