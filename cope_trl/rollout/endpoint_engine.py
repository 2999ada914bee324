"""[`EndpointEngine`]: a vLLM server that is asked for each turn when its episode is ready for it.

The server batches what it is asked at the same time and keeps the keys and values of past requests, so an episode need
wait for no other.
"""

import itertools
import threading
from collections.abc import Callable, Sequence

from cope_trl.rollout.endpoint import EndpointPolicy, turn_seed
from cope_trl.rollout.generation import Generation


class EndpointEngine:
    """A [`~cope_trl.rollout.generation.TurnEngine`] on a server.

    Each turn waits for its answer in a thread of its own, so there are as many requests as episodes being sampled.
    Turns are seeded one by one; equal ones are sampled as far as the server computes equal logits for them.

    Args:
        policy: asks the server; it should keep as many `connections` as episodes are open at a time.
    """

    def __init__(self, policy: EndpointPolicy) -> None:
        self.policy = policy
        self._keys = itertools.count()
        self._lock = threading.RLock()  # whoever takes a turn may ask for the next one at once
        self._open: dict[int, tuple[str, int]] = {}  # seed, and turns asked for

    def open(self, seed: str) -> int:
        """Begin an episode and return its key."""
        key = next(self._keys)
        with self._lock:
            self._open[key] = (seed, 0)
        return key

    def sample(
        self, episode: int, ids: Sequence[int], limit: int, deliver: Callable[[Generation | Exception], None]
    ) -> None:
        """Ask for the next turn of an episode (see [`~cope_trl.rollout.generation.TurnEngine`])."""
        with self._lock:
            seed, turn = self._open[episode]
            self._open[episode] = (seed, turn + 1)
        prompt, number = list(ids), turn_seed(seed, turn)

        def ask() -> None:
            try:
                answer: Generation | Exception = self.policy.sample(prompt, limit, number)
            except Exception as error:
                answer = error
            with self._lock:
                if episode in self._open:
                    deliver(answer)

        # Such threads do not keep the interpreter from ending while a server does not answer.
        threading.Thread(target=ask, name=f"turn-{episode}-{turn}", daemon=True).start()

    def advance(self) -> bool:
        """There is nothing to do here: the server works, and other threads wait for it."""
        return False

    def close(self, episode: int) -> None:
        """End an episode. The server ends a turn still being sampled for it by itself, and nobody takes it."""
        with self._lock:
            del self._open[episode]
