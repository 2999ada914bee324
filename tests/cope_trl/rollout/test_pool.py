"""Environments that hang, raise and lie, one beside others that do not."""

import threading
import time
from concurrent.futures import Future

import gymnasium
import numpy as np
import pytest

from cope_trl.errors import RolloutError
from cope_trl.rollout.pool import Call, EnvironmentPool, Failure

OK = ("fine", 0.0, False, False, {})


class Puppet(gymnasium.Env):
    """Does what each call brings along: the action of `step` and the seed of `reset` are functions."""

    def __init__(self):
        self.killed, self.closed, self.thread = threading.Event(), threading.Event(), threading.get_ident()

    def reset(self, *, seed=None, options=None):
        return seed(self) if callable(seed) else ("hello", {})

    def step(self, action):
        return action(self)

    def kill(self):
        self.killed.set()

    def close(self):
        self.closed.set()


@pytest.fixture
def pool():
    pool = EnvironmentPool(lambda name: Puppet(), timeout=5.0)
    yield pool
    pool.close()


def step(handle, action):
    return Call(handle, "step", (action,))


def sleep(seconds):
    def act(env):
        time.sleep(seconds)
        return OK

    return act


def raising(error):
    def act(env):
        raise error

    return act


def returning(value):
    return lambda env: value


def started(pool, count):
    handles = [pool.acquire("puppet") for _ in range(count)]
    assert pool.run([Call(handle, "reset", kwargs={"seed": None}) for handle in handles]) == [("hello", {})] * count
    return handles


def env_threads():
    # Only this file's environments: those of trainers in other tests come and go in the meantime.
    return [t for t in threading.enumerate() if t.name in ("env-puppet", "kill-puppet")]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


def test_a_hanging_call_is_a_failure_and_the_others_are_unaffected(pool):
    pool.timeout = 0.2
    before = len(env_threads())
    handles, release = started(pool, 4), threading.Event()
    hang = lambda env: (release.wait(10), OK)[1]  # noqa: E731
    begun = time.monotonic()
    results = pool.run([step(h, hang if i == 1 else returning(OK)) for i, h in enumerate(handles)])
    assert 0.2 <= time.monotonic() - begun < 2.0
    assert [isinstance(r, Failure) for r in results] == [False, True, False, False]
    assert [r for r in results if r != results[1]] == [OK] * 3
    assert results[1].message == ("environment 'puppet': `step` did not return within 0.2 s (`environment_timeout`)")
    assert [h.broken for h in handles] == [False, True, False, False]
    assert handles[1].env.killed.wait(5)  # while the call still hangs
    assert not any(h.env.killed.is_set() for h in handles if h is not handles[1])
    for handle in handles:
        pool.release(handle)
    again = started(pool, 4)
    assert handles[1] not in again
    assert len(set(again) & set(handles)) == 3
    release.set()
    assert wait_until(lambda: len(env_threads()) == before + 4)


def test_a_deadline_holds_for_all_calls_of_a_run_together(pool):
    """Eight hanging environments cost one timeout, not eight."""
    pool.timeout = 0.3
    handles = started(pool, 8)
    begun = time.monotonic()
    results = pool.run([step(h, sleep(1.5)) for h in handles])
    assert time.monotonic() - begun < 1.2
    assert all("did not return" in r.message for r in results)


def test_calls_run_in_parallel(pool):
    handles = started(pool, 8)
    begun = time.monotonic()
    assert pool.run([step(h, sleep(0.2)) for h in handles]) == [OK] * 8
    assert time.monotonic() - begun < 1.0
    assert all(0.2 <= h.seconds < 1.0 for h in handles)


def test_an_environment_lives_in_one_thread(pool):
    (handle,) = started(pool, 1)
    seen = []
    for _ in range(3):
        pool.run([step(handle, lambda env: seen.append(threading.get_ident()) or OK)])
    assert seen == [handle.env.thread] * 3
    assert seen[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("method", "value", "problem"),
    [
        ("reset", "hello", "returned str instead of a tuple of 2"),
        ("reset", ["hello", {}], "returned list instead of a tuple of 2"),
        ("reset", ("hello",), "returned tuple instead of a tuple of 2"),
        ("reset", (None, {}), "returned an observation of type NoneType instead of str"),
        ("reset", ("hello", None), "returned an info of type NoneType instead of a dict"),
        ("step", ("x", 0.0, True, {}), "returned tuple instead of a tuple of 5"),
        ("step", None, "returned NoneType instead of a tuple of 5"),
        ("step", (b"x", 0.0, False, False, {}), "returned an observation of type bytes instead of str"),
        ("step", ("x", 0.0, False, False, []), "returned an info of type list instead of a dict"),
        ("step", ("x", None, False, False, {}), "returned the reward None instead of a finite number"),
        ("step", ("x", "1", False, False, {}), "returned the reward '1' instead of a finite number"),
        ("step", ("x", True, False, False, {}), "returned the reward True instead of a finite number"),
        ("step", ("x", float("nan"), False, False, {}), "returned the reward nan instead of a finite number"),
        ("step", ("x", float("inf"), False, False, {}), "returned the reward inf instead of a finite number"),
    ],
)
def test_a_broken_contract_is_named(pool, method, value, problem):
    (handle,) = started(pool, 1)
    call = (
        step(handle, returning(value)) if method == "step" else Call(handle, "reset", (), {"seed": returning(value)})
    )
    (result,) = pool.run([call])
    assert result == Failure(f"environment 'puppet': `{method}` {problem}")
    assert handle.broken
    assert handle.env.killed.wait(5)


@pytest.mark.parametrize("reward", [1, 0.5, -3, np.float32(0.5), np.float64(1.0), np.int64(2)])
def test_any_real_number_is_a_reward(pool, reward):
    (handle,) = started(pool, 1)
    (result,) = pool.run([step(handle, returning(("x", reward, False, False, {})))])
    assert result[1] == reward
    assert not handle.broken


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad action"),
        KeyboardInterrupt("inside"),
        SystemExit(3),
        GeneratorExit("gone"),
        TimeoutError("slow disk"),  # its own, long before the deadline
    ],
)
def test_whatever_an_environment_raises_is_data(pool, error):
    handles = started(pool, 2)
    results = pool.run([step(handles[0], raising(error)), step(handles[1], returning(OK))])
    assert results == [Failure(f"environment 'puppet': `step` raised {type(error).__name__}: {error}", error), OK]
    assert handles[0].broken
    assert not handles[1].broken


def test_a_users_own_interrupt_passes_through(pool):
    (handle,) = started(pool, 1)

    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    handle.submit = lambda call: Interrupted()
    with pytest.raises(KeyboardInterrupt):
        pool.run([step(handle, returning(OK))])


def test_a_factory_that_raises():
    pool = EnvironmentPool(lambda name: {}[name])
    handle = pool.acquire("nowhere")
    (result,) = pool.run([Call(handle, "reset")])
    assert result.message == "environment 'nowhere': `reset` raised KeyError: 'nowhere'"
    assert isinstance(result.cause, KeyError)
    assert wait_until(lambda: not handle._thread.is_alive())
    pool.close()


def test_an_environment_that_is_made_too_late_is_killed():
    """Given up while it was starting: it must not live on, and nobody calls it any more."""
    made = []

    def make(name):
        time.sleep(0.3)
        made.append(Puppet())
        return made[0]

    pool = EnvironmentPool(make, timeout=0.1)
    handle, called = pool.acquire("late"), []
    (result,) = pool.run([Call(handle, "reset", kwargs={"seed": lambda env: called.append(env)})])
    assert "did not return within 0.1 s" in result.message
    assert wait_until(lambda: made and made[0].killed.is_set())
    assert wait_until(lambda: not handle._thread.is_alive())
    assert called == []
    pool.close()


def test_a_discarded_environment_is_killed_once_also_when_its_call_returns_later(pool):
    pool.timeout = 0.1
    (handle,) = started(pool, 1)
    kills = []
    handle.env.kill = lambda: kills.append(1)
    pool.run([step(handle, sleep(0.3))])
    assert wait_until(lambda: not handle._thread.is_alive())
    assert kills == [1]


def test_without_a_kill_method_the_environment_is_closed_and_an_error_there_is_swallowed():
    class Bare(gymnasium.Env):
        closed = threading.Event()

        def reset(self, *, seed=None, options=None):
            raise ValueError("no")

        def close(self):
            self.closed.set()
            raise OSError("cannot close")

    pool = EnvironmentPool(lambda name: Bare())
    handle = pool.acquire("bare")
    (result,) = pool.run([Call(handle, "reset")])
    assert "raised ValueError: no" in result.message
    assert Bare.closed.wait(5)
    pool.close()


def test_closing_closes_idle_environments_and_ends_their_threads():
    pool = EnvironmentPool(lambda name: Puppet())
    handles = started(pool, 3)
    unused = pool.acquire("puppet")
    for handle in (*handles, unused):
        pool.release(handle)
    pool.close()
    assert all(handle.env.closed.is_set() for handle in handles)
    assert unused.env is None  # not made only to be closed
    # Their own threads: those of trainers in other tests come and go.
    assert wait_until(lambda: not any(handle._thread.is_alive() for handle in (*handles, unused)))
    with pytest.raises(RolloutError, match="closed"):
        pool.acquire("puppet")
    pool.close()  # a second time does nothing


def test_an_environment_given_back_after_closing_is_closed():
    pool = EnvironmentPool(lambda name: Puppet())
    (handle,) = started(pool, 1)
    pool.close()
    pool.release(handle)
    assert handle.env.closed.wait(5)
    assert wait_until(lambda: not handle._thread.is_alive())


def test_closing_does_not_wait_for_an_environment_that_hangs():
    pool, release = EnvironmentPool(lambda name: Puppet()), threading.Event()
    (handle,) = started(pool, 1)
    handle.env.close = lambda: release.wait(10)
    pool.release(handle)
    begun = time.monotonic()
    pool.close(timeout=0.2)
    assert time.monotonic() - begun < 2.0
    release.set()


def test_environments_are_reused_by_name(pool):
    (first,) = started(pool, 1)
    pool.release(first)
    assert pool.acquire("other") is not first
    assert pool.acquire("puppet") is first
    assert pool.acquire("puppet") is not first


def test_no_thread_is_left_after_many_cycles(pool):
    """Fifty cycles of two environments, one of which breaks every time."""
    before = len(env_threads())
    for _ in range(50):
        handles = started(pool, 2)
        results = pool.run([step(handles[0], returning(OK)), step(handles[1], raising(ValueError("no")))])
        assert results[0] == OK
        for handle in handles:
            pool.release(handle)
    assert wait_until(lambda: len(env_threads()) <= before + 1)


def test_no_calls(pool):
    assert pool.run([]) == []
