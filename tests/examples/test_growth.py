"""The growth benchmark at tiny sizes: what it counts is exact, and the files are written."""

import dataclasses
import json

import growth
import pytest

TINY = growth.Cell(turns=3, observation=8, thought=4, action=3, hidden=64, layers=1)


def test_factors_double():
    for factor in ("batch", "turns", "observation", "horizon"):
        cells = [cell for cells in growth.UPDATE_SWEEPS.values() for cell in cells if factor in cell]
        values = [cell[factor] + (factor == "horizon") for cell in cells]
        assert values == [values[0] * 2**i for i in range(4)]


def test_an_update_is_counted_exactly():
    row = growth.measure("update", TINY, 2, 1, alone=False)
    more = growth.measure("update", dataclasses.replace(TINY, batch=4), 2, 1, alone=False)
    assert (row["windows"], more["windows"]) == (3, 6)  # half of the episodes, three turns each
    assert more["tokens"] == 2 * row["tokens"]
    assert more["branch_tokens"] == 2 * row["branch_tokens"] > 0
    assert row["seconds"] > 0
    assert row["horizon + 1"] == 3


def test_a_rollout_is_counted_exactly():
    row = growth.measure("rollout", TINY, 1, 1, alone=False)
    more = growth.measure("rollout", dataclasses.replace(TINY, turns=6), 1, 1, alone=False)
    # Three more turns: each 4 + 3 words, `Action`, `:` and the end, then 8 words in the markup of two turns.
    assert more["tokens"] - row["tokens"] == pytest.approx(2 * 3 * (4 + 3 + 3 + 8 + 9), rel=0.1)
    assert row["seconds"] > 0


def test_a_failing_cell_says_which():
    with pytest.raises(RuntimeError, match=r"rollout of Cell\(batch=2.*thought=400"):
        growth.measure("rollout", dataclasses.replace(TINY, thought=400), 1, 1, alone=False)


def test_windows_change_and_tokens_do_not():
    many, few = growth.equal_tokens((4, 2), turns=4)
    assert (many.windows, few.windows) == (4, 2)
    assert few.action > many.action
    sizes = {"hidden": 64, "layers": 1}
    one, other = (
        growth.measure("update", dataclasses.replace(cell, **sizes), 2, 1, alone=False) for cell in (many, few)
    )
    assert (one["windows"], other["windows"]) == (4, 2)
    assert other["branch_tokens"] == pytest.approx(one["branch_tokens"], rel=0.03)
    assert other["tokens"] == pytest.approx(one["tokens"], rel=0.03)


def test_the_whole_run_writes_its_files(tmp_path, monkeypatch, capsys):
    small = {"turns": 2, "observation": 4, "thought": 2, "action": 2, "hidden": 64, "layers": 1}
    monkeypatch.setattr(growth, "UPDATE_SWEEPS", {"batch": [{**small, "batch": n} for n in (2, 4, 8)]})
    monkeypatch.setattr(growth, "ROLLOUT_SWEEPS", {"turns": [{**small, "turns": n} for n in (2, 4, 8)]})
    monkeypatch.setattr(growth, "WINDOWS", (2, 1))
    growth.main(["--here", "--quick", "--threads", "1", "--output_dir", str(tmp_path)])
    saved = json.loads((tmp_path / "growth.json").read_text())
    update, rollout = saved["fits"]
    assert (update["kind"], update["factor"], update["values"]) == ("update", "batch", [2, 4])  # `--quick` takes two
    assert update["exponents"]["tokens"] == pytest.approx(1.0)
    assert (rollout["kind"], rollout["values"]) == ("rollout", [2, 4])
    assert 0.5 < rollout["exponents"]["tokens"] < 1.0  # the prompt does not grow
    assert [row["windows"] for row in saved["windows"]] == [2, 1]
    tables = (tmp_path / "growth.md").read_text()
    assert tables in capsys.readouterr().out
    assert "| update | batch | 2, 4 | 1.00 (1.00) |" in tables
    assert (tmp_path / "growth.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_memory_follows_the_tokens_not_the_windows():
    cells = [dataclasses.replace(cell, layers=2) for cell in growth.equal_tokens((8, 4), turns=8)]
    cells.append(dataclasses.replace(cells[0], batch=4))
    many, few, double = (growth.measure("update", cell, 2, 1) for cell in cells)
    assert few["memory_mib"] == pytest.approx(many["memory_mib"], rel=0.1)
    assert double["memory_mib"] > 1.5 * many["memory_mib"]
