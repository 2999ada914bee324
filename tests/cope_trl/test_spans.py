"""Spans: totals, nesting, threads, and a trace another program could read."""

import json
import threading

import pytest

from cope_trl import spans as spans_module
from cope_trl.spans import Spans


@pytest.fixture
def clock(monkeypatch):
    """A clock that is set by hand."""
    now = [100.0]
    monkeypatch.setattr(spans_module.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


def test_totals_add_up_by_name_and_begin_again(clock):
    spans = Spans()
    for seconds in (1.0, 2.0):
        with spans("outer"):
            clock(seconds)
            with spans("inner"):
                clock(0.5)
    assert spans.take() == {"outer": 4.0, "inner": 1.0}
    assert spans.take() == {}


def test_a_span_counts_when_something_is_raised(clock):
    spans = Spans()

    def work():
        with spans("work"):
            clock(3.0)
            raise OSError("in it")

    with pytest.raises(OSError, match="in it"):
        work()
    assert spans.seconds == {"work": 3.0}


def test_what_runs_beside_is_in_the_trace_and_not_in_the_totals(tmp_path):
    spans = Spans(recording=True)
    spans.add("update", 10.0, 12.5)
    spans.add("step", 10.25, 11.25, "environment", total=False)
    assert spans.take() == {"update": 2.5}
    spans.write_trace(tmp_path / "deep" / "trace.json", process=3)
    trace = json.loads((tmp_path / "deep" / "trace.json").read_text())
    names = {row["tid"]: row["args"]["name"] for row in trace["traceEvents"] if row["ph"] == "M"}
    events = [row for row in trace["traceEvents"] if row["ph"] == "X"]
    assert [(names[row["tid"]], row["name"], row["ts"], row["dur"]) for row in events] == [
        ("trainer", "update", 0.0, 2.5e6),
        ("environment", "step", 0.25e6, 1e6),
    ]
    assert {row["pid"] for row in trace["traceEvents"]} == {3}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["trace.json"]


def test_nothing_is_kept_unless_asked(tmp_path):
    spans = Spans()
    spans.add("update", 0.0, 1.0)
    spans.write_trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []


def test_a_long_run_keeps_its_latest_spans(tmp_path, monkeypatch):
    monkeypatch.setattr(spans_module, "MOST_EVENTS", 10)
    spans = Spans(recording=True)
    for i in range(25):
        spans.add(str(i), float(i), i + 0.5)
    spans.write_trace(tmp_path / "trace.json")
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [row["name"] for row in rows if row["ph"] == "X"] == [str(i) for i in range(15, 25)]
    assert spans.take()["3"] == 0.5


def test_threads_lose_nothing():
    spans = Spans()

    def work():
        for _ in range(500):
            spans.add("step", 0.0, 1.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert spans.take() == {"step": 2000.0}
