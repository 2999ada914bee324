"""Episodes at their own pace: who waits for whom, and what happens when something elsewhere goes wrong."""

import threading
from dataclasses import replace
from functools import cache

import pytest
from support import GO, CountEnv, OneByOne, ScriptedPolicy, make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.spans import Spans
from cope_trl.types import TaskRef
from env_adapters.errors import UnknownTaskError

LIMITS = EpisodeLimits({"": 6}, max_tokens_per_turn=200, max_completion_length=5000)


@cache
def chat() -> ChatFormat:
    return ChatFormat(make_tokenizer())


def engine_of(scripts):
    return OneByOne(ScriptedPolicy(chat().tokenizer, scripts, chat().end_of_turn_id))


def play(env, goals, engine=None, timeout=20.0, **settings):
    """Play `count-n` for each goal, each in an environment that `env` makes; every reply is "go"."""
    pool = EnvironmentPool(lambda name: env(), timeout=timeout)
    arguments = {name: settings.pop(name) for name in ("seeds", "sampling_seeds", "on_finished") if name in settings}
    engine = engine or engine_of([[GO]] * len(goals))
    player = EpisodePlayer(pool, engine, chat(), [], **settings)
    tasks = [TaskRef("count", f"count-{goal}") for goal in goals]
    try:
        return player.play(tasks, [CountEnv.standing_messages()] * len(tasks), LIMITS, **arguments)
    finally:
        pool.close()


def same(trajectories):
    return [replace(trajectory, environment_seconds=0.0) for trajectory in trajectories]


def test_a_slow_environment_holds_nobody_up():
    """The first episode's environment answers only once the second episode is over: lock step would never end."""
    over = threading.Event()

    class Held(CountEnv):
        def _act(self, action):
            if self.goal == 2:
                assert over.wait(20)
            return super()._act(action)

    def on_finished(episodes):
        if any(episode.task.task_id == "count-5" for episode in episodes):
            over.set()

    slow, fast = play(Held, [2, 5], on_finished=on_finished)
    assert slow.success
    assert fast.success


def test_a_slow_reset_holds_nobody_up():
    over = threading.Event()

    class Held(CountEnv):
        def _begin(self, task_id, seed):
            if task_id == "count-2":
                assert over.wait(20)
            return super()._begin(task_id, seed)

    played = play(Held, [2, 3], engine=Free([[GO]] * 2), on_finished=lambda episodes: over.set())
    assert [episode.success for episode in played] == [True, True]


class Free(OneByOne):
    """Takes first turns in any order; every reply is "go"."""

    def __init__(self, scripts):
        super().__init__(ScriptedPolicy(chat().tokenizer, scripts, chat().end_of_turn_id))

    def advance(self):
        self._begun |= set(self._asked)
        return super().advance()


def in_step(scripts):
    return ScriptedPolicy(chat().tokenizer, scripts, chat().end_of_turn_id)


@pytest.mark.parametrize("policy", [Free, in_step])
@pytest.mark.parametrize("limit", [1, 2, 5])
def test_no_more_episodes_than_allowed_are_played_at_a_time(limit, policy):
    made = []

    class Counted(CountEnv):
        def __init__(self):
            made.append(self)

    engine, goals, finished = policy([[GO]] * 7), [3, 1, 2, 5, 1, 4, 2], []
    played = play(Counted, goals, engine, max_concurrent=limit, on_finished=finished.extend)
    assert [episode.task.task_id for episode in played] == [f"count-{goal}" for goal in goals]
    assert all(episode.success for episode in played)
    assert len(made) == limit
    assert same(sorted(finished, key=lambda e: e.task.task_id)) == same(sorted(played, key=lambda e: e.task.task_id))
    if isinstance(engine, OneByOne):
        assert engine.most_open == limit
        assert not engine.open_now


def test_an_environment_that_never_answers_fails_its_own_episode():
    release = threading.Event()

    class Hangs(CountEnv):
        def _act(self, action):
            if self.goal == 2:
                release.wait(20)
            return super()._act(action)

    try:
        hung, fine = play(Hangs, [2, 3], timeout=0.5)
    finally:
        release.set()
    assert (hung.failed, hung.success) == (True, False)
    assert "did not return within 0.5 s (`environment_timeout`)" in hung.error
    assert fine.success


def test_an_answer_that_comes_too_late_changes_nothing():
    """It comes in while the other episode still plays, whose turns are held back until then."""
    given_up, answered = threading.Event(), threading.Event()

    class Late(CountEnv):
        def step(self, reply):
            if self.goal == 2:
                given_up.wait(20)
                answered.set()
            return super().step(reply)

    class Gate(Free):
        def advance(self):
            held = {} if answered.is_set() else {key: self._asked.pop(key) for key in [2] if key in self._asked}
            worked = super().advance()
            self._asked |= held
            return worked

    def on_finished(episodes):
        if any(episode.failed for episode in episodes):
            given_up.set()

    late, fine = play(Late, [2, 3], Gate([[GO]] * 2), timeout=0.5, on_finished=on_finished)
    assert (late.failed, late.success, len(late.turns)) == (True, False, 1)
    assert (fine.success, len(fine.turns)) == (True, 3)


def test_every_episode_has_its_sampling_seed():
    engine = engine_of([[GO]] * 3)
    play(CountEnv, [1, 2, 1], engine, sampling_seeds=["a", "b", "c"])
    assert engine.seeds == ["a", "b", "c"]
    engine = engine_of([[GO]] * 3)
    play(CountEnv, [1, 2, 1], engine)
    assert engine.seeds == ["0", "1", "2"]


class Elsewhere:
    """A `TurnEngine` whose turns are sampled by threads of its own, as by a server."""

    def __init__(self, answer):
        self.answer, self.open_now, self.keys = answer, set(), 0

    def open(self, seed):
        self.keys += 1
        self.open_now.add(self.keys)
        return self.keys

    def sample(self, episode, ids, limit, deliver):
        threading.Thread(target=lambda: deliver(self.answer(episode))).start()

    def advance(self):
        return False

    def close(self, episode):
        self.open_now.remove(episode)


def go(episode):
    return Generation([*chat().tokenizer(GO, add_special_tokens=False)["input_ids"], chat().end_of_turn_id])


def test_turns_may_come_from_other_threads():
    spans = Spans()
    engine = Elsewhere(go)
    played = play(CountEnv, [3, 1, 4], engine, spans=spans)
    assert [(episode.success, len(episode.turns)) for episode in played] == [(True, 3), (True, 1), (True, 4)]
    assert not engine.open_now
    assert set(spans.seconds) <= {"generate", "environment"}


@pytest.mark.parametrize("stuck", [False, True])
def test_an_error_of_the_engine_ends_the_play_and_leaves_nothing_open(stuck):
    """Even while another episode's environment is still at work, which is given up then."""
    release, stepping, closed = threading.Event(), threading.Event(), []

    class Slow(CountEnv):
        def _act(self, action):
            stepping.set()
            assert release.wait(20) or True
            return super()._act(action)

        def close(self):
            closed.append(self)

    def answer(episode):
        if episode == 1 and stuck:
            return go(episode)
        if stuck:
            stepping.wait(20)
        return OSError("the engine is gone")

    engine = Elsewhere(answer)
    try:
        with pytest.raises(OSError, match="the engine is gone"):
            play(Slow, [2, 2], engine)
    finally:
        release.set()
    assert not engine.open_now


def test_a_users_mistake_is_raised_at_once():
    class Picky(CountEnv):
        def _begin(self, task_id, seed):
            if task_id == "count-3":
                raise UnknownTaskError("no such task")
            return super()._begin(task_id, seed)

    engine = Free([[GO]] * 3)
    with pytest.raises(UnknownTaskError, match="no such task"):
        play(Picky, [1, 3, 2], engine)
    assert not engine.open_now


def test_the_trace_shows_environments_beside_the_trainer(tmp_path):
    spans = Spans(recording=True)
    play(CountEnv, [2, 1], spans=spans)
    spans.write_trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert text.count('"name": "step"') == 3
    assert text.count('"name": "reset"') == 2
    assert "episode 1" in text
    assert "step" not in spans.seconds
