"""Processes of their own: what they report arrives, and however they end is told."""

import os
import select

import apart
import processes
import pytest

STARTS = {"fork": True, "preload": ()}, {"fork": False}


@pytest.mark.parametrize("start", STARTS, ids=["fork", "spawn"])
def test_reports_arrive_in_order(start):
    reports = []
    ending = apart.run_apart(processes.count, reports.append, 60, up_to=3, **start)
    assert reports == [0, 1, 2]
    assert ending.error is None


@pytest.mark.parametrize("start", STARTS, ids=["fork", "spawn"])
def test_an_exception_is_told_with_its_traceback(start):
    reports = []
    ending = apart.run_apart(processes.fail, reports.append, 60, **start)
    assert reports == ["before"]
    assert "in fail" in ending.error
    assert "ValueError: on purpose" in ending.error


def test_a_process_that_dies_is_told():
    reports = []
    ending = apart.run_apart(processes.die, reports.append, 60, preload=())
    assert reports == ["before"]
    assert "died (exit code -9)" in ending.error


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits for a process that is not its child")
def test_a_process_that_hangs_is_ended_with_what_it_started():
    started = []
    ending = apart.run_apart(processes.hang, lambda pid: started.append(os.pidfd_open(pid)), 5, preload=())
    assert "not done after 5 s" in ending.error
    (child,) = started
    assert select.select([child], [], [], 60)[0] == [child]  # readable once the process has ended
    os.close(child)


def test_each_process_has_a_peak_of_its_own():
    small, large, again = [], [], []
    for reports, mib in ((small, 1), (large, 200), (again, 1)):
        assert apart.run_apart(processes.use_memory, reports.append, 60, preload=(), mib=mib).error is None
    assert large[0] - small[0] == pytest.approx(199, abs=10)
    assert again[0] == pytest.approx(small[0], abs=10)


def test_here_tells_the_same():
    reports = []
    assert apart.run_here(processes.count, reports.append, up_to=2).error is None
    ending = apart.run_here(processes.fail, reports.append)
    assert reports == [0, 1, "before"]
    assert "ValueError: on purpose" in ending.error
