"""Tool calls as replies write them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_adapters.protocols import ToolCall
from env_adapters.tau2.calls import MalformedCallError, count_calls, read_call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def span(body):
    return f"<tool_call>{body}</tool_call>"


@given(
    name=st.text(min_size=1).filter(lambda name: name != "calculate"),
    arguments=st.dictionaries(st.text(), JSON, max_size=4),
)
def test_what_json_writes_is_read_back(name, arguments):
    body = json.dumps({"name": name, "arguments": arguments})
    assert read_call(span(f"\n{body}\n")) == (name, arguments)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("<tool_call>", "no end"),
        ('<tool_call>{"name": "f", "arguments": {}}', "no end"),
        (span(""), "not valid JSON"),
        (span('{"name": "f", "arguments": {}'), "not valid JSON"),
        (span('{"name": "f", "arguments": {"x": NaN}}'), "NaN is no JSON"),
        (span('{"name": "f", "arguments": {"x": -Infinity}}'), "-Infinity is no JSON"),
        (span('{"name": "f", "arguments": {"x": "\\ud800"}}'), "half a character"),
        (span("[" * 100_000), "nested too deeply"),
        (span('{"name": "f", "arguments": {"x": ' + "9" * 5_000 + "}}"), "not valid JSON"),
        (span('["f", {}]'), "not a JSON object"),
        (span('"f"'), "not a JSON object"),
        (span('{"arguments": {}}'), "names no tool"),
        (span('{"name": "", "arguments": {}}'), "names no tool"),
        (span('{"name": ["f"], "arguments": {}}'), "names no tool"),
        (span('{"name": "f"}'), "no object of arguments"),
        (span('{"name": "f", "arguments": "{}"}'), "no object of arguments"),
        (span('{"name": "f", "arguments": null}'), "no object of arguments"),
        (span('{"name": "calculate", "arguments": {"expression": "9 * * 9 ** 9"}}'), "operators"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(text, reason):
    with pytest.raises(MalformedCallError, match=reason):
        read_call(text)


def test_a_power_is_refused_for_the_calculator_only():
    """The benchmark would hand it to Python, and `9**9**9` never comes back."""
    assert read_call(span('{"name": "calculate", "arguments": {"expression": "2 * (3 + 4)"}}')).name == "calculate"
    assert read_call(span('{"name": "note", "arguments": {"expression": "9**9"}}')).name == "note"
    assert read_call(span('{"name": "calculate", "arguments": {"expression": 9}}')).arguments == {"expression": 9}


@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", *'{}":[é\n', "name", "\ud83d"])).map("".join))
def test_any_call_the_protocol_finds_is_read_or_refused(reply):
    action = ToolCall().parse(reply)
    if action.is_call:
        with pytest.raises(MalformedCallError):  # none of these letters make a whole call
            read_call(action.text)


@pytest.mark.parametrize(
    ("reply", "number"),
    [
        ("Hello.", 0),
        ("<tool_call>{}</tool_call><tool_call>{}</tool_call>", 2),
        ("<tool_call>", 1),
        ("<think>I could <tool_call></think>Hello", 0),
        ("<tool_call></think><tool_call>", 1),
        ("<think><tool_call>", 0),
    ],
)
def test_calls_are_counted_outside_of_thinking(reply, number):
    assert count_calls(reply) == number
