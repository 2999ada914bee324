"""Environments for the tests of isolation, imported in the worker only."""

import os
import time

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.protocols import ReActText


class Moody(TextEnv):
    """Does what it is told: sleeps, dies, raises, or leaks."""

    name = "moody"
    protocol = ReActText()
    instruction = "Say something."

    def __init__(self, mood="fair"):
        self.mood = mood
        self.leak = []

    @classmethod
    def tasks(cls, split):
        cls.check_split(split)
        return [Task(cls.name, "1", "any", split)]

    def _begin(self, task_id, seed):
        self.leak.append(task_id)
        return f"{self.mood}, {len(self.leak)} so far in {os.getpid()}"

    def _act(self, action):
        verb = action.text
        if verb == "sleep":
            time.sleep(60)
        elif verb == "die":
            os._exit(4)
        elif verb == "raise":
            raise LookupError("what did you say?")
        return Outcome(f"You {verb}.", score=0.5)


class OwnProtocol(ReActText):
    name = "own"


class Foreign(Moody):
    name = "foreign"
    protocol = OwnProtocol()
