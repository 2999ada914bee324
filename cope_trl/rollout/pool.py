"""Environments of one process: reused between episodes, stepped in parallel threads, each call under a deadline.

An environment that raises, hangs or breaks its contract yields a [`Failure`], a value like any other: the episode it
belongs to is marked failed, the environment is thrown away, and everything else goes on.
"""

import contextlib
import math
import numbers
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from typing import Any

import gymnasium

from cope_trl.errors import RolloutError


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong inside an environment: a one-line message, and the exception where there was one."""

    message: str
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One pending environment call.

    Attributes:
        handle: the environment.
        method: `"reset"` or `"step"`.
        args, kwargs: arguments of the call.
    """

    handle: "EnvHandle"
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Pending:
    """A call under way.

    Attributes:
        call: which.
        future: holds what the environment returns or raises.
        deadline: `time.monotonic()` at which it is given up.
    """

    call: Call
    future: Future
    deadline: float


class EnvHandle:
    """One environment that lives in a daemon thread of its own, so that a hanging call never blocks the interpreter.

    Args:
        name: registry name, used in messages.
        factory: makes the environment; called in the thread, at the first use.
    """

    def __init__(self, name: str, factory: Callable[[], gymnasium.Env]) -> None:
        self.name = name
        self.env: gymnasium.Env | None = None
        self.broken = False
        self.seconds = 0.0
        self._factory = factory
        self._kill_once = threading.Lock()
        self._inbox: queue.SimpleQueue[tuple[Future, str, tuple, Mapping] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"env-{name}", daemon=True)
        self._thread.start()

    def submit(self, call: Call) -> Future:
        """Queue a call; the future holds its result or its exception."""
        future: Future = Future()
        self._inbox.put((future, call.method, call.args, call.kwargs or {}))
        return future

    def close(self) -> None:
        """Close the environment after the calls already queued, and end the thread."""
        if not self.broken:
            self.submit(Call(self, "close"))
        self._inbox.put(None)

    def discard(self) -> None:
        """Give the environment up: release what it holds without waiting for a call that may never return."""
        self.broken = True
        self._inbox.put(None)
        threading.Thread(target=self._kill, name=f"kill-{self.name}", daemon=True).start()

    def join(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread to end."""
        self._thread.join(timeout)

    def _kill(self) -> None:
        env = self.env
        if env is None or not self._kill_once.acquire(blocking=False):
            return
        with contextlib.suppress(Exception):
            getattr(env, "kill", env.close)()

    def _serve(self) -> None:
        while (item := self._inbox.get()) is not None:
            future, method, args, kwargs = item
            started = time.perf_counter()
            try:
                if self.env is None:
                    if method == "close":  # never used: do not make an environment only to close it
                        future.set_result(None)
                        continue
                    self.env = self._factory()
                    if self.broken:  # given up while it was being made: nobody waits for the call
                        break
                result = getattr(self.env, method)(*args, **kwargs)
            except BaseException as error:
                self.seconds += time.perf_counter() - started
                future.set_exception(error)
            else:
                self.seconds += time.perf_counter() - started  # before the caller, who reads it, is woken
                future.set_result(result)
        if self.broken:
            self._kill()


class EnvironmentPool:
    """Hands out environments and runs their calls in parallel.

    Args:
        make: makes an environment from its registry name.
        timeout: deadline of one `reset` or `step`, in seconds.
    """

    def __init__(self, make: Callable[[str], gymnasium.Env], timeout: float = 120.0) -> None:
        self._make = make
        self._idle: dict[str, list[EnvHandle]] = defaultdict(list)
        self._closed = False
        self.timeout = timeout

    def acquire(self, name: str) -> EnvHandle:
        """An idle environment of that name, or a new one."""
        if self._closed:
            raise RolloutError("The environment pool is closed; make a new trainer or a new pool.")
        if self._idle[name]:
            return self._idle[name].pop()
        return EnvHandle(name, lambda: self._make(name))

    def release(self, handle: EnvHandle) -> None:
        """Give an environment back; a broken one is dropped, and a closed pool keeps none."""
        if handle.broken:
            return
        if self._closed:
            handle.close()
        else:
            self._idle[handle.name].append(handle)

    def start(self, call: Call, notify: Callable[[], None] = lambda: None) -> "Pending":
        """Begin a call; `notify` is called, from any thread, when there is an answer."""
        future = call.handle.submit(call)
        future.add_done_callback(lambda _: notify())
        return Pending(call, future, time.monotonic() + self.timeout)

    def answer(self, pending: "Pending") -> Any:
        """What the environment returned, or a [`Failure`]; waits for it until the call's deadline."""
        call, future = pending.call, pending.future
        try:
            result = future.result(timeout=max(0.0, pending.deadline - time.monotonic()))
            problem = _contract_violation(call.method, result)
            if problem is None:
                return result
            failure = Failure(f"environment {call.handle.name!r}: `{call.method}` returned {problem}")
        except FutureTimeoutError as error:
            if future.done():  # the environment itself raised a TimeoutError
                failure = _failure(call, error)
            else:
                failure = Failure(
                    f"environment {call.handle.name!r}: `{call.method}` did not return within "
                    f"{self.timeout:g} s (`environment_timeout`)"
                )
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not future.done():
                raise  # the user's own Ctrl-C, not the environment's
            failure = _failure(call, error)
        call.handle.discard()
        return failure

    def run(self, calls: Sequence[Call]) -> list[Any]:
        """Run all calls at once; each result is what the environment returned, or a [`Failure`]."""
        return [self.answer(pending) for pending in [self.start(call) for call in calls]]

    def close(self, timeout: float = 10.0) -> None:
        """Close all idle environments and wait up to `timeout` seconds for them."""
        self._closed = True
        handles = [handle for idle in self._idle.values() for handle in idle]
        self._idle.clear()
        for handle in handles:
            handle.close()
        deadline = time.monotonic() + timeout
        for handle in handles:
            handle.join(max(0.0, deadline - time.monotonic()))


def _failure(call: Call, error: BaseException) -> Failure:
    return Failure(f"environment {call.handle.name!r}: `{call.method}` raised {type(error).__name__}: {error}", error)


def _contract_violation(method: str, result: Any) -> str | None:
    """What is wrong with the result of an environment's call, in words, or `None`."""
    if method == "close":
        return None
    length = 2 if method == "reset" else 5
    if not isinstance(result, tuple) or len(result) != length:
        return f"{type(result).__name__} instead of a tuple of {length}"
    if not isinstance(result[0], str):
        return f"an observation of type {type(result[0]).__name__} instead of str"
    if not isinstance(result[-1], Mapping):
        return f"an info of type {type(result[-1]).__name__} instead of a dict"
    if method == "step":
        reward = result[1]
        # NumPy's scalars, which many Gymnasium environments return, are real numbers too.
        if isinstance(reward, bool) or not isinstance(reward, numbers.Real) or not math.isfinite(reward):
            return f"the reward {reward!r} instead of a finite number"
    return None
