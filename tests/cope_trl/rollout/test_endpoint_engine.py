"""Turns of episodes asked of a server one by one, on stand-ins for what asks it; over HTTP in `test_endpoint.py`."""

import queue
import threading
from collections import Counter

import pytest
from support import GO, CountEnv, make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.errors import RolloutError
from cope_trl.rollout.endpoint import turn_seed
from cope_trl.rollout.endpoint_engine import EndpointEngine
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.types import TaskRef

PATIENCE = 20.0  # seconds until a test is given up


class Served:
    """An `EndpointPolicy` whose answers are let go one by one.

    Attributes:
        asked: (prompt, limit, seed) of every turn.
        held: by prompt length, what an answer waits for.
    """

    def __init__(self, answer=lambda prompt, limit, seed: Generation([len(prompt)], [-1.0])):
        self.asked, self.held, self.answer = queue.SimpleQueue(), {}, answer

    def sample(self, prompt, limit, seed):
        self.asked.put((prompt, limit, seed))
        if len(prompt) in self.held:
            assert self.held[len(prompt)].wait(PATIENCE)
        return self.answer(prompt, limit, seed)


def test_each_turn_is_a_request_with_a_seed_of_its_own():
    served, taken = Served(), queue.SimpleQueue()
    engine = EndpointEngine(served)
    one, other = engine.open("a"), engine.open("b")
    for episode, prompt, limit in ((one, (1, 2), 9), (other, (3,), 8), (one, (1, 2, 2), 7)):
        engine.sample(episode, prompt, limit, taken.put)
        assert not engine.advance()
        assert taken.get(timeout=PATIENCE) == Generation([len(prompt)], [-1.0])
    assert [served.asked.get_nowait() for _ in range(3)] == [
        ([1, 2], 9, turn_seed("a", 0)),
        ([3], 8, turn_seed("b", 0)),
        ([1, 2, 2], 7, turn_seed("a", 1)),
    ]


def test_a_turn_that_takes_long_holds_up_no_other():
    served, taken = Served(), queue.SimpleQueue()
    served.held[5] = threading.Event()
    engine = EndpointEngine(served)
    one, other = engine.open("a"), engine.open("b")
    engine.sample(one, [1] * 5, 9, taken.put)
    for length in (1, 2, 3):
        engine.sample(other, [1] * length, 9, taken.put)
        assert taken.get(timeout=PATIENCE).ids == [length]
    served.held[5].set()
    assert taken.get(timeout=PATIENCE).ids == [5]


def test_a_closed_episodes_turn_is_not_delivered():
    served, taken = Served(), queue.SimpleQueue()
    served.held[5] = threading.Event()
    engine = EndpointEngine(served)
    one, other = engine.open("a"), engine.open("b")
    before = set(threading.enumerate())
    engine.sample(one, [1] * 5, 9, taken.put)
    (thread,) = set(threading.enumerate()) - before
    engine.close(one)
    served.held[5].set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    engine.sample(other, [1], 9, taken.put)
    assert taken.get(timeout=PATIENCE).ids == [1]
    assert taken.empty()


def test_a_failure_is_delivered():
    def refuse(prompt, limit, seed):
        raise RolloutError("refused")

    engine, taken = EndpointEngine(Served(refuse)), queue.SimpleQueue()
    engine.sample(engine.open("a"), [1], 9, taken.put)
    assert str(taken.get(timeout=PATIENCE)) == "refused"


def play(served, goals, on_finished=lambda finished: None):
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    pool = EnvironmentPool(lambda name: CountEnv(), timeout=PATIENCE)
    reply = [*tokenizer(GO, add_special_tokens=False)["input_ids"], chat.end_of_turn_id]
    served.answer = served.answer or (lambda prompt, limit, seed: Generation(reply, [-1.0] * len(reply)))
    try:
        return EpisodePlayer(pool, EndpointEngine(served), chat, []).play(
            [TaskRef("count", f"count-{goal}") for goal in goals],
            [CountEnv.standing_messages()] * len(goals),
            EpisodeLimits({"": 6}, max_tokens_per_turn=30, max_completion_length=900),
            sampling_seeds=[f"seed{i}" for i in range(len(goals))],
            on_finished=on_finished,
        )
    finally:
        pool.close()


def test_episodes_go_on_while_one_waits_for_the_server():
    """In lock step nobody would, and this would not end."""
    over = threading.Event()
    finished = []

    def count(episodes):
        finished.extend(int(episode.task.task_id[-1]) for episode in episodes)
        if len(finished) == 2:
            over.set()

    goals = (1, 4, 2)
    served = Served(None)
    sample = served.sample

    def slow(prompt, limit, seed):
        if seed == turn_seed("seed0", 0):
            assert over.wait(PATIENCE)
        return sample(prompt, limit, seed)

    served.sample = slow
    played = play(served, goals, count)
    assert [len(episode.turns) for episode in played] == list(goals)
    assert all(episode.success for episode in played)
    assert finished == [2, 4, 1]
    seeds = [served.asked.get_nowait()[2] for _ in range(sum(goals))]
    expected = [turn_seed(f"seed{i}", turn) for i, goal in enumerate(goals) for turn in range(goal)]
    assert Counter(seeds) == Counter(expected)


def test_a_server_that_fails_ends_the_run():
    def refuse(prompt, limit, seed):
        raise RolloutError("answered 500")

    with pytest.raises(RolloutError, match="answered 500"):
        play(Served(refuse), (1, 2))
