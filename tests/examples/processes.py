"""What the tests of `apart.py` run in processes of their own."""

import os
import signal
import subprocess
import sys


def count(report, up_to):
    for number in range(up_to):
        report(number)


def fail(report):
    report("before")
    raise ValueError("on purpose")


def die(report):
    report("before")
    os.kill(os.getpid(), signal.SIGKILL)


def hang(report):
    """Start a process that hangs, report its id, and hang as well."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    report(child.pid)
    signal.pause()


def use_memory(report, mib):
    from apart import peak_mib

    block = bytearray(mib * 2**20)
    block[:: 2**12] = b"1" * (mib * 2**8)  # a page counts only once it is written
    report(peak_mib())
