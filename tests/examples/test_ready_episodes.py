"""The benchmark of schedules at tiny sizes: both sample the same, and what no schedule can beat is a bound."""

import json

import pytest
import ready_episodes


@pytest.fixture(scope="module")
def bench():
    return ready_episodes.Bench(episodes=3, turns=2, hidden=64, layers=1)


def test_both_schedules_play_the_same_episodes(bench):
    played = [bench.play(lambda episode, turn: 0.0, in_step, range(3))[1] for in_step in (True, False)]
    first, second = ([(e.task.task_id, len(e.turns), e.prompt_ids) for e in episodes] for episodes in played)
    assert first == second
    assert [turns for _, turns, _ in first] == [2, 2, 2]
    assert len({prompt for _, _, prompt in first}) == 3


def test_delays_are_those_of_their_names():
    spread = [ready_episodes.spread(episode, turn) for episode in range(40) for turn in range(20)]
    assert 0.001 <= min(spread) < 0.0012
    assert 0.4 < max(spread) <= 0.5
    assert sum(value < 0.0224 for value in spread) == pytest.approx(400, abs=40)  # the geometric middle
    one = ready_episodes.DELAYS["one of 16 at 500 ms"]
    assert [one(0, 3), one(1, 3)] == [0.5, 0.001]


def test_an_environment_takes_its_time(bench):
    seconds, _, spans = bench.play(lambda episode, turn: 0.1 if episode == 2 else 0.0, False, range(3))
    assert seconds >= 0.2
    assert spans.seconds["environment"] <= seconds


@pytest.mark.filterwarnings("ignore")
def test_the_script_measures_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ready_episodes, "DELAYS", {"1 ms": lambda episode, turn: 0.001})
    tiny = ["--episodes", "2", "--turns", "2", "--rounds", "1", "--hidden", "64", "--layers", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["ready_episodes.py", *tiny, "--output_dir", str(tmp_path)])
    ready_episodes.main()
    assert "| delay | lock_step_seconds | own_pace_seconds |" in capsys.readouterr().out
    (cell,) = json.loads((tmp_path / "ready_episodes.json").read_text())["delays"].values()
    assert cell["bound_seconds"] == max(cell["generation_seconds"], cell["alone_seconds"])
    assert cell["own_pace_over_bound"] == pytest.approx(cell["own_pace_seconds"] / cell["bound_seconds"])
    assert (tmp_path / "ready_episodes.png").stat().st_size > 5000
