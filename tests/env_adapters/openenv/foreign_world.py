"""An OpenEnv environment as somebody else would write it, who never heard of this package."""

import random
import socket

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from pydantic import Field


class GuessAction(Action):
    message: str = Field(description="your guess, in words")
    note: str = ""


class GuessObservation(Observation):
    hint: str
    guesses: int = 0


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="none", step_count=0)
        self._hidden = None

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id, step_count=0)
        self._hidden = random.Random(seed).randint(1, 9)
        return GuessObservation(hint=f"Which number from 1 to 9? (seed {seed})")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        count = self._state.step_count
        if action.message == "give up":
            return GuessObservation(hint=f"It was {self._hidden}.", guesses=count, done=True, reward=-0.5)
        if action.message == str(self._hidden):
            return GuessObservation(hint="Right.", guesses=count, done=True, reward=1.0)
        return GuessObservation(hint="No.", guesses=count, reward=0.25)

    @property
    def state(self):
        return self._state


class TalkAction(Action):
    subject: str
    body: str = ""


class TalkObservation(Observation):
    title: str = ""
    text: str | None = None


class TalkEnvironment(GuessEnvironment):
    """Two text fields in the observation: one has to choose."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        return TalkObservation(title="Welcome", text=None if seed is None else "")

    def step(self, action, timeout_s=None, **kwargs):
        return TalkObservation(title=f"On {action.subject}", text=f"{len(action.body)} words", done=True, reward=2.0)


def serve_guess():
    serve(create_app(GuessEnvironment, GuessAction, GuessObservation, env_name="guess", max_concurrent_envs=8))


def serve_talk():
    serve(create_app(TalkEnvironment, TalkAction, TalkObservation, env_name="talk", max_concurrent_envs=8))


def serve_single():
    """A server that takes one session at a time, as OpenEnv's do by default."""
    serve(create_app(GuessEnvironment, GuessAction, GuessObservation, env_name="guess"))


def serve(app):
    listening = socket.create_server(("127.0.0.1", 0))
    print(f"http://127.0.0.1:{listening.getsockname()[1]} Ctrl-C ends it.", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
