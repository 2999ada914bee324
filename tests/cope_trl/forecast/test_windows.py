import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cope_trl.errors import ConfigError
from cope_trl.forecast.windows import forecast_windows
from cope_trl.types import TaskRef, Trajectory, Turn


def episode(pattern: str) -> Trajectory:
    """One turn a letter: `a` an action, `c` a tool call, `x` an action without effect, `-` no action."""
    turns = []
    for i, letter in enumerate(pattern):
        text = "" if letter == "-" else f"{letter}{i}"
        turns.append(
            Turn(
                history_end=10 + 7 * i,
                start=12 + 7 * i,
                end=15 + 7 * i,
                reply=f"Action: {text}",
                action=text.upper(),
                target=text,
                invalid=letter in "x-",
                is_call=letter == "c",
            )
        )
    length = 7 * len(pattern)
    return Trajectory(
        task=TaskRef("fake", "1"),
        prompt_ids=tuple(range(12)),
        completion_ids=tuple(range(length)),
        completion_mask=(1,) * length,
        turns=tuple(turns),
    )


def plans(pattern: str, horizon: int, **switches) -> dict[int, str]:
    return {w.turn: " ".join(w.targets) for w in forecast_windows(episode(pattern), horizon, **switches)}


def test_every_turn_gets_a_window_and_the_end_never_over_promises():
    assert plans("aaaa", 2) == {0: "a0 a1 a2", 1: "a1 a2 a3", 2: "a2 a3", 3: "a3"}


def test_horizon_zero_is_the_action_taken_now():
    assert plans("aaa", 0) == {0: "a0", 1: "a1", 2: "a2"}


def test_targets_are_the_literal_span_and_histories_are_those_of_the_turn():
    windows = forecast_windows(episode("aa"), 1)
    assert [w.targets for w in windows] == [("a0", "a1"), ("a1",)]  # not "A0", which is what was executed
    assert [w.turns for w in windows] == [(0, 1), (1,)]
    assert [w.history_end for w in windows] == [10, 17]


def test_an_empty_action_has_no_window_and_still_counts_as_an_offset():
    assert plans("a-aa", 2) == {0: "a0 a2", 2: "a2 a3", 3: "a3"}


def test_invalid_actions_are_forecast_unless_skipped():
    assert plans("axa", 1) == {0: "a0 x1", 1: "x1 a2", 2: "a2"}


def test_skipping_looks_past_invalid_actions_and_keeps_their_windows():
    assert plans("axxaa", 1, skip_invalid=True) == {0: "a0 a3", 1: "a3 a4", 2: "a3 a4", 3: "a3 a4", 4: "a4"}


def test_skipping_past_an_empty_action():
    assert plans("a-aa", 2, skip_invalid=True) == {0: "a0 a2 a3", 2: "a2 a3", 3: "a3"}


def test_no_window_when_nothing_effective_follows():
    assert plans("axx", 2, skip_invalid=True) == {0: "a0"}


def test_a_window_without_a_tool_call_is_dropped():
    assert plans("aaca", 1, skip_no_call=True) == {1: "a1 c2", 2: "c2 a3"}
    assert plans("aaa", 1, skip_no_call=True) == {}


def test_an_episode_without_turns_has_no_window():
    assert plans("", 2) == {}
    assert plans("--", 2) == {}


def test_the_draw_depends_on_the_seed_only():
    draw = [forecast_windows(episode("a" * 20), 1, max_windows=4, rng=random.Random(s)) for s in (1, 1, 2)]
    assert draw[0] == draw[1] != draw[2]


def test_the_draw_is_uniform():
    rng, counts = random.Random(0), [0] * 10
    for _ in range(2000):
        for window in forecast_windows(episode("a" * 10), 0, max_windows=3, rng=rng):
            counts[window.turn] += 1
    assert sum(counts) == 6000
    assert all(500 < count < 700 for count in counts)  # 600 expected, standard deviation 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"horizon": -1}, "`horizon` is -1"),
        ({"horizon": 1, "max_windows": 0}, "`max_windows` is 0"),
        ({"horizon": 1, "max_windows": 2}, "`rng` is None"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        forecast_windows(episode("a"), **arguments)


patterns = st.text(alphabet="acx-", max_size=14)
horizons = st.integers(0, 5)


@given(patterns, horizons, st.booleans())
def test_every_window_is_a_slice_of_the_future(pattern, horizon, skip_invalid):
    trajectory = episode(pattern)
    windows = forecast_windows(trajectory, horizon, skip_invalid=skip_invalid)
    for w in windows:
        assert 1 <= len(w.targets) <= horizon + 1
        assert w.targets == tuple(trajectory.turns[i].target for i in w.turns)
        assert all(w.targets)
        assert list(w.turns) == sorted(set(w.turns))
        assert w.turns[0] >= w.turn
        assert w.history_end == trajectory.turns[w.turn].history_end
    assert [w.turn for w in windows] == sorted({w.turn for w in windows})


@given(patterns, horizons)
def test_without_skipping_a_window_is_every_action_of_its_span(pattern, horizon):
    trajectory = episode(pattern)
    windows = {w.turn: w for w in forecast_windows(trajectory, horizon)}
    assert set(windows) == {t for t, letter in enumerate(pattern) if letter != "-"}
    for t, w in windows.items():
        span = range(t, min(t + horizon + 1, len(pattern)))
        assert w.turns == tuple(i for i in span if pattern[i] != "-")


@given(patterns, horizons)
def test_with_skipping_a_window_is_the_next_effective_actions(pattern, horizon):
    effective = [i for i, letter in enumerate(pattern) if letter in "ac"]
    expected = {
        t: tuple(i for i in effective if i >= t)[: horizon + 1]
        for t, letter in enumerate(pattern)
        if letter != "-" and any(i >= t for i in effective)
    }
    windows = forecast_windows(episode(pattern), horizon, skip_invalid=True)
    assert {w.turn: w.turns for w in windows} == expected


@given(patterns, horizons)
def test_the_switches_agree_where_every_action_had_an_effect(pattern, horizon):
    trajectory = episode(pattern.replace("x", "a").replace("-", "a"))
    assert forecast_windows(trajectory, horizon) == forecast_windows(trajectory, horizon, skip_invalid=True)


@given(patterns, horizons, st.booleans())
def test_dropping_windows_without_a_call_changes_no_other(pattern, horizon, skip_invalid):
    trajectory = episode(pattern)
    every = forecast_windows(trajectory, horizon, skip_invalid=skip_invalid)
    kept = forecast_windows(trajectory, horizon, skip_invalid=skip_invalid, skip_no_call=True)
    assert kept == [w for w in every if any(trajectory.turns[i].is_call for i in w.turns)]


@given(patterns, horizons, st.integers(1, 6), st.integers(0, 1000))
def test_the_cap_keeps_a_subset_in_order(pattern, horizon, cap, seed):
    every = forecast_windows(episode(pattern), horizon)
    kept = forecast_windows(episode(pattern), horizon, max_windows=cap, rng=random.Random(seed))
    assert len(kept) == min(cap, len(every))
    assert kept == [w for w in every if w in kept]


@given(patterns, horizons)
def test_the_outcome_of_the_episode_changes_nothing(pattern, horizon):
    trajectory = episode(pattern)
    failed = replace(trajectory, success=True, score=1.0, truncated=True)
    assert forecast_windows(trajectory, horizon) == forecast_windows(failed, horizon)
