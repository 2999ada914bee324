"""Where the time goes: named spans of a process, added up, and on request kept for a Chrome trace."""

import json
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Single spans that are kept; of a longer run, the latest. A trace of them takes about 30 MB.
MOST_EVENTS = 300_000


class Spans:
    """Seconds by name.

    A span within another counts for itself and for the outer one. Totals are cheap enough to be kept always; single
    spans are kept only while `recording`.

    Args:
        recording: keep single spans.

    Attributes:
        seconds: summed seconds of each name since the last `take`.
    """

    def __init__(self, recording: bool = False) -> None:
        self.recording = recording
        self.seconds: dict[str, float] = defaultdict(float)
        self._events: deque[tuple[str, str, float, float]] = deque(maxlen=MOST_EVENTS)
        self._lock = threading.Lock()

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what is done inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, started, time.perf_counter())

    def add(self, name: str, start: float, end: float, lane: str = "trainer", total: bool = True) -> None:
        """Note a span by its `time.perf_counter()` times.

        Args:
            name: what was done.
            start, end: seconds.
            lane: row of the trace it is drawn in.
            total: add it to `seconds`; false for what runs beside the trainer.
        """
        with self._lock:
            if total:
                self.seconds[name] += end - start
            if self.recording:
                self._events.append((name, lane, start, end))

    def take(self) -> dict[str, float]:
        """Totals so far, which begin again at 0."""
        with self._lock:
            seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds

    def write_trace(self, path: Path, process: int = 0) -> None:
        """Write the spans kept in the Trace Event Format, which chrome://tracing and Perfetto open.

        Args:
            path: JSON file; written beside itself first, so that a reader never sees half of it.
            process: number of the process in the trace.
        """
        with self._lock:
            events = list(self._events)
        origin = min((start for _, _, start, _ in events), default=0.0)
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(lane for _, lane, _, _ in events))}
        rows: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ]
        rows += [
            {
                "ph": "X",
                "name": name,
                "pid": process,
                "tid": lanes[lane],
                "ts": round((start - origin) * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
            }
            for name, lane, start, end in events
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({"traceEvents": rows, "displayTimeUnit": "ms"}), encoding="utf-8")
        part.replace(path)
