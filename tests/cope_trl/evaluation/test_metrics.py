import json

import pytest
from rich.console import Console

from cope_trl.evaluation.metrics import results_markdown, results_table, summarize
from cope_trl.types import TaskRef, Trajectory, Turn


def episode(family="heat", success=False, score=0.0, turns=1, environment="household", **fields):
    return Trajectory(
        task=TaskRef(environment, "1", family),
        prompt_ids=(1,),
        completion_ids=(2,),
        completion_mask=(1,),
        turns=(Turn(0, 0, 1, "look"),) * turns,
        success=success,
        score=score,
        **fields,
    )


EPISODES = [
    episode("heat", True, 1.0, turns=4),
    episode("heat", False, 0.5, turns=8, truncated=True),
    episode("heat", True, 1.0, turns=90, failed=True),
    episode("cool", False, 0.0, turns=6),
]


def test_means_are_over_the_episodes_that_did_not_fail():
    results = summarize(EPISODES)
    assert results["episodes"] == 3
    assert results["failed"] == 1
    assert results["success"] == pytest.approx(1 / 3)
    assert results["score"] == pytest.approx(0.5)
    assert results["turns"] == pytest.approx(6)
    assert results["truncated"] == pytest.approx(1 / 3)


def test_families_and_environments_have_their_own_means():
    other = episode("", True, 100.0, environment="scienceworld")
    results = summarize([*EPISODES, other])
    assert list(results["environments"]) == ["household", "scienceworld"]
    household = results["environments"]["household"]
    assert list(household["families"]) == ["cool", "heat"]
    assert household["families"]["heat"] == {
        "episodes": 2,
        "failed": 1,
        "success": 0.5,
        "score": 0.75,
        "turns": 6.0,
        "truncated": 0.5,
    }
    assert results["environments"]["scienceworld"]["families"] == {}
    assert results["success"] == pytest.approx(2 / 4)  # weighted by counts, not a mean of means
    assert results["score"] is None  # 0 to 1 and 0 to 100 have no mean


def test_rows_give_what_trajectories_give():
    rows = [
        {
            "environment": "household",
            "family": e.task.family,
            "success": e.success,
            "score": e.score,
            "turns": turns,
            "truncated": e.truncated,
            "failed": e.failed,
        }
        for e, turns in zip(EPISODES, (4, [{}] * 8, 90, 6.0), strict=True)
    ]
    assert summarize(rows) == summarize(EPISODES)
    assert summarize([{"success": True}])["success"] == 1.0


def test_nothing_that_counts_has_no_mean():
    empty = summarize([])
    assert empty["episodes"] == empty["failed"] == 0
    assert empty["success"] is empty["score"] is empty["turns"] is None
    failed = summarize([episode(failed=True)])
    assert (failed["episodes"], failed["failed"], failed["success"]) == (0, 1, None)
    assert json.loads(json.dumps(failed)) == failed


def rendered(*args, **kwargs):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(results_table(*args, **kwargs))
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_the_table_fits_a_terminal_and_shows_both_sides():
    before, after = summarize(EPISODES), summarize([episode("heat", True, 1.0), episode("cool", True, 1.0)])
    lines = rendered(before, after, title="Household")
    assert lines[0] == ["Household"]
    assert "household 3 → 2 33.3 → 100.0 0.50 → 1.00 6.0 → 1.0 33.3 → 0.0".split() in lines
    assert "heat 2 → 1 50.0 → 100.0 0.75 → 1.00 6.0 → 1.0 50.0 → 0.0".split() in lines
    assert lines[-1] == "Failed episodes, in no mean: 1 → 0".split()


def test_the_table_of_one_evaluation():
    assert "household 1 100.0 1.00 1.0 0.0".split() in rendered(summarize([episode(success=True, score=1.0)]))


def test_markdown():
    before = summarize([episode("heat")])
    after = summarize([episode("heat", True, 1.0), episode("", True, 80.0, environment="scienceworld", turns=3)])
    assert results_markdown(before, after).splitlines() == [
        "| Tasks | Episodes | Succ. % | Score | Turns | Cut % |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| **all environments** | 1 → 2 | 0.0 → 100.0 | 0.00 → – | 1.0 → 2.0 | 0.0 → 0.0 |",
        "| **household** | 1 | 0.0 → 100.0 | 0.00 → 1.00 | 1.0 → 1.0 | 0.0 → 0.0 |",
        "| heat | 1 | 0.0 → 100.0 | 0.00 → 1.00 | 1.0 → 1.0 | 0.0 → 0.0 |",
        "| **scienceworld** | – → 1 | – → 100.0 | – → 80.00 | – → 3.0 | – → 0.0 |",
    ]
    assert results_markdown(summarize([episode(failed=True)])).endswith("\nFailed episodes, in no mean: 1\n")


def test_some_environments_average_over_their_families():
    """τ²-bench: three of four in one domain, none of one in another, and nothing that counts in a third."""
    played = [episode("retail", i < 3, float(i < 3), environment="tau2") for i in range(4)]
    played += [episode("airline", environment="tau2"), episode("telecom", failed=True, environment="tau2")]
    results = summarize(played)
    assert results["environments"]["tau2"]["success"] == results["success"] == pytest.approx(3 / 8)
    assert results["score"] == pytest.approx(3 / 8)
    assert results["episodes"] == 5
    assert summarize([episode("x", True, environment="no such one")])["success"] == 1.0
