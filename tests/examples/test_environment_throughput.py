"""The environment benchmark: its script from the command line, its rules on memory and failures, what it plays."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import environment_throughput as script
import pytest

from cope_trl.rollout.pool import Failure
from env_adapters import make
from env_adapters.errors import MissingDependencyError


@pytest.fixture
def household():
    with script.prepared("household") as play:
        yield play


def test_the_script_measures_the_household_and_says_what_is_not_there(tmp_path):
    arguments = ["--environments", "household,appworld", "--counts", "2,1", "--seconds", "0.01", "--warm_up", "0"]
    nothing = {"APPWORLD_PYTHON": str(tmp_path / "none"), "APPWORLD_ROOT": str(tmp_path), "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, script.__file__, *arguments, "--output_dir", str(tmp_path)],
        env={**os.environ, **nothing},
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "appworld: skipped. " in done.stdout
    assert (tmp_path / "environment_throughput.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "environment_throughput.json").read_text())["environments"]
    assert "APPWORLD_PYTHON" in results["appworld"]["skipped"]
    rows = results["household"]["counts"]
    assert [row["environments"] for row in rows] == [1, 2]
    for row in [*rows, results["household"]["direct"]]:
        assert row["steps_per_s"] > 0
        assert row["steps"] > 0


def test_recorded_replies_win_and_are_all_valid(household):
    env = make("household")
    assert len(household.episodes) == 4
    for task_id, replies in household.episodes.items():
        env.reset(options={"task_id": task_id})
        outcomes = [env.step(reply) for reply in replies]
        assert not any(outcome[-1]["invalid"] for outcome in outcomes)
        assert outcomes[-1][-1]["success"]


def test_every_environment_makes_every_step_once_a_round(household):
    """Two rounds are played, the second of them timed."""
    expected = 3 * sum(map(len, household.episodes.values()))
    pool = script.EnvironmentPool(lambda _: household.make())
    handles = [pool.acquire("household") for _ in range(3)]
    row = script.play_at_once(pool, handles, household, seconds=0.0)
    pool.close()
    assert (row["environments"], row["steps"]) == (3, expected)


@pytest.mark.parametrize(("free_mb", "played"), [(3 * 1024 + 20, [1, 2, 4]), (3 * 1024 + 15, [1, 2]), (1024, [])])
def test_counts_end_before_memory_does(household, monkeypatch, free_mb, played):
    """Each environment is said to take 10 MB: two more of them fit into 20 MB, not into 15."""

    def pretend(pool, handles, play, seconds):
        return {"environments": len(handles), "memory_mb": 10.0 * len(handles), "largest_child_peak_mb": 0.0}

    monkeypatch.setattr(script, "play_at_once", pretend)
    monkeypatch.setattr(script.Processes, "memory_mb", lambda self: 0.0)
    monkeypatch.setattr(script.psutil, "virtual_memory", lambda: SimpleNamespace(available=free_mb * 2**20))
    result = script.curve("household", household, [4, 1, 2], 0.0)
    assert [row["environments"] for row in result["counts"]] == played
    assert ("stopped" in result) == (played != [1, 2, 4])
    assert all(row["mb_each"] == 10.0 for row in result["counts"])


def test_stock_and_adapter_get_the_same_replies_in_turns(household):
    told = []
    stock = SimpleNamespace(reset=told.append, step=told.append, close=lambda: told.append("closed"))
    play = script.Play(household.make, household.episodes, lambda: stock)
    result = script.compare(play, seconds=0.0, warm_up=1)
    one_round = [said for task_id, replies in household.episodes.items() for said in (task_id, *replies)]
    assert told == [*one_round, *one_round, "closed"]
    assert result["stock"]["steps"] == result["direct"]["steps"] == len(one_round) - len(household.episodes)
    assert result["times_as_fast"] == pytest.approx(
        result["direct"]["steps_per_s"] / result["stock"]["steps_per_s"], rel=0.01
    )


def test_a_failure_and_an_invalid_reply_end_the_measurement():
    with pytest.raises(RuntimeError, match="the world is gone"):
        script.checked([Failure("the world is gone")])
    with pytest.raises(RuntimeError, match="not valid any more"):
        script.checked([("seen", 0.0, False, False, {"invalid": True})])


def test_what_is_missing_is_a_result(monkeypatch):
    def missing(name):
        raise MissingDependencyError("needs the package `hen`")

    monkeypatch.setattr(script, "prepared", missing)
    assert script.measure("household", [1], 0.0, 0) == {"skipped": "needs the package `hen`"}
    assert "household: skipped. needs the package `hen`" in script.table(
        "household", {"skipped": "needs the package `hen`"}
    )
