"""Reading a tool call out of a reply."""

import json
from typing import Any, NamedTuple, NoReturn

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = f'Write it as {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}.'


class ToolCallRequest(NamedTuple):
    """A well-formed call: a tool's name, which may not exist, and its arguments."""

    name: str
    arguments: dict[str, Any]


class MalformedCallError(ValueError):
    """The text between the tags is no call; the message tells the agent what is wrong with it."""


def read_call(span: str) -> ToolCallRequest:
    """The call in a span such as `<tool_call>{"name": "f", "arguments": {}}</tool_call>`.

    Raises:
        MalformedCallError: the span has no end, or holds no JSON object with a name and arguments.
    """
    if not span.endswith(CLOSE):
        raise MalformedCallError(f"the tool call has no end. {FORM}")
    body = span.removeprefix(OPEN).removesuffix(CLOSE).strip()
    try:
        call = json.loads(body, parse_constant=_refuse_constant)
        # Half of a surrogate pair, written as an escape, is valid JSON but no text that could be sent on.
        json.dumps(call, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"the tool call is not valid JSON ({_reason(error)}). {FORM}") from error
    if not isinstance(call, dict):
        raise MalformedCallError(f"the tool call is not a JSON object. {FORM}")
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        raise MalformedCallError(f"the tool call names no tool. {FORM}")
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"the tool call has no object of arguments. {FORM}")
    _check_computable(name, arguments)
    return ToolCallRequest(name, arguments)


def count_calls(reply: str) -> int:
    """Number of calls a reply opens outside of its thinking."""
    spoken = reply.rpartition("</think>")[2]
    return 0 if "<think>" in spoken else spoken.count(OPEN)


def _check_computable(name: str, arguments: dict[str, Any]) -> None:
    # The benchmark hands the expression to Python. It documents + - * / only, but would also raise to a power, which
    # can take hours and all memory.
    if name == "calculate" and "**" in "".join(str(arguments.get("expression", "")).split()):
        raise MalformedCallError("`calculate` knows the operators +, -, * and / only.")


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return "it holds half a character"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error)
