"""Keys and values of many episodes in one store, each episode compact in a slot of its own.

`generate` pads a batch on the left and appends one column for all rows at a time; over turns of unequal length that
leaves a hole in every row at every turn. Here each slot grows by itself: a forward names the slots it is about and
where each of its tokens goes, and attends to as many columns as its longest slot holds. Hence slots can be filled,
continued and given up at any time, and a prefix that several episodes share is computed once and copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Columns are added in steps of this many, so that a growing episode does not move the store at every token.
_COLUMNS = 256


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the tokens of one forward stand; S rows of Q tokens, left-padded.

    Attributes:
        slots: (S,) slot of each row.
        span: the slots as a slice, where they follow one another.
        row, query: (M,) indices of the M real tokens within the forward.
        slot, column: (M,) where their keys and values are kept.
        queries: Q.
        width: number of columns attended to.
    """

    slots: torch.Tensor
    span: slice | None
    row: torch.Tensor
    query: torch.Tensor
    slot: torch.Tensor
    column: torch.Tensor
    queries: int
    width: int

    @staticmethod
    def of(slots: Sequence[int], held: Sequence[int], new: Sequence[int], device: torch.device) -> "Placement":
        """Of `new[i]` tokens that follow the `held[i]` tokens of slot `slots[i]`."""
        first, last = slots[0], slots[-1]
        span = slice(first, last + 1) if list(slots) == list(range(first, last + 1)) else None
        counts, queries = torch.tensor(new), max(new)
        # Made on the CPU and sent in one piece: a forward of one token a row must not cost a transfer a row.
        row = torch.repeat_interleave(counts)
        inside = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        where = torch.tensor([slots, held])[:, row]
        sent = torch.stack([row, inside + (queries - counts)[row], where[0], inside + where[1]]).to(device)
        width = max(before + count for before, count in zip(held, new, strict=True))
        row, query, slot, column = sent.unbind()
        return Placement(torch.tensor(slots, device=device), span, row, query, slot, column, queries, width)

    def grid(self, values: torch.Tensor) -> torch.Tensor:
        """(S, Q) from a value a real token, in reading order; padding is 0."""
        grid = torch.zeros((len(self.slots), self.queries), dtype=torch.long, device=values.device)
        grid[self.row, self.query] = values
        return grid

    def mask(self) -> torch.Tensor:
        """(S, 1, Q, width) bool, True where a token may look; padding looks at the first column."""
        seen = self.grid(self.column)
        return torch.arange(self.width, device=seen.device) <= seen[:, None, :, None]


class SlotCache(Cache):
    """A `transformers` cache of `slots` episodes that a model fills under a [`Placement`].

    Args:
        layers: attention layers of the model.
        slots: episodes it can hold.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self.slots = slots
        self.columns = 0
        self.placement: Placement | None = None
        super().__init__(layers=[_SlotLayer(self) for _ in range(layers)])

    def place(self, placement: Placement) -> None:
        """Say where the next forward's tokens go, and make room for them."""
        self.placement = placement
        if placement.width > self.columns:
            self.columns = -(-placement.width // _COLUMNS) * _COLUMNS
            for layer in self._own_layers:
                layer.grow(self.columns)

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        for layer in self._own_layers:
            for store in (layer.keys, layer.values):
                store[target, :, :length] = store[source, :, :length]

    def nbytes(self) -> int:
        """Bytes of the store."""
        stores = [store for layer in self._own_layers for store in (layer.keys, layer.values) if store is not None]
        return sum(store.numel() * store.element_size() for store in stores)

    @property
    def _own_layers(self) -> "list[_SlotLayer]":
        return [layer for layer in self.layers if isinstance(layer, _SlotLayer)]


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer: (slots, heads, columns, D) each."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self._cache.slots, key_states.size(1), self._cache.columns)
        # Columns nobody has written are masked, but 0 × NaN would be NaN.
        self.keys = key_states.new_zeros((*shape, key_states.size(3)))
        self.values = value_states.new_zeros((*shape, value_states.size(3)))
        self.is_initialized = True

    def grow(self, columns: int) -> None:
        """Hold that many columns."""
        if not self.is_initialized:
            return
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, columns - self.keys.size(2)))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, columns - self.values.size(2)))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep (S, heads, Q, D) keys and values; return those of the S slots, (S, heads, width, D) each."""
        place = self._cache.placement
        if place is None:
            raise RuntimeError("a `SlotCache` must be told where tokens go (`place`) before each forward")
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        kept = []
        for store, states in ((self.keys, key_states), (self.values, value_states)):
            store[place.slot, :, place.column] = states[place.row, :, place.query]
            seen = store[:, :, : place.width]
            kept.append(seen[place.span] if place.span is not None else seen.index_select(0, place.slots))
        return kept[0], kept[1]

    def get_seq_length(self) -> int:
        """0: a slot's length is the engine's business, and positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns attended to, and the first of them."""
        place = self._cache.placement
        return (place.width if place is not None else query_length), 0

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1
