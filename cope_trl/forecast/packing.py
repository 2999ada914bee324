"""From forecast windows to tensors: rows that survive TRL's shuffling, and the inputs of either engine.

A *forecast row* holds all branches of one trajectory, end to end. It is padded to `(B, F)` like every tensor of the
generation buffer, because TRL shuffles and splits the buffer by row. At loss time the rows of a micro-batch become

- one sequence `[prompt | completion | branch 0 | branch 1 | …]` a row (`shared_prefix`): a branch token attends to the
  trajectory up to the end of its history and to its own branch up to itself; trajectory tokens never see a branch; or
- one padded sequence `[history | branch]` a window (`separate`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cope_trl.forecast.loss import Reduction, token_share
from cope_trl.types import Branch

IGNORE = -100
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
class SharedPrefixBatch:
    """Inputs of one forward over trajectories and their branches; N = L + F.

    Attributes:
        input_ids: (B, N) int64.
        position_ids: (B, N) int64; a branch continues from the end of its history.
        visible: `visible(b, head, q, k)` says whether query q of row b sees key k, on index tensors of any shape.
        shift_labels: (B, N) int64; entry j is the id scored at position j (that of token j+1), or -100.
        start: L, the first branch column.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    visible: Callable[..., torch.Tensor]
    shift_labels: torch.Tensor
    start: int

    def dense_mask(self) -> torch.Tensor:
        """(B, 1, N, N) bool mask for SDPA, True where attention is allowed."""
        rows, length = self.input_ids.shape
        b = torch.arange(rows, device=self.input_ids.device).view(-1, 1, 1)
        index = torch.arange(length, device=self.input_ids.device)
        return self.visible(b, None, index.view(1, -1, 1), index.view(1, 1, -1)).unsqueeze(1)

    def additive_mask(self, dtype: torch.dtype) -> torch.Tensor:
        """(B, 1, N, N) mask for eager attention: 0 where attention is allowed, the smallest value elsewhere."""
        dense = self.dense_mask()
        return torch.zeros(dense.shape, dtype=dtype, device=dense.device).masked_fill(~dense, torch.finfo(dtype).min)

    def block_mask(self) -> Any:
        """FlexAttention block mask (CUDA)."""
        from torch.nn.attention.flex_attention import create_block_mask

        rows, length = self.input_ids.shape
        return create_block_mask(self.visible, rows, None, length, length, device=str(self.input_ids.device))

    def branch_slice(self, per_position: torch.Tensor) -> torch.Tensor:
        """(B, F) values of the branch tokens from (B, N) values of the positions that score them."""
        return per_position[:, self.start - 1 : -1]

    def completion_slice(self, per_position: torch.Tensor, logits_to_keep: int) -> torch.Tensor:
        """(B, C) values of the completion tokens from (B, N) values of the positions that score them."""
        return per_position[:, self.start - logits_to_keep - 1 : self.start - 1]


def pack_shared_prefix(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, rows: ForecastRows, logits_to_keep: int
) -> SharedPrefixBatch:
    """Append the branches to their trajectories.

    Args:
        input_ids: (B, L) left-padded prompts with right-padded completions.
        attention_mask: (B, L) 1 on real tokens.
        rows: branches of the same B trajectories.
        logits_to_keep: number C of completion columns to score; 0 scores the branches only.
    """
    size, start = input_ids.shape
    device = input_ids.device
    columns = torch.arange(start, device=device).expand(size, -1)
    left = attention_mask.int().argmax(dim=1, keepdim=True)  # (B, 1) columns of left padding
    first = torch.full_like(rows.window, -1)
    if rows.window.size(1):
        # Position inside a branch: distance from the branch's first column.
        here = torch.arange(rows.window.size(1), device=device).expand(size, -1)
        begins = torch.ones_like(rows.window, dtype=torch.bool)
        begins[:, 1:] = rows.window[:, 1:] != rows.window[:, :-1]
        first = torch.where(begins, here, 0).cummax(dim=1).values
        branch_positions = left + rows.cut + here - first
    else:
        branch_positions = first
    ids = torch.cat([input_ids, rows.ids], dim=1)
    # Plain GRPO numbers columns from 0, padding included; the same numbers keep the policy's log-probabilities equal.
    positions = torch.cat([columns, branch_positions], dim=1)
    window = torch.cat([torch.full_like(input_ids, -1), rows.window], dim=1)
    is_branch = torch.zeros_like(window, dtype=torch.bool)
    is_branch[:, start:] = True
    # Last trajectory column (exclusive) a query may see.
    horizon = torch.cat([torch.full_like(input_ids, start), left + rows.cut], dim=1)
    valid = torch.cat([attention_mask.bool(), rows.window >= 0], dim=1)

    def visible(b: torch.Tensor, head: Any, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        from_history = ~is_branch[b, k] & (k < horizon[b, q])
        from_branch = is_branch[b, q] & is_branch[b, k] & (window[b, q] == window[b, k])
        # A padding query sees itself: a row of only -inf would be NaN.
        return ((from_history | from_branch) & (k <= q) & valid[b, k]) | (q == k)

    labels = torch.full_like(ids, IGNORE)
    if logits_to_keep:
        kept = slice(start - logits_to_keep, start)
        labels[:, kept] = input_ids[:, kept].masked_fill(attention_mask[:, kept] == 0, IGNORE)
    labels[:, start:] = rows.ids.masked_fill(rows.weight <= 0, IGNORE)
    shift_labels = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE)], dim=1)
    return SharedPrefixBatch(ids, positions, visible, shift_labels, start)


@dataclass(frozen=True, slots=True)
class SeparateBatch:
    """One padded sequence a window: W windows of at most S tokens.

    Attributes:
        input_ids: (W, S) int64, right-padded.
        attention_mask: (W, S) int64.
        shift_labels: (W, S) int64; entry j is the id scored at position j, or -100.
        weight, offset: (W, S) weight and offset of the token scored at position j.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    shift_labels: torch.Tensor
    weight: torch.Tensor
    offset: torch.Tensor

    def __getitem__(self, rows: slice) -> "SeparateBatch":
        """Some of the windows, cut to the longest of them."""
        used = int(self.attention_mask[rows].sum(1).max()) if self.attention_mask[rows].numel() else 0
        names = ("input_ids", "attention_mask", "shift_labels", "weight", "offset")
        return SeparateBatch(*(getattr(self, name)[rows, :used] for name in names))


def unpack_separate(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, rows: ForecastRows, pad_token_id: int
) -> SeparateBatch:
    """Write each window as a sequence of its own, `[history | branch]`, without padding before or between.

    Args:
        input_ids, attention_mask: (B, L) as in [`pack_shared_prefix`].
        rows: branches of the same B trajectories.
        pad_token_id: id for the padding on the right.
    """
    device = input_ids.device
    sequences = []
    for row in range(input_ids.size(0)):
        left = int(attention_mask[row].int().argmax())
        for index in range(int(rows.window[row].max()) + 1 if rows.window.size(1) else 0):
            here = rows.window[row] == index
            cut = int(rows.cut[row, here][0])
            history = input_ids[row, left : left + cut]
            none = torch.zeros(cut, device=device)
            sequences.append(
                (
                    torch.cat([history, rows.ids[row, here]]),
                    torch.cat([none, rows.weight[row, here]]),
                    torch.cat([none.long() - 1, rows.offset[row, here]]),
                )
            )
    length = max((len(ids) for ids, _, _ in sequences), default=0)
    shape = (len(sequences), length)
    ids = torch.full(shape, pad_token_id, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, dtype=torch.int64, device=device)
    labels = torch.full(shape, IGNORE, dtype=torch.int64, device=device)
    weight = torch.zeros(shape, device=device)
    offset = torch.full(shape, -1, dtype=torch.int64, device=device)
    for row, (sequence, weights, offsets) in enumerate(sequences):
        size = len(sequence)
        ids[row, :size], mask[row, :size] = sequence, 1
        labels[row, : size - 1] = sequence[1:].masked_fill(weights[1:] <= 0, IGNORE)
        weight[row, : size - 1], offset[row, : size - 1] = weights[1:], offsets[1:]
    return SeparateBatch(ids, mask, labels, weight, offset)
