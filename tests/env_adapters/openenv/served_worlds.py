"""Environments that the tests serve, besides the household."""

import os
import threading

import numpy as np

from env_adapters import Outcome, ReActText, Task, TextEnv, ToolCall


class Moody(TextEnv):
    """Says who plays it; raises, dies, or hangs on request, and wakes when it is killed."""

    name = "moody"
    protocol = ReActText()
    instruction = "Wave."
    splits = ("train",)

    def __init__(self):
        self._killed = threading.Event()

    @classmethod
    def tasks(cls, split):
        cls.check_split(split)
        return [Task(cls.name, "hello", "greeting", split)]

    def kill(self):
        self._killed.set()
        self.close()

    def _begin(self, task_id, seed):
        return f"Hello from {os.getpid()}."

    def _act(self, action):
        if action.text == "raise":
            raise LookupError("what did you say? \ud800")
        if action.text == "die":
            os._exit(4)
        if action.text == "hang":
            self._killed.wait()
            raise RuntimeError("woken")
        return Outcome("You wave.")


class Odd(TextEnv):
    """Repeats what it hears, with details that JSON has no words for; its prompt and its tools name the task."""

    name = "odd"
    protocol = ToolCall()
    instruction = "Say something."
    splits = ("first", "second")
    score_range = (-5.0, 5.0)
    max_turns, max_turns_eval = 7, 9
    mean_over_families = True

    @classmethod
    def tasks(cls, split, count=2):
        cls.check_split(split)
        if count < 0:
            raise LookupError("nothing to list")
        return [Task(cls.name, f"{split} {n} ü", f"family {n}", split) for n in range(count)]

    @classmethod
    def standing_messages(cls, task_id=None):
        return [{"role": "system", "content": f"Say something about {task_id}."}]

    @classmethod
    def tools(cls, task_id=None):
        return [{"type": "function", "function": {"name": f"say_{task_id}", "parameters": {"type": "object"}}}]

    def _begin(self, task_id, seed):
        self.turns = 0
        return f"{task_id} {seed}"

    def _act(self, action):
        self.turns += 1
        details = {"heard": action.text[:50], "call": action.is_call, "share": np.float32(0.5), "count": self.turns}
        if "nan" in action.text:
            details["number"] = float("nan")
        won = self.turns == 3
        return Outcome(f"You said {action.text}", float(self.turns), won, won, self.turns == 2, details)


class Private(TextEnv):
    """An environment whose protocol nobody else knows."""

    name = "private"
    instruction = "?"

    class Own(ReActText):
        name = "own"

    protocol = Own()
