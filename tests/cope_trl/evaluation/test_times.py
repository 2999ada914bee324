"""The table of a profiled run, computed by hand."""

import io

import pytest
from rich.console import Console

from cope_trl.evaluation.times import mean_times, time_table

HISTORY = [
    {
        "step": 2,
        "time/rollout": 3.0,
        "time/prefill": 1.0,
        "time/decode": 1.5,
        "time/policy": 2.0,
        "time/optimizer": 0.5,
    },
    {
        "step": 3,
        "time/rollout": 6.0,
        "time/prefill": 4.0,
        "time/decode": 1.5,
        "time/policy": 5.0,
        "time/optimizer": 0.5,
    },
    {"step": 3, "eval_reward": 1.0},
]


def test_means_weigh_each_entry_by_its_steps():
    times, steps = mean_times(HISTORY)
    assert steps == 3
    expected = {"rollout": 4.0, "prefill": 2.0, "decode": 1.5, "policy": 3.0, "optimizer": 0.5}
    assert times == pytest.approx(expected)


def test_a_run_that_was_resumed_counts_its_own_steps():
    times, steps = mean_times(HISTORY, before=2)
    assert (steps, times["rollout"]) == (1, 6.0)
    assert mean_times(HISTORY, before=3) == ({}, 0)


def printed(history, seconds, **arguments):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(time_table(history, seconds, **arguments))
    lines = console.export_text().splitlines()
    return [line.split() for line in lines if line.strip() and "─" not in line]


def test_the_table_written_out():
    title, head, *rows = printed(HISTORY, 30.0)
    assert " ".join(title) == "Where a step's time goes (mean of 3 steps, 10.00 s each)"
    assert head == ["seconds", "share"]
    assert rows == [
        ["rollout", "4.000", "40.0%"],
        ["prefill", "2.000", "20.0%"],
        ["decode", "1.500", "15.0%"],
        ["update", "3.500", "35.0%"],
        ["policy", "3.000", "30.0%"],
        ["optimizer", "0.500", "5.0%"],
        ["other", "2.500", "25.0%"],
    ]


def test_a_run_without_a_step_has_an_empty_table():
    _, _, *rows = printed([], 0.0)
    assert rows == [["rollout", "0.000"], ["update", "0.000"], ["other", "0.000"]]
