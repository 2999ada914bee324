"""Parsers: hand-written replies, then whatever a model may write."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_adapters.protocols import NO_ACTION, Action, CodeBlock, ReActText, ToolCall

PROTOCOLS = [ReActText(), CodeBlock(), ToolCall()]

# Any code point, lone surrogates included, mixed with everything a parser looks for.
ANY_TEXT = st.text(st.characters(exclude_categories=()))
MARKUP = st.one_of(
    st.sampled_from(
        ["Action:", "action: ", "Thought: x", "\n", "\r\n", "\u2028", " ", "go to desk 1", "\u0130", "\x00"]
    ),
    st.sampled_from(["```", "```python\n", "````", "`", "<tool_call>", "</tool_call>", '{"name": "get"}', "\ud800"]),
    st.sampled_from(["<think>", "</think>"]),
)
REPLIES = st.one_of(ANY_TEXT, st.lists(st.one_of(MARKUP, ANY_TEXT), max_size=12).map("".join))


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)
@given(reply=REPLIES)
def test_parse_holds_its_promises_for_any_reply(protocol, reply):
    action = protocol.parse(reply)
    assert action.target in reply
    assert action.text in action.target
    assert bool(action.text) == bool(action.target)
    assert action.text == "" or action.text.strip() != ""
    assert action.is_call is False or isinstance(protocol, ToolCall)


@given(reply=REPLIES)
def test_a_react_action_is_one_line_without_blanks_around_it(reply):
    text = ReActText().parse(reply).text
    assert text == text.strip()
    assert len(text.splitlines()) <= 1


@given(thought=ANY_TEXT, action=st.text("abc 1.", min_size=1).filter(str.strip))
def test_a_react_action_is_found_after_any_thought(thought, action):
    # The closing tag keeps a thought that happens to hold a thinking tag out of the way.
    assert ReActText().parse(f"{thought}</think>\nAction: {action}").text == action.strip()


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("Thought: I go.\nAction: go to desk 1", "go to desk 1"),
        ("Thought: I go. Action: go to desk 1", "go to desk 1"),
        ("Action: go to desk 1\nObservation: you made that up", "go to desk 1"),
        ("Action:\n\n  go to desk 1  \nmore", "go to desk 1"),
        ("Action: look\nAction: go to desk 1", "go to desk 1"),
        ("ACTION: look", "look"),
        ("aCtIoN:look", "look"),
        ("Action: go to desk 1.", "go to desk 1."),
        ("Action: click[Buy Now]!", "click[Buy Now]!"),
        ("I think\ngo to desk 1\n\n", "go to desk 1"),
        ("go to desk 1", "go to desk 1"),
        ("one\r\ntwo\r\n", "two"),
        ("The transaction: done\nlook", "look"),  # a longer word is no marker
        ("Actions: look", "Actions: look"),
        ("<think>Action: open box 1</think>Action: look", "look"),
        ("<think>a</think><think>b</think>look", "look"),
        ("hidden Action: open box 1</think>look", "look"),  # the template opened the block
    ],
)
def test_react_action(reply, action):
    assert ReActText().parse(reply) == Action(action, action)


@pytest.mark.parametrize("reply", ["", " \n\t", "Action:", "look\nAction: \n ", "<think>Action: look", "</think>"])
def test_react_no_action(reply):
    assert ReActText().parse(reply) == NO_ACTION


@pytest.mark.parametrize("reply", ["look</think><think>Action: look", "<think></think><think>look"])
def test_a_second_thinking_block_left_open_hides_everything(reply):
    assert all(protocol.parse(reply) == NO_ACTION for protocol in PROTOCOLS)


@pytest.mark.parametrize(
    ("reply", "code", "target"),
    [
        ("So:\n```python\nprint(1)\n```", "print(1)", "```python\nprint(1)\n```"),
        ("```\na = 1\nprint(a)\n```\nDone.", "a = 1\nprint(a)", "```\na = 1\nprint(a)\n```"),
        ("```py\nold()\n```\nthen\n```py\nnew()\n```", "new()", "```py\nnew()\n```"),
        ("```py\n    indented()\n\n```", "    indented()", "```py\n    indented()\n\n```"),
        ("Action: ```python\nrun()\n```", "run()", "```python\nrun()\n```"),
        ("```python\nrun()```", "run()", "```python\nrun()```"),
        ("```run()```", "run()", "```run()```"),
        ("```python\r\nrun()\r\n```\r\n", "run()", "```python\r\nrun()\r\n```"),
        ("````\nrun()\n````", "run()", "````\nrun()\n````"),
        ("``````\nrun()\n``````", "run()", "``````\nrun()\n``````"),
        ("```py\nx = '```' + 'y'\n```", "x = '```' + 'y'", "```py\nx = '```' + 'y'\n```"),
        ("```py\nfirst()\n```\n```py\ncut_off(", "first()", "```py\nfirst()\n```"),
        ("```py\nforgotten()\n```py\nsecond()\n```", "second()", "```py\nsecond()\n```"),
        ("```py\nrun()\n``` and so on", "run()", "```py\nrun()\n```"),
        ("<think>```\nno()\n```</think>```\nyes()\n```", "yes()", "```\nyes()\n```"),
    ],
)
def test_code_block(reply, code, target):
    assert CodeBlock().parse(reply) == Action(code, target)


@pytest.mark.parametrize(
    "reply", ["", "print(1)", "```python\nprint(1)", "``` \n \n```", "`print(1)`", "<think>```\nno()\n```", "``````"]
)
def test_code_block_no_action(reply):
    assert CodeBlock().parse(reply) == NO_ACTION


@pytest.mark.parametrize(
    ("reply", "call"),
    [
        ('<tool_call>\n{"name": "get"}\n</tool_call>', '<tool_call>\n{"name": "get"}\n</tool_call>'),
        ("Sure. <tool_call>{1}</tool_call><tool_call>{2}</tool_call> done", "<tool_call>{1}</tool_call>"),
        ("Sure. <tool_call>{1} and on \n", "<tool_call>{1} and on"),
        ("<think><tool_call>{0}</tool_call></think><tool_call>{1}</tool_call>", "<tool_call>{1}</tool_call>"),
        ("</tool_call><tool_call>{1}</tool_call>", "<tool_call>{1}</tool_call>"),
    ],
)
def test_tool_call(reply, call):
    assert ToolCall().parse(reply) == Action(call, call, is_call=True)


def test_without_a_tool_call_the_whole_message_is_the_action():
    message = "Hello!\n\nHow can I help?"
    assert ToolCall().parse(f"<think>hm</think>\n{message} \n") == Action(message, message, is_call=False)
    assert ToolCall().parse(" \n ") == NO_ACTION


def test_layouts_and_switches():
    assert [protocol.layout for protocol in PROTOCOLS] == ["list", "list", "turns"]
    assert [protocol.skip_no_call for protocol in PROTOCOLS] == [False, False, True]
    assert all(protocol.no_action_observation for protocol in PROTOCOLS)


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)
@pytest.mark.parametrize(
    "unit", ["`", "``` ", "```\n", "```x\n", "Action:", "Action: \n", "<tool_call>", "<think>", '"name" ', " ", "\n"]
)
def test_long_hostile_replies_take_no_time(protocol, unit):
    started = time.process_time()
    action = protocol.parse(unit * 100_000)
    protocol.invalid_turns([action], [True])
    # Quadratic work on these lengths would take minutes.
    assert time.process_time() - started < 10


# ------------------------------------------------------------------ final flags


def call(name, more=""):
    return ToolCall().parse(f'<tool_call>{{"name": "{name}"{more}}}</tool_call>')


def say(text):
    return ToolCall().parse(text)


@pytest.mark.parametrize("protocol", [ReActText(), CodeBlock()], ids=lambda p: p.name)
def test_text_and_code_keep_the_flags_of_the_environment(protocol):
    actions = [Action("a", "a"), Action("a", "a"), NO_ACTION]
    assert protocol.invalid_turns(actions, [True, False, True]) == [True, False, True]


@pytest.mark.parametrize(
    ("actions", "reported", "final"),
    [
        # an error repaired later by the same tool; the arguments do not matter
        ([call("get"), call("get", ', "arguments": {"a": 1}')], [True, False], [True, False]),
        # never repaired, repaired by another tool only, or right before the error
        ([call("get"), call("get")], [True, True], [False, False]),
        ([call("get"), call("put")], [True, False], [False, False]),
        ([call("get"), call("get")], [False, True], [False, False]),
        # a call with broken JSON still names its tool
        ([call("get", ", oops"), say("Sorry."), call("get")], [True, False, False], [True, False, False]),
        # no tool named: the environment's own flag
        ([ToolCall().parse("<tool_call>{"), ToolCall().parse("<tool_call>[1]")], [True, True], [True, True]),
        # a message repeated word for word, at any distance; near repeats are fine
        ([say("Hi."), call("get"), say("Hi."), say("Hi!")], [False] * 4, [False, False, True, False]),
        # empty replies are no repeated messages, and keep their flag
        ([NO_ACTION, NO_ACTION], [True, True], [True, True]),
        ([say("Hi.")], [True], [True]),
        ([], [], []),
    ],
)
def test_tool_call_final_flags(actions, reported, final):
    assert ToolCall().invalid_turns(actions, reported) == final


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda p: p.name)
def test_flags_need_one_a_turn(protocol):
    with pytest.raises(ValueError, match="`actions` holds 1 turns and `invalid` 2"):
        protocol.invalid_turns([NO_ACTION], [True, False])


def test_deeply_nested_json_is_no_error():
    nested = ToolCall().parse("<tool_call>" + "[" * 100_000)
    assert ToolCall().invalid_turns([nested], [True]) == [True]
