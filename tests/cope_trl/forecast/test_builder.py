"""Branches of played and of made-up trajectories: which windows, cut where, rendered how."""

import random
from dataclasses import replace

import pytest
from support import make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.errors import ConfigError
from cope_trl.forecast.builder import BranchSettings, build_branches
from cope_trl.types import TaskRef, Trajectory, Turn


def episode(pattern, layout="list"):
    """One turn a letter: `a` an action, `c` a tool call, `x` an action without effect, `-` nothing executed."""
    turns = []
    for i, letter in enumerate(pattern):
        text = "" if letter == "-" else f"do {letter}{i}"
        start = 20 + 10 * i
        turns.append(Turn(start - 3, start, start + 4, text, text, text, invalid=letter == "x", is_call=letter == "c"))
    size = 10 * len(pattern)
    return Trajectory(
        TaskRef("e", "1"), tuple(range(20)), tuple(range(size)), (1,) * size, tuple(turns), layout=layout
    )


@pytest.fixture(scope="module", params=["qwen2_5", "gemma"])
def chat(request):
    return ChatFormat(make_tokenizer(request.param))


def build(chat, trajectories, weights, seed=0, **settings):
    settings = BranchSettings(**{"horizon": 2, **settings})
    return build_branches(trajectories, weights, chat, settings, random.Random(seed))


def targets_of(chat, branch):
    """The trained text of a branch, one action an entry."""
    trained = [i for i, m in zip(branch.ids, branch.loss_mask, strict=True) if m]
    end = chat.tokenizer.decode([chat.end_of_turn_id])
    return chat.tokenizer.decode(trained).replace(end, "\n").rstrip("\n").split("\n")


def test_every_turn_gives_a_branch_that_leaves_at_its_history(chat):
    (row,) = build(chat, [episode("aaaa")], [1.0])
    closing = chat.history_cut(0)  # 0, or before the end-of-turn tokens of the user's turn
    assert (closing < 0) == chat.merged
    assert [cut for cut, _ in row] == [17 + closing, 27 + closing, 37 + closing, 47 + closing]
    plans = [["do a0", "do a1", "do a2"], ["do a1", "do a2", "do a3"], ["do a2", "do a3"], ["do a3"]]
    assert [targets_of(chat, branch) for _, branch in row] == plans
    for (_, branch), plan in zip(row, plans, strict=True):
        assert branch == chat.branch(plan, "list")
        assert f"the next {len(plan)} actions" in chat.tokenizer.decode(branch.ids)


def test_a_trajectory_without_a_weight_gives_nothing(chat):
    rows = build(chat, [episode("aa"), episode("a"), episode("aaa")], [0.0, 0.25, 0.0])
    assert [len(row) for row in rows] == [0, 1, 0]
    assert build(chat, [], []) == []
    assert build(chat, [episode("--")], [1.0]) == [[]]


def test_rows_and_weights_must_match(chat):
    with pytest.raises(ValueError, match="zip"):
        build(chat, [episode("a")], [1.0, 1.0])


@pytest.mark.parametrize("horizon", [0, 1, 2, 4, 10])
def test_horizon(chat, horizon):
    (row,) = build(chat, [episode("aaaaa")], [1.0], horizon=horizon)
    assert [len(targets_of(chat, branch)) for _, branch in row] == [min(horizon + 1, 5 - t) for t in range(5)]


def test_actions_without_effect(chat):
    trajectory = episode("axa-a")
    (kept,) = build(chat, [trajectory], [1.0], horizon=1)
    assert [targets_of(chat, b) for _, b in kept] == [["do a0", "do x1"], ["do x1", "do a2"], ["do a2"], ["do a4"]]
    (skipped,) = build(chat, [trajectory], [1.0], horizon=1, skip_invalid=True)
    assert [targets_of(chat, b) for _, b in skipped] == [
        ["do a0", "do a2"],
        ["do a2", "do a4"],
        ["do a2", "do a4"],
        ["do a4"],
    ]


def test_windows_without_a_call_are_dropped_only_where_the_protocol_says_so(chat):
    pattern = "acaaa"
    (text,) = build(chat, [episode(pattern)], [1.0], horizon=1)
    (calls,) = build(chat, [replace(episode(pattern, "turns"), skip_no_call=True)], [1.0], horizon=1)
    assert len(text) == 5
    assert [targets_of(chat, b) for _, b in calls] == [["do a0", "do c1"], ["do c1", "do a2"]]
    assert [b.calls for _, b in calls] == [(False, True), (True, False)]
    assert all(replace(b, calls=()) == chat.branch(targets_of(chat, b), "turns") for _, b in calls)
    assert all(b.calls == () for _, b in text)


def test_max_windows_draws_with_the_generator_it_is_given(chat):
    trajectories = [episode("a" * 8), episode("a" * 2), replace(episode("a" * 8), success=True)]
    whole = build(chat, trajectories, [1.0] * 3)
    drawn = [build(chat, trajectories, [1.0] * 3, seed, max_windows=3) for seed in range(30)]
    assert drawn[0] == build(chat, trajectories, [1.0] * 3, 0, max_windows=3)
    assert all([len(row) for row in rows] == [3, 2, 3] for rows in drawn)
    for rows in drawn:
        for some, every in zip(rows, whole, strict=True):
            assert all(branch in every for branch in some)
            assert [cut for cut, _ in some] == sorted({cut for cut, _ in some})
    assert {cut for rows in drawn for cut, _ in rows[0]} == {cut for cut, _ in whole[0]}
    assert any([c for c, _ in rows[0]] != [c for c, _ in rows[2]] for rows in drawn)  # one draw each


def test_settings_are_checked(chat):
    with pytest.raises(ConfigError, match=r"`horizon` is -1"):
        build(chat, [episode("a")], [1.0], horizon=-1)
