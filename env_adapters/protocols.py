"""Protocols: how a reply becomes an action, what no effect means, and how actions are laid out in a forecast.

A protocol's `parse` never raises: whatever the model wrote, it returns an [`Action`], empty when none was found.
`Action.text` is what the environment executes; `Action.target` is what a forecast is trained to write, always a
literal substring of the reply (re-encoded tool calls were measured to leak into the policy).

Every search below takes time linear in the length of the reply: an untrained policy writes anything.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

Layout = Literal["list", "turns"]

_ACTION_MARKER = re.compile(r"\baction:", re.IGNORECASE)
_FENCE = re.compile(r"`{3,}")
_TOOL_NAME = re.compile(r'"name"\s*:\s*"([^"\\]+)"')


@dataclass(frozen=True, slots=True)
class Action:
    """An action found in a reply.

    Attributes:
        text: what the environment executes; empty when the reply holds no action.
        target: the literal span of the reply that a forecast repeats; empty exactly when `text` is.
        is_call: whether the action is a tool call (always `False` outside the tool-call protocol).
    """

    text: str
    target: str = ""
    is_call: bool = False


NO_ACTION = Action("")


class Protocol(ABC):
    """How one kind of environment reads replies.

    Class attributes:
        name: short name, used in configs and messages.
        layout: how actions are laid out in a forecast: `"list"` (one a line) or `"turns"` (one a reply).
        no_action_observation: what the environment answers to a reply in which no action was found.
        skip_no_call: whether a forecast window without a single tool call is dropped.
    """

    name: ClassVar[str]
    layout: ClassVar[Layout]
    no_action_observation: ClassVar[str]
    skip_no_call: ClassVar[bool] = False

    @abstractmethod
    def parse(self, reply: str) -> Action:
        """Find the action in a reply. Never raises; returns an empty [`Action`] when there is none."""

    def invalid_turns(self, actions: Sequence[Action], invalid: Sequence[bool]) -> list[bool]:
        """Final flag of every turn once the episode is over: whether its action had no effect.

        Args:
            actions: the parsed actions of the episode, in order.
            invalid: what the environment reported for each of them when it was executed.

        Returns:
            One flag a turn. Here the environment's own, unchanged.
        """
        _check_lengths(actions, invalid)
        return list(invalid)


class ReActText(Protocol):
    """A thought, then one command in plain text: `Thought: ... Action: go to desk 1`.

    The action is the first non-empty line after the last `Action:` (in any case), or the last non-empty line of a
    reply without the marker. It is kept as written, punctuation included.
    """

    name = "react"
    layout = "list"
    no_action_observation = "Nothing happens."

    def parse(self, reply: str) -> Action:
        spoken = _after_thinking(reply)
        if spoken is None:
            return NO_ACTION
        start = None
        for marker in _ACTION_MARKER.finditer(spoken):
            start = marker.end()
        lines = [line.strip() for line in spoken[start or 0 :].splitlines()]
        lines = [line for line in lines if line]
        if not lines:
            return NO_ACTION
        line = lines[-1] if start is None else lines[0]
        return Action(line, line)


class CodeBlock(Protocol):
    """Code between ``` fences; the last closed block of the reply is executed.

    `text` is the code inside, `target` the whole fenced block, so that several blocks in one forecast stay apart. A
    block that was never closed is not executed: its end is missing.
    """

    name = "code"
    layout = "list"
    no_action_observation = "No code was found in the reply. Write it in one block, between ``` fences."

    def parse(self, reply: str) -> Action:
        spoken = _after_thinking(reply)
        if spoken is None:
            return NO_ACTION
        span = _last_fenced_block(spoken)
        if span is None:
            return NO_ACTION
        start, code_start, code_end, end = span
        code = spoken[code_start:code_end]
        if not code.strip():
            return NO_ACTION
        # The indentation of the first line is part of the code; blank lines around it are not.
        return Action(code.strip("\r\n").rstrip(), spoken[start:end])


class ToolCall(Protocol):
    """A `<tool_call>{...}</tool_call>` span, or else a message to the customer.

    Only the first call of a reply is executed. A call whose tag is never closed still counts as a call, which the
    environment will reject.
    """

    name = "tool_call"
    layout = "turns"
    no_action_observation = "The reply is empty. Write a message, or one call in <tool_call></tool_call> tags."
    skip_no_call = True

    def parse(self, reply: str) -> Action:
        spoken = _after_thinking(reply)
        if spoken is None:
            return NO_ACTION
        start = spoken.find("<tool_call>")
        if start < 0:
            message = spoken.strip()
            return Action(message, message)
        close = spoken.find("</tool_call>", start)
        call = spoken[start:].rstrip() if close < 0 else spoken[start : close + len("</tool_call>")]
        return Action(call, call, is_call=True)

    def invalid_turns(self, actions: Sequence[Action], invalid: Sequence[bool]) -> list[bool]:
        """Final flag of every turn: a mistake that was repaired later, or a message said before.

        A call that returned an error is information as long as nothing better follows; it counts as without effect
        only when the same tool was called again later with success. A call that names no tool reached none: it keeps
        the environment's flag. A message is without effect when it repeats an earlier one word for word.
        """
        _check_lengths(actions, invalid)
        final = list(invalid)
        said: set[str] = set()
        for turn, action in enumerate(actions):
            if not action.is_call and action.text:
                final[turn] = bool(invalid[turn]) or action.text in said
                said.add(action.text)
        succeeded_later: set[str] = set()
        for turn in range(len(actions) - 1, -1, -1):
            tool = _tool_name(actions[turn].text) if actions[turn].is_call else None
            if tool is None:
                continue
            if invalid[turn]:
                final[turn] = tool in succeeded_later
            else:
                succeeded_later.add(tool)
        return final


def _after_thinking(reply: str) -> str | None:
    """What follows the last thinking block, or `None` when a thinking block was opened and never closed."""
    # A template may have opened the block already, so a lone closing tag counts too.
    end = reply.rfind("</think>")
    spoken = reply if end < 0 else reply[end + len("</think>") :]
    return None if "<think>" in spoken else spoken


def _last_fenced_block(text: str) -> tuple[int, int, int, int] | None:
    """Offsets `(start, code start, code end, end)` of the last closed ``` block.

    The opening fence may follow other words on its line (`Action: ```python`); what follows the fence names the
    language. A fence at the start or at the end of a line closes the block, one followed by a word opens a new one.
    """
    found: tuple[int, int, int, int] | None = None
    opened: tuple[int, int] | None = None
    offset = 0
    for line in text.splitlines(keepends=True):
        body, begin, offset = line.rstrip(), offset, offset + len(line)
        fence = _FENCE.search(body)
        if fence is None:
            continue
        rest = body[fence.end() :]
        at_start = not body[: fence.start()].strip()
        if opened is not None and at_start and (not rest or rest[0].isspace()):
            found, opened = (*opened, begin, begin + fence.end()), None
        elif opened is not None and not at_start and body.endswith("```"):
            code_end = begin + len(body.rstrip("`"))
            found, opened = (*opened, code_end, begin + len(body)), None
        elif opened is None or at_start:
            start, code_start, close = begin + fence.start(), begin + fence.end(), rest.find("```")
            if close < 0:
                opened = (start, offset)
            else:  # the whole block on one line
                found, opened = (start, code_start, code_start + close, code_start + close + 3), None
    return found


def _tool_name(call: str) -> str | None:
    """Name of the tool a call names, also where its JSON is broken; `None` when it names none."""
    body = call.removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        match = _TOOL_NAME.search(body)
        return match.group(1) if match else None
    name = parsed.get("name") if isinstance(parsed, dict) else None
    return name if isinstance(name, str) and name else None


def _check_lengths(actions: Sequence[Action], invalid: Sequence[bool]) -> None:
    if len(actions) != len(invalid):
        raise ValueError(f"`actions` holds {len(actions)} turns and `invalid` {len(invalid)}; both need one a turn.")
