"""From forecast windows to tensors: rows that survive TRL's shuffling, and the inputs of either engine.

A *forecast row* holds all branches of one trajectory, end to end. It is padded to `(B, F)` like every tensor of the
generation buffer, because TRL shuffles and splits the buffer by row. At loss time the rows of a micro-batch become

- one sequence without padding, `[trajectory 0 | its branches | trajectory 1 | its branches | …]` (`shared_prefix`): a
  branch token attends to its trajectory up to the end of its history and to its own branch up to itself; trajectory
  tokens never see a branch, and trajectories never see one another; or
- one padded sequence `[history | branch]` a window (`separate`, in [`~cope_trl.forecast.separate`]).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cope_trl.forecast.loss import Reduction, token_share
from cope_trl.types import Branch

IGNORE = -100
BLOCK = 128
"""Tokens of a block of FlexAttention."""
_FIELDS = ("ids", "window", "cut", "offset", "weight")


@dataclass(frozen=True, slots=True)
class ForecastRows:
    """Branches of B trajectories, right-padded.

    Attributes:
        ids: (B, F) int64 token ids.
        window: (B, F) int64 index of the branch within its row, -1 on padding.
        cut: (B, F) int64 number of (unpadded) trajectory tokens the branch continues from.
        offset: (B, F) int64 offset k of the action a target token belongs to, else -1.
        weight: (B, F) float32 weight in the loss; 0 on every token that is no target.
    """

    ids: torch.Tensor
    window: torch.Tensor
    cut: torch.Tensor
    offset: torch.Tensor
    weight: torch.Tensor

    def to_buffer(self) -> dict[str, torch.Tensor]:
        """Tensors under `forecast_*` names, each with leading dimension B."""
        return {f"forecast_{name}": getattr(self, name) for name in _FIELDS}

    @staticmethod
    def from_buffer(buffer: Mapping[str, Any]) -> "ForecastRows | None":
        """The rows of a (micro-)batch without surplus padding, or `None` when the batch carries none at all."""
        if "forecast_ids" not in buffer:
            return None
        rows = ForecastRows(*(buffer[f"forecast_{name}"] for name in _FIELDS))
        used = int((rows.window >= 0).sum(1).max()) if rows.window.numel() else 0
        return ForecastRows(*(getattr(rows, name)[:, :used] for name in _FIELDS))

    def select(self, chosen: torch.Tensor) -> "ForecastRows":
        """Some of the rows, by a (B,) bool mask."""
        return ForecastRows(*(getattr(self, name)[chosen] for name in _FIELDS))

    @property
    def tokens(self) -> int:
        """Branch tokens, padding not counted."""
        return int((self.window >= 0).sum())


def pack_rows(
    branches: Sequence[Sequence[tuple[int, Branch]]],
    weights: Sequence[float],
    reduction: Reduction,
    device: torch.device | str = "cpu",
) -> ForecastRows:
    """Lay the branches of each trajectory end to end.

    Args:
        branches: B lists of `(cut, branch)`; empty for a trajectory that is not forecast from.
        weights: B trajectory weights w (see [`~cope_trl.forecast.loss.trajectory_weights`]).
        reduction: how tokens and windows are reduced.
        device: where the tensors go.
    """
    columns: list[dict[str, list[Any]]] = []
    for row, weight in zip(branches, weights, strict=True):
        column: dict[str, list[Any]] = {name: [] for name in _FIELDS}
        for index, (cut, branch) in enumerate(row):
            share = weight * token_share(max(sum(branch.loss_mask), 1), len(row), reduction)
            column["ids"].extend(branch.ids)
            column["window"].extend([index] * len(branch.ids))
            column["cut"].extend([cut] * len(branch.ids))
            column["offset"].extend(branch.offsets)
            column["weight"].extend(share * trained for trained in branch.loss_mask)
        columns.append(column)
    width = max((len(column["ids"]) for column in columns), default=0)
    fill = {"ids": 0, "window": -1, "cut": 0, "offset": -1, "weight": 0.0}
    tensors = {
        name: torch.tensor(
            [column[name] + [fill[name]] * (width - len(column[name])) for column in columns],
            dtype=torch.float32 if name == "weight" else torch.int64,
            device=device,
        ).view(len(columns), width)
        for name in _FIELDS
    }
    return ForecastRows(**tensors)


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Where one trajectory and its branches stand in a packed sequence: end to end, the trajectory first.

    Attributes:
        size: tokens of the trajectory.
        cuts: for each branch, how many of them it sees.
        branches: tokens of each branch.
    """

    size: int
    cuts: tuple[int, ...]
    branches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SharedPrefixBatch:
    """Inputs of one forward over trajectories and their branches, packed into a single sequence of N tokens.

    Attributes:
        input_ids: (1, N) int64.
        position_ids: (1, N) int64; a branch continues from the end of its history.
        shift_labels: (1, N) int64; entry j is the id scored at position j (that of token j+1), or -100.
        is_branch: (1, N) bool.
        visible: `visible(b, head, q, k)` says whether query q sees key k, on index tensors of any shape; b and head
            are not read.
        spans: B spans, one a trajectory.
        cell: (B, L+F) int64; where in the sequence the token of a trajectory's or a forecast row's column stands, or
            -1 on padding.
        start: L, the first of the columns of forecast rows.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    shift_labels: torch.Tensor
    is_branch: torch.Tensor
    visible: Callable[..., torch.Tensor]
    spans: tuple[RowSpan, ...]
    cell: torch.Tensor
    start: int

    def block_mask(self) -> Any:
        """FlexAttention block mask. N must be a multiple of [`BLOCK`].

        It is built from one row of blocks after another, so that its memory grows with N, not with N²; PyTorch's
        `create_block_mask` writes all N² pairs unless it is compiled.
        """
        from torch.nn.attention.flex_attention import BlockMask

        length = self.input_ids.size(1)
        index = torch.arange(length, device=self.input_ids.device)
        some, every = [], []
        for queries in index.split(BLOCK):
            tile = self.visible(None, None, queries[:, None], index[None]).view(len(queries), -1, BLOCK)
            some.append(tile.any(dim=2).any(dim=0))
            every.append(tile.all(dim=2).all(dim=0))
        full = torch.stack(every)
        partial = torch.stack(some) & ~full
        return BlockMask.from_kv_blocks(
            *_block_lists(partial),
            *_block_lists(full),
            BLOCK_SIZE=BLOCK,
            mask_mod=self.visible,
            seq_lengths=(length, length),
        )

    def branch_slice(self, per_position: torch.Tensor) -> torch.Tensor:
        """(B, F) values of the branch tokens from (1, N) values of the positions that score them; 0 on padding."""
        return self._of_tokens(per_position, self.cell[:, self.start :])

    def completion_slice(self, per_position: torch.Tensor, columns: int) -> torch.Tensor:
        """(B, C) values of the tokens of the last C columns from (1, N) values of the positions that score them."""
        return self._of_tokens(per_position, self.cell[:, self.start - columns : self.start])

    @staticmethod
    def _of_tokens(per_position: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
        return per_position[0, (cell - 1).clamp(min=0)].masked_fill(cell <= 0, 0)


def _block_lists(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block meets, (1, 1, n), and which, (1, 1, n, n) with these first."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None]


def row_spans(attention_mask: torch.Tensor, rows: ForecastRows) -> tuple[RowSpan, ...]:
    """The spans of B trajectories, from (B, L) 1 on their tokens, and their branches."""
    spans = []
    for size, window, cut in zip(attention_mask.sum(1).tolist(), rows.window.tolist(), rows.cut.tolist(), strict=True):
        firsts = [j for j, index in enumerate(window) if index >= 0 and (j == 0 or window[j - 1] != index)]
        used = sum(index >= 0 for index in window)
        ends = [*firsts[1:], used]
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=False))
        spans.append(RowSpan(size, tuple(cut[first] for first in firsts), sizes))
    return tuple(spans)


def pack_shared_prefix(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    rows: ForecastRows,
    completion: torch.Tensor | None = None,
    multiple: int = 1,
) -> SharedPrefixBatch:
    """Lay all trajectories and their branches out as one sequence, without the padding between them.

    Args:
        input_ids: (B, L) left-padded prompts with right-padded completions.
        attention_mask: (B, L) 1 on real tokens, which are contiguous.
        rows: branches of the same B trajectories. The first token of a branch is no target.
        completion: (B, C) 1 on the tokens of the last C columns to score; `None` scores the branches only.
        multiple: N is filled up to a multiple of this, with tokens that only see one another.
    """
    start = input_ids.size(1)
    window = torch.cat([torch.full_like(input_ids, -1), rows.window], dim=1)
    real = torch.cat([attention_mask.bool(), rows.window >= 0], dim=1)
    row, column = real.nonzero(as_tuple=True)
    index = torch.arange(len(row), device=input_ids.device)
    cell = torch.full_like(window, -1)
    cell[real] = index
    is_branch, segment = column >= start, torch.stack([row, window[real]])
    changes = torch.ones((2, len(row)), dtype=torch.bool, device=input_ids.device)
    changes[:, 1:] = segment[:, 1:] != segment[:, :-1]
    begins = changes.any(dim=0)  # the first token of a trajectory or of a branch
    first, first_of_row = (torch.where(at, index, 0).cummax(dim=0).values for at in (begins, changes[0]))
    cut = torch.cat([torch.zeros_like(input_ids), rows.cut], dim=1)[real]
    # Plain GRPO numbers columns from 0, padding included; the same numbers keep the policy's log-probabilities equal.
    left = attention_mask.int().argmax(dim=1)[row]
    positions = torch.where(is_branch, left + cut + index - first, column)
    tokens = torch.cat([input_ids, rows.ids], dim=1)[real]
    wanted = torch.zeros_like(real)
    wanted[:, start:] = rows.weight > 0
    if completion is not None:
        wanted[:, start - completion.size(1) : start] = completion.bool()
    scored = wanted[real] & ~begins
    labels = torch.cat([tokens.masked_fill(~scored, IGNORE)[1:], tokens.new_full((1,), IGNORE)])
    surplus = -len(row) % multiple

    def filled(values: torch.Tensor, fill: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, surplus), value=fill)

    own = filled(first, -1)
    history = filled(first_of_row, 0)
    reach = filled(torch.where(is_branch, first_of_row + cut, 0), 0)

    def visible(b: Any, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        from_history = (k >= history[q]) & (k < reach[q])
        return (k <= q) & ((own[q] == own[k]) | from_history)

    return SharedPrefixBatch(
        input_ids=filled(tokens, 0)[None],
        position_ids=filled(positions, 0)[None],
        shift_labels=filled(labels, IGNORE)[None],
        is_branch=filled(is_branch, 0)[None],
        visible=visible,
        spans=row_spans(attention_mask, rows),
        cell=cell,
        start=start,
    )
