"""[`CachedEngine`]: a `transformers` model that keeps every episode's keys and values from turn to turn.

A turn costs its new tokens only. Episodes join and leave as they are ready, those that share a prefix (the rollouts of
one task; all tasks with one instruction) compute it once, and each samples by random numbers of its own, so that what
runs beside an episode does not change it.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cope_trl.rollout.generation import Generation
from cope_trl.rollout.kv_cache import Placement, SlotCache
from cope_trl.rollout.sampling import RowSampler
from cope_trl.spans import Spans

# Tokens another episode must have in common to be worth waiting for or copying from.
_WORTH_SHARING = 16
# A forward of fewer tokens costs little more than one of a single token: there rows may be padded at will.
_SMALL_FORWARD = {"cpu": 64}
_SMALL_ON_ACCELERATOR = 512


@dataclass(slots=True, eq=False)
class _Slot:
    """An episode's place in the cache.

    Attributes:
        index: slot number.
        numbers: decide the episode's tokens.
        held: ids whose keys and values are there.
        new: nothing of the episode has been forwarded yet.
    """

    index: int
    numbers: random.Random = field(default_factory=random.Random)
    held: list[int] = field(default_factory=list)
    new: bool = True


@dataclass(slots=True, eq=False)
class _Request:
    """A turn that is being sampled: the history `ids`, and what follows it so far."""

    slot: _Slot
    ids: list[int]
    limit: int
    deliver: Callable[[Generation | Exception], None]
    sampled: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Tokens to forward before the next one can be sampled."""
        return len(self.ids) + len(self.sampled) - len(self.slot.held)

    def next_ids(self, count: int) -> list[int]:
        """The first `count` of them."""
        start = len(self.slot.held)
        inside = start - len(self.ids)
        return self.sampled[inside : inside + count] if inside >= 0 else self.ids[start : start + count]


@dataclass(slots=True)
class TokenCounts:
    """Tokens a [`CachedEngine`] worked on.

    Attributes:
        prefilled: history tokens forwarded.
        padding: padding forwarded beside them.
        copied: history tokens taken over from another episode.
        decoded: tokens sampled.
        forwards: forward passes.
    """

    prefilled: int = 0
    padding: int = 0
    copied: int = 0
    decoded: int = 0
    forwards: int = 0


class CachedEngine:
    """A [`~cope_trl.rollout.generation.TurnEngine`] on a `transformers` model.

    Args:
        model: causal language model with softmax attention in every layer (see
            [`~cope_trl.rollout.cache_support.cache_obstacle`]). Its mode and weights are left as they are; the engine
            must not outlive a change of the weights.
        stop_ids: ids that end a turn.
        sampler: picks the tokens.
        max_episodes: most episodes open at a time.
        patience: tokens sampled for the episodes at hand before turns that came in meanwhile join them. Joining costs
            a forward pass of its own, so it is done for several at once.
        max_prefill: history tokens in one forward, padding included; longer ones are cut into pieces.
        spans: notes where the time goes.
    """

    def __init__(
        self,
        model: Any,
        stop_ids: Sequence[int],
        sampler: RowSampler,
        max_episodes: int,
        patience: int = 2,
        max_prefill: int = 8192,
        spans: Spans | None = None,
    ) -> None:
        self.model, self.sampler, self.stop_ids = model, sampler, frozenset(stop_ids)
        self.patience, self.max_prefill = patience, max_prefill
        self.spans = spans or Spans()
        self.tokens = TokenCounts()
        config = model.config.get_text_config()
        self.cache = SlotCache(config.num_hidden_layers, max_episodes)
        self._additive = (config._attn_implementation or "eager").startswith("eager")  # its own or one with branches
        self._forward_arguments = _forward_arguments(model)
        self._free = [_Slot(index) for index in reversed(range(max_episodes))]
        self._open: dict[int, _Slot] = {}
        self._waiting: list[_Request] = []
        self._decoding: list[_Request] = []
        self._since_joined = 0
        self._keys = 0

    # ---------------------------------------------------------------- episodes

    def open(self, seed: str) -> int:
        """Begin an episode and return its key."""
        if not self._free:
            raise RuntimeError(f"all {self.cache.slots} episodes of this engine are open; close one first")
        slot = self._free.pop()
        slot.numbers.seed(seed)
        slot.new = True
        self._keys += 1
        self._open[self._keys] = slot
        return self._keys

    def sample(
        self, episode: int, ids: Sequence[int], limit: int, deliver: Callable[[Generation | Exception], None]
    ) -> None:
        """Ask for the next turn of an episode (see [`~cope_trl.rollout.generation.TurnEngine`])."""
        slot = self._open[episode]
        request = _Request(slot, list(ids), limit, deliver)
        # An episode grows by appending; whatever else comes keeps what it has in common with before.
        del slot.held[min(_common(slot.held, request.ids), len(ids) - 1) :]
        self._waiting.append(request)

    def close(self, episode: int) -> None:
        """End an episode. What its slot holds serves others until it is overwritten."""
        slot = self._open.pop(episode)
        self._waiting = [request for request in self._waiting if request.slot is not slot]
        self._decoding = [request for request in self._decoding if request.slot is not slot]
        self._free.insert(0, slot)  # the last to be used again

    @torch.no_grad()
    def advance(self) -> bool:
        """Prefill some of the turns that wait, or sample a token for each turn under way."""
        if self._waiting and not (self._decoding and self._since_joined < self.patience):
            with self.spans("prefill"):
                self._prefill()
            self._since_joined = self.patience if self._waiting else 0  # the others that wait come next
        elif self._decoding:
            with self.spans("decode"):
                self._forward(self._decoding, [1] * len(self._decoding))
            self._since_joined += 1
        else:
            return False
        return True

    # ---------------------------------------------------------------- prefill

    def _prefill(self) -> None:
        """One forward over some of the histories that wait, those of similar lengths, to save padding."""
        ready = sorted(self._with_prefixes(), key=lambda request: request.missing, reverse=True)
        longest = min(ready[0].missing, self.max_prefill)
        small = _SMALL_FORWARD.get(self.model.device.type, _SMALL_ON_ACCELERATOR)
        rows: list[_Request] = []
        counts: list[int] = []
        for request in ready:
            count, padded = min(request.missing, longest), longest * (len(rows) + 1)
            wasteful = padded > 1.1 * (sum(counts) + count) and padded > small
            if rows and (wasteful or padded > self.max_prefill):
                break
            rows.append(request)
            counts.append(count)
        self.tokens.prefilled += sum(counts)
        self.tokens.padding += longest * len(rows) - sum(counts)
        self._forward(rows, counts)

    def _with_prefixes(self) -> list[_Request]:
        """The requests that wait, less those a part of whose history one before them is about to compute."""
        ready: list[_Request] = []
        firsts: list[np.ndarray] = []
        for request in self._waiting:
            slot = request.slot
            if slot.new:
                ids = np.asarray(request.ids)
                shared, source = self._best_source(request)
                if any(_common_arrays(ids, other) > shared + _WORTH_SHARING for other in firsts):
                    continue
                if source is not slot:
                    self.cache.copy(source.index, slot.index, shared)
                    slot.held = request.ids[:shared]
                    self.tokens.copied += shared
                slot.new = False
                firsts.append(ids)
            ready.append(request)
        return ready

    def _best_source(self, request: _Request) -> tuple[int, _Slot]:
        """How much of a history some slot holds, and which: its own, unless another holds more."""
        best, source = len(request.slot.held), request.slot
        for other in (*self._open.values(), *self._free):
            if len(other.held) < best + _WORTH_SHARING:
                continue
            shared = min(_common(other.held, request.ids), len(request.ids) - 1)
            if shared >= best + _WORTH_SHARING:
                best, source = shared, other
        return best, source

    # ---------------------------------------------------------------- forward

    def _forward(self, requests: Sequence[_Request], counts: Sequence[int]) -> None:
        """Forward the next `counts` tokens of each request, and sample for those of which no more are missing."""
        # In the order of their slots: those that follow one another need not be gathered.
        requests, counts = zip(
            *sorted(zip(requests, counts, strict=True), key=lambda pair: pair[0].slot.index), strict=True
        )
        new = [request.next_ids(count) for request, count in zip(requests, counts, strict=True)]
        slots = [request.slot for request in requests]
        place = Placement.of(
            [slot.index for slot in slots], [len(slot.held) for slot in slots], counts, self.model.device
        )
        self.cache.place(place)
        logits = self._logits(place, [token for row in new for token in row])
        self.tokens.forwards += 1
        for slot, ids in zip(slots, new, strict=True):
            slot.held.extend(ids)
        complete = [i for i, request in enumerate(requests) if not request.missing]
        if complete:
            numbers = [slots[i].numbers.random() for i in complete]
            self._take([requests[i] for i in complete], self.sampler(logits[complete], numbers))

    def _logits(self, place: Placement, ids: list[int]) -> torch.Tensor:
        """(S, V) logits after each row's last token."""
        mask = place.mask()
        if self._additive:
            dtype = self.model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
        output = self.model(
            input_ids=place.grid(torch.tensor(ids, device=mask.device)),
            attention_mask=mask,
            position_ids=place.grid(place.column),
            use_cache=True,
            **self._forward_arguments(self.cache),
        )
        return output.logits[:, -1]

    def _take(self, requests: list[_Request], tokens: list[int]) -> None:
        """Note a sampled token of each request; deliver the turns that are over."""
        self.tokens.decoded += len(tokens)
        for request, token in zip(requests, tokens, strict=True):
            request.sampled.append(token)
        over = [r for r in requests if r.sampled[-1] in self.stop_ids or len(r.sampled) >= r.limit]
        self._waiting = [request for request in self._waiting if request not in requests]
        self._decoding = [r for r in self._decoding if r not in over] + [
            r for r in requests if len(r.sampled) == 1 and r not in over
        ]
        for request in over:  # last, since whoever takes it may ask for the next turn at once
            request.deliver(Generation(request.sampled))


def _common(first: list[int], second: list[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:  # an episode that grew: compared at the speed of C
        return length
    return _common_arrays(np.asarray(first), np.asarray(second))


def _common_arrays(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


def _forward_arguments(model: Any) -> Callable[[SlotCache], dict[str, Any]]:
    """Arguments that hand a model its cache and ask for the last token's logits only."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    known = inspect.signature(type(base).forward).parameters
    # transformers 5.20 renamed the argument; the old name still works there, under a warning at every call.
    name = "cache" if "cache" in known else "past_key_values"
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    return lambda cache: {name: cache, **last_only}
