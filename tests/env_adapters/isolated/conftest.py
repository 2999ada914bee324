"""Workers for the tests of isolation, and how to see that a process ended."""

import sys
import time
from pathlib import Path

import pytest

from env_adapters.isolated import start_worker

HOSTED = Path(__file__).with_name("hosted.py")


@pytest.fixture
def start():
    """Starts workers that are stopped after the test."""
    workers = []

    def make(name="Hosted", **options):
        arguments = options.pop("arguments", {})
        workers.append(start_worker("The worker", (HOSTED, name), arguments, python=sys.executable, **options))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


@pytest.fixture(scope="session")
def template():
    """One worker to fork others from, which is faster than starting them."""
    worker = start_worker("The template", (HOSTED, "Hosted"), {}, python=sys.executable)
    yield worker
    worker.stop()


@pytest.fixture(scope="session")
def running():
    """Whether a process is there and not merely waiting to be collected."""

    def is_running(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False

    return is_running


@pytest.fixture(scope="session")
def assert_ends(running):
    def wait(pid, seconds=10.0):
        until = time.monotonic() + seconds
        while running(pid):
            assert time.monotonic() < until, f"process {pid} is still there"
            time.sleep(0.02)

    return wait
