"""Turns read off a mask, against masks that were built turn by turn."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.rollout.token_mask import Completion, TurnReader, Verdict, holds_several_turns, policy_spans
from cope_trl.types import TaskRef

TASK = TaskRef("world", "1")
WON = Verdict(True, 1.0)


def conversation(chat, turns, messages=({"role": "user", "content": "Begin."},)):
    """Prompt ids, completion ids, mask and the span of each turn, from `(reply, observation)` pairs."""
    prompt = chat.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    ids, mask, spans = [], [], []
    for number, (reply, observation) in enumerate(turns):
        new = [*chat.tokenizer(reply, add_special_tokens=False)["input_ids"], chat.end_of_turn_id]
        spans.append((len(prompt) + len(ids), len(prompt) + len(ids) + len(new)))
        ids, mask = ids + new, mask + [1] * len(new)
        if number + 1 < len(turns):
            between = chat.turn_suffix_ids(observation, chat.end_of_turn_id)
            ids, mask = ids + between, mask + [0] * len(between)
    return prompt, ids, mask, spans


def reader(chat):
    return TurnReader(chat.decode, [chat.end_of_turn_id], chat)


@pytest.fixture(scope="module", params=["qwen2_5", "llama3", "mistral"])
def chat(request):
    return ChatFormat(make_tokenizer(request.param))


@given(st.lists(st.booleans(), max_size=40))
def test_spans_are_the_maximal_runs_of_ones(mask):
    spans = policy_spans([int(value) for value in mask])
    rebuilt = [False] * len(mask)
    for start, end in spans:
        assert start < end
        rebuilt[start:end] = [True] * (end - start)
    assert rebuilt == mask
    assert all(end < start for (_, end), (start, _) in pairwise(spans))


def test_turns_are_where_they_were_put(chat):
    turns = [("look", "A door."), ("open it", "It is open."), ("go", "")]
    prompt, ids, mask, spans = conversation(chat, turns)
    trajectory = reader(chat).read(Completion(TASK, prompt, ids, mask), WON)
    assert [(turn.start, turn.end) for turn in trajectory.turns] == spans
    assert [turn.reply for turn in trajectory.turns] == ["look", "open it", "go"]
    assert [turn.target for turn in trajectory.turns] == ["look", "open it", "go"]
    for turn in trajectory.turns:
        history = trajectory.ids[: turn.history_end]
        assert trajectory.ids[turn.history_end : turn.start] == tuple(chat.generation_prompt_ids)
        assert history[-len(chat.user_close_ids) :] == tuple(chat.user_close_ids) or not chat.merged
    assert trajectory.layout == "turns"
    assert not trajectory.skip_no_call
    assert not trajectory.truncated


def test_a_merged_history_that_does_not_end_with_the_user_gives_nothing():
    """There a plan-ahead request goes inside the user's turn, so there must be one."""
    chat = ChatFormat(make_tokenizer("mistral"))
    start = chat.tokenizer("a tool says hello")["input_ids"]
    ids = [*chat.tokenizer("look", add_special_tokens=False)["input_ids"], chat.end_of_turn_id]
    read = reader(chat)
    assert read.read(Completion(TASK, start, ids), WON).turns[0].action == ""
    assert (read.unread, read.turns) == (1, 1)


def test_a_prompt_without_generation_prompt_gives_nothing():
    chat = ChatFormat(make_tokenizer())
    ids = [*chat.tokenizer("look")["input_ids"], chat.end_of_turn_id]
    read = reader(chat)
    turn = read.read(Completion(TASK, chat.tokenizer("2 + 2 =")["input_ids"], ids), WON).turns[0]
    assert (turn.action, turn.target, turn.reply) == ("", "", "look")
    assert read.unread == 1


def test_without_a_chat_format_there_are_turns_but_no_actions():
    chat = ChatFormat(make_tokenizer())
    prompt, ids, mask, _ = conversation(chat, [("look", "A door."), ("go", "")])
    read = TurnReader(chat.decode, [chat.end_of_turn_id])
    assert [turn.action for turn in read.read(Completion(TASK, prompt, ids, mask), WON).turns] == ["", ""]


def test_a_call_in_another_notation_is_a_call():
    """Llama writes bare JSON; the parsed messages say that it is a call."""
    chat = ChatFormat(make_tokenizer("llama3"))
    reply = '{"name": "look", "parameters": {}}'
    prompt, ids, mask, _ = conversation(chat, [(reply, "A door."), ("Done.", "")])
    called = {"type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [called, called]},
        {"role": "tool", "name": "look", "content": "A door."},
        {"role": "tool", "name": "look", "content": "{'error': 'no'}"},
        {"role": "assistant", "content": "Done."},
    ]
    completion = Completion(TASK, prompt, ids, mask, messages=messages, runs_tools=True)
    first, last = reader(chat).read(completion, WON).turns
    assert (first.action, first.is_call, first.observation) == (reply, True, "A door.")
    assert first.details == {"num_calls": 2}
    assert not first.invalid  # the first call worked
    assert (last.action, last.is_call) == ("Done.", False)


def test_messages_that_do_not_follow_the_turns_are_left_alone():
    chat = ChatFormat(make_tokenizer())
    prompt, ids, mask, _ = conversation(chat, [("look", "A door."), ("go", "")])
    messages = [{"role": "assistant", "content": "look A door. go"}]
    first, last = reader(chat).read(Completion(TASK, prompt, ids, mask, messages=messages), WON).turns
    assert "A door." in first.observation
    assert last.action == "go"


def test_a_mask_of_another_length():
    chat = ChatFormat(make_tokenizer())
    with pytest.raises(ValueError, match="the mask holds 2 tokens and the completion 3"):
        reader(chat).read(Completion(TASK, [1], [2, 3, 4], [1, 1]), WON)


@given(st.data())
def test_every_cut_point(data):
    """However the ids are cut, lengths agree, spans stay inside, and a turn without its end does nothing."""
    chat = CHAT
    prompt, ids, mask, spans = conversation(chat, [("look", "A door."), ("open it", "It is open."), ("go", "")])
    cut = data.draw(st.integers(1, len(ids)))
    trajectory = reader(chat).read(Completion(TASK, prompt, ids[:cut], mask[:cut]), WON)
    assert len(trajectory.completion_ids) == len(trajectory.completion_mask) == cut
    total = len(prompt) + cut
    kept = [(start, min(end, total)) for start, end in spans if start < total]
    assert [(turn.start, turn.end) for turn in trajectory.turns] == kept
    for turn, (_, whole_end) in zip(trajectory.turns, spans, strict=False):
        assert bool(turn.action) == (turn.end == whole_end)
    assert trajectory.truncated == (mask[cut - 1] == 1 and ids[cut - 1] != chat.end_of_turn_id)


CHAT = ChatFormat(make_tokenizer())


def test_failed_and_missing_log_probabilities():
    prompt, ids, mask, _ = conversation(CHAT, [("look", "")])
    logprobs = [None, *[-0.5] * (len(ids) - 1)]
    trajectory = reader(CHAT).read(Completion(TASK, prompt, ids, mask, logprobs), Verdict(True, 0.0, failed=True))
    assert trajectory.failed
    assert not trajectory.success
    assert trajectory.error
    assert math.isnan(trajectory.logprobs[0])
    assert trajectory.logprobs[1] == -0.5


@pytest.mark.parametrize(
    ("ids", "prompt", "several"),
    [
        ([5, 6, 2], [9, 8], False),
        ([5, 6, 2, 7], [9, 8], False),  # a line break after the end of the turn
        ([5, 2, 7, 9, 8, 5, 2], [9, 8], True),
        ([5, 9, 8, 2], [9, 8], False),  # the policy may write anything before it stops
        ([5, 6], [9, 8], False),
        ([5, 2], [], False),
        ([5, 2, 7], [], True),  # a template without a generation prompt: whatever follows is foreign
    ],
)
def test_a_completion_of_several_turns(ids, prompt, several):
    assert holds_several_turns(ids, [2], prompt) is several
