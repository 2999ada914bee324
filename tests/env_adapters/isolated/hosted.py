"""What the tests have a worker host; loaded by path in the worker's interpreter, so standard library only."""

import os
import sys
import time


class Hosted:
    def __init__(self, start=0):
        self.total = start

    def add(self, number):
        self.total += number
        return self.total

    def echo(self, value):
        return value

    def run(self, code):
        """Run code; return what it assigned to `result`."""
        names = {}
        exec(code, names)
        return names.get("result")

    def sleep(self, seconds):
        time.sleep(seconds)

    def hold_the_interpreter(self):
        return len(str(7 ** (7**8)))  # minutes in one C function that lets no other thread run

    def print_a_lot(self):
        print("to sys.stdout")
        os.write(1, b"to descriptor 1\n")
        print("to sys.stderr", file=sys.stderr, flush=True)
        return sys.stdin.read() if sys.stdin else ""

    def unserializable(self):
        return {1, 2}

    def without_landlock(self):
        sys.modules["_sandbox"]._landlock = lambda reading, writing: 0


class Broken:
    def __init__(self):
        raise ValueError("never ready")
