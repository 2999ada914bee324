"""Episodes that go each at its own pace: whichever is ready is sampled for while others' environments still step."""

import queue
import time
from collections.abc import Callable, Iterator

from cope_trl.rollout.episode import Episode
from cope_trl.rollout.generation import Generation, TurnEngine
from cope_trl.rollout.pool import Call, Pending
from cope_trl.rollout.run import Run


class Stream:
    """Plays a run on a [`~cope_trl.rollout.generation.TurnEngine`].

    What happens elsewhere (an environment answers, a server has sampled a turn) comes in as an event, from whatever
    thread. The calling thread does the engine's work as long as there is any, and takes the events between.
    """

    def __init__(self, run: Run, engine: TurnEngine) -> None:
        self.run, self.engine = run, engine
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._pending: dict[Episode, Pending] = {}
        self._keys: dict[Episode, int] = {}

    def play(self) -> None:
        """Play it to its end."""
        run = self.run
        try:
            while run.unfinished:
                while (episode := run.admit()) is not None:
                    self._keys[episode] = self.engine.open(run.sampling_seeds[episode.index])
                    self._call(episode, run.reset_call(episode))
                worked = self.engine.advance()
                for happen in self._happened(wait=not worked):
                    happen()
        finally:
            for episode, key in self._keys.items():  # empty unless something was raised
                self.engine.close(key)
                if episode in self._pending:
                    episode.handle.discard()
                run.pool.release(episode.handle)

    # ---------------------------------------------------------------- events

    def _happened(self, wait: bool) -> Iterator[Callable[[], None]]:
        """What has come in; if nothing has and there is time to `wait`, the next thing that does."""
        if wait and self._events.empty():
            # Either an environment is waited for, or a server that samples.
            name = "environment" if len(self._pending) == len(self._keys) else "generate"
            with self.run.spans(name):
                event = self._next_event()
            if event is not None:
                yield event
        while not self._events.empty():
            yield self._events.get()
        yield from self._overdue()

    def _next_event(self) -> Callable[[], None] | None:
        deadline = min((pending.deadline for pending in self._pending.values()), default=None)
        try:
            return self._events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _overdue(self) -> Iterator[Callable[[], None]]:
        now = time.monotonic()
        for episode, pending in list(self._pending.items()):
            if now >= pending.deadline and not pending.future.done():
                yield lambda episode=episode, pending=pending: self._answered(episode, pending)  # type: ignore[misc]

    # ---------------------------------------------------------------- the two halves of a turn

    def _call(self, episode: Episode, call: Call) -> None:
        """Have the environment do something; its answer comes in as an event."""
        started, spans = time.perf_counter(), self.run.spans

        def answered() -> None:
            spans.add(call.method, started, time.perf_counter(), f"episode {episode.index}", total=False)
            self._events.put(lambda: self._answered(episode, pending))

        pending = self.run.pool.start(call, answered)
        self._pending[episode] = pending

    def _answered(self, episode: Episode, pending: Pending) -> None:
        if self._pending.get(episode) is not pending:  # given up before the answer came
            return
        del self._pending[episode]
        result = self.run.pool.answer(pending)
        take = episode.begin if pending.call.method == "reset" else episode.observe
        take(result, self.run.chat, self.run.limits)
        if not episode.active:
            self._retire(episode)
            return

        def deliver(generation: Generation | Exception) -> None:
            self._events.put(lambda: self._sampled(episode, generation))

        self.engine.sample(self._keys[episode], episode.ids, episode.budget(self.run.limits), deliver)

    def _sampled(self, episode: Episode, generation: Generation | Exception) -> None:
        if isinstance(generation, Exception):
            raise generation
        run = self.run
        if episode.record(generation, run.chat, run.limits, run.stop_ids):
            self._call(episode, episode.step_call())
        else:
            self._retire(episode)

    def _retire(self, episode: Episode) -> None:
        self.engine.close(self._keys.pop(episode))
        self.run.retire([episode])
