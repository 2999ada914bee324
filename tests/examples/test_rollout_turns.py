"""The benchmark of the kept cache at tiny sizes: unique tokens counted by hand, both engines, the files."""

import json
from types import SimpleNamespace

import pytest
import rollout_turns


def episode(ids, turns):
    return SimpleNamespace(ids=ids, turns=[SimpleNamespace(start=start, end=end) for start, end in turns])


def test_unique_tokens_by_hand():
    """Two episodes share the prompt 1 2 3; each first turn has two tokens, the second of which is prefilled."""
    first = episode([1, 2, 3, 10, 11, 20, 21, 12], [(3, 5), (7, 8)])
    second = episode([1, 2, 3, 14, 15, 30, 16], [(3, 5), (6, 7)])
    assert rollout_turns.unique_tokens([first]) == 3 + 1 + 2
    assert rollout_turns.unique_tokens([first, second]) == 3 + (1 + 2) + (1 + 1)


def test_what_comes_after_different_replies_is_not_shared():
    first = episode([1, 10, 11, 20, 12], [(1, 3), (4, 5)])
    second = episode([1, 14, 11, 20, 12], [(1, 3), (4, 5)])
    assert rollout_turns.unique_tokens([first, second]) == 1 + 2 * (1 + 1)


@pytest.mark.filterwarnings("ignore")
def test_the_script_measures_and_saves(tmp_path, monkeypatch, capsys):
    tiny = ["--turns", "1,3", "--episodes", "3", "--hidden", "64", "--layers", "1", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["rollout_turns.py", *tiny, "--output_dir", str(tmp_path)])
    rollout_turns.main()
    said = capsys.readouterr().out
    assert "| turns | anew_seconds | kept_seconds | ratio |" in said
    saved = json.loads((tmp_path / "rollout_turns.json").read_text())
    one, three = saved["cells"]
    assert (one["turns"], three["turns"]) == (1, 3)
    assert 1.0 <= three["prefilled_per_unique"] <= 1.1
    assert three["anew_prefilled_tokens"] > 3 * one["anew_prefilled_tokens"]
    assert set(saved["exponents"]) == {"anew", "kept"}
    assert (tmp_path / "rollout_turns.png").stat().st_size > 5000
