"""Means on hand-computed numbers, and over ranks as over one process."""

import pytest
import torch

from cope_trl.forecast.loss import OffsetStats
from cope_trl.metrics import RunningMeans
from cope_trl.types import Branch, TaskRef, Trajectory, Turn


def episode(letters="aax", **changes):
    """One turn a letter: `a` an action, `x` one without effect, `-` answered without one, `.` cut by a limit."""
    turns = [
        Turn(
            0,
            0,
            1,
            "reply",
            action="do" if letter in "ax" else "",
            invalid=letter in "x-",
            observation="" if letter == "." else "seen",
        )
        for letter in letters
    ]
    return Trajectory(TaskRef("e", "1"), (1,), (1,), (1,), tuple(turns), **changes)


PLAYED = [
    episode("aax", success=True, score=1.0, environment_seconds=2.0),
    episode("a-", score=0.25, environment_seconds=4.0),
    episode("a.", truncated=True, score=0.5, environment_seconds=0.0),
    episode("xxxx", failed=True, error="gone", score=9.0, environment_seconds=99.0),
]


def offsets(nll, hits, tokens):
    return OffsetStats(*(torch.tensor(values) for values in (nll, hits, tokens)))


def test_episodes_on_paper():
    means = RunningMeans(2)
    means.add_episodes(PLAYED)
    assert means.flush() == pytest.approx(
        {
            "episode/success": 1 / 3,
            "episode/score": 1.75 / 3,
            "episode/turns": 7 / 3,
            "episode/invalid_action_rate": 2 / 6,  # the turn that was cut was never executed
            "episode/truncated": 1 / 3,
            "episode/failed": 1 / 4,
            "episode/environment_seconds": 2.0,
        }
    )


def test_tool_calls_on_paper():
    """Five executed turns, three of them calls: one of three calls in a reply, one that could not be read."""
    turns = [
        Turn(0, 0, 1, "hello", action="hello", observation="hi"),
        Turn(0, 0, 1, "r", action="<tool_call>", is_call=True, observation="o", details={"num_calls": 3}),
        Turn(0, 0, 1, "r", action="<tool_call>", is_call=True, observation="o", details={"num_calls": 1}),
        Turn(0, 0, 1, "r", action="<tool_call>", is_call=True, observation="o", details={"malformed": True}),
        Turn(0, 0, 1, "bye", action="bye", observation="bye"),
    ]
    means = RunningMeans(0)
    means.add_episodes([Trajectory(TaskRef("e", "1"), (1,), (1,), (1,), tuple(turns), layout="turns")])
    logged = means.flush()
    assert logged["episode/tool_call_rate"] == pytest.approx(3 / 5)
    assert logged["episode/multi_call_rate"] == pytest.approx(1 / 3)
    assert logged["episode/malformed_call_rate"] == pytest.approx(1 / 3)


def test_groups_on_paper():
    """Groups of two: a refusal and a failure, two refusals, a refusal and a real success, nothing."""
    success = torch.tensor([1, 0, 1, 1, 1, 1, 0, 0]).bool()
    refusal = torch.tensor([1, 0, 1, 1, 1, 0, 0, 0]).bool()
    means = RunningMeans(0)
    means.add_groups(success, refusal, 2)
    assert means.flush() == pytest.approx({"forecast/group_success": 3 / 4, "forecast/refusal_groups": 2 / 3})
    means.add_groups(success[6:], refusal[6:], 2)
    assert means.flush() == {"forecast/group_success": 0.0}


@pytest.mark.parametrize(
    ("success", "details", "expected"),
    [(True, {"writes": 0}, True), (True, {"writes": 2}, False), (False, {"writes": 0}, False), (True, {}, False)],
)
def test_a_refusal_is_a_success_that_wrote_nothing(success, details, expected):
    turns = (Turn(0, 0, 1, "r", details={"writes": 0}), Turn(0, 0, 1, "r", details=details))
    played = Trajectory(TaskRef("e", "1"), (1,), (1,), (1,), turns, success=success)
    assert played.refusal is expected


def test_targets_that_are_calls():
    branches = [Branch((), (), (), calls) for calls in ((True, False), (True,), ())]
    means = RunningMeans(0)
    means.add_branches(branches)
    assert means.flush() == pytest.approx({"forecast/tool_call_rate": 2 / 3})


def test_only_failed_episodes():
    means = RunningMeans(0)
    means.add_episodes(PLAYED[3:])
    assert means.flush() == {"episode/failed": 1.0}


def test_flush_empties():
    means = RunningMeans(1)
    means.add("forecast/loss", 3.0, 2.0)
    means.add("forecast/loss", 5.0, 2.0)
    assert means.flush() == {"forecast/loss": 2.0}
    assert means.flush() == {}
    means.add("forecast/loss", 7.0)
    assert means.flush() == {"forecast/loss": 7.0}


def test_a_mean_of_zero_is_kept_and_a_count_of_zero_is_not():
    means = RunningMeans(0)
    means.add("forecast/loss", 0.0)
    means.add("episode/turns", 0.0, 0.0)
    assert means.flush() == {"forecast/loss": 0.0}


def test_offsets_on_paper():
    means = RunningMeans(2)
    means.add_offsets(offsets([6.0, 3.0, 0.0], [1.0, 2.0, 0.0], [4.0, 2.0, 0.0]))
    means.add_offsets(offsets([2.0, 0.0, 0.0], [3.0, 0.0, 0.0], [4.0, 0.0, 0.0]))
    assert means.flush() == pytest.approx(
        {
            "forecast/nll_k0": 1.0,
            "forecast/nll_k1": 1.5,
            "forecast/accuracy_k0": 0.5,
            "forecast/accuracy_k1": 1.0,
        }
    )


def test_an_unknown_name_is_refused():
    with pytest.raises(KeyError):
        RunningMeans(1).add("forecast/nll_k2", 1.0)


def fill(means, episodes, stats):
    means.add_episodes(episodes)
    for one in stats:
        means.add_offsets(one)
    means.add("forecast/windows", float(len(episodes)), 1.0)


@pytest.mark.parametrize("split", [0, 1, 2, 4])
def test_ranks_add_up_to_one_process(split):
    """Any division of the episodes over two ranks gives the means of them all; a rank may have had none."""
    stats = [offsets([6.0, 3.0], [1.0, 2.0], [4.0, 2.0]), offsets([2.0, 0.0], [3.0, 0.0], [4.0, 0.0])]
    whole, ranks = RunningMeans(1), [RunningMeans(1), RunningMeans(1)]
    fill(whole, PLAYED, stats)
    fill(ranks[0], PLAYED[:split], stats[: split and 1])
    fill(ranks[1], PLAYED[split:], stats[split and 1 :])
    shares = [rank._sums.clone() for rank in ranks]
    assert shares[0].shape == shares[1].shape == (2, len(whole.names))
    results = [rank.flush(lambda _: shares[0] + shares[1]) for rank in ranks]
    assert results[0] == results[1]
    expected = whole.flush()
    expected["forecast/windows"] /= 2  # one mean a rank
    assert results[0] == pytest.approx(expected)
    assert ranks[0].flush() == {}


def test_a_reduction_in_lower_precision_is_accepted():
    means = RunningMeans(0)
    means.add("episode/score", 1.0, 3.0)
    assert means.flush(lambda sums: sums.float() * 2)["episode/score"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------- time


def times(**values):
    means = RunningMeans(0)
    for name, value in values.items():
        means.add(name.replace("__", "/"), value)
    return {name: value for name, value in means.flush().items() if name.startswith("time/")}


def test_a_joint_update_is_divided_by_tokens():
    measured = times(time__update=8.0, time__rollout=2.0, tokens__policy=300.0, tokens__forecast=100.0)
    assert measured == pytest.approx({"time/rollout": 2.0, "time/policy": 6.0, "time/forecast": 2.0})


def test_without_forecasting_all_time_is_the_policys():
    assert times(time__update=8.0) == {"time/policy": 8.0, "time/forecast": 0.0}
    assert times(time__update=8.0, tokens__policy=9.0, tokens__forecast=0.0) == {
        "time/policy": 8.0,
        "time/forecast": 0.0,
    }


def test_a_step_of_its_own_is_timed():
    measured = times(time__update=8.0, time__forecast_step=3.0, tokens__policy=300.0, tokens__forecast=100.0)
    assert measured == {"time/policy": 8.0, "time/forecast": 3.0}


def test_without_an_update_there_is_nothing_to_divide():
    assert times(time__rollout=2.0) == {"time/rollout": 2.0}
    assert times(time__forecast_step=2.0) == {}


def test_tokens_an_importance_correction_leaves_by_length():
    means = RunningMeans(0)
    means.add_kept(torch.tensor([4, 0, 3, 5]), torch.tensor([4, 20, 6, 10]), median=8.0)
    logged = means.flush()
    assert logged["sampling/kept_share_short"] == pytest.approx(7 / 10)
    assert logged["sampling/kept_share_long"] == pytest.approx(5 / 30)
