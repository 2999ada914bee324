"""Scoring the branches of a micro-batch with either engine.

A `forward` here is a callable with the arguments of a causal language model plus pre-shifted `shift_labels` and
`forecasts`, the positions that score branches; it returns an object with per-position `log_probs`, `is_top1` (and
`entropy`), each shaped like the labels ([`~cope_trl.forecast.head.ScoredForward`]).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from cope_trl.forecast.attention import branched_arguments
from cope_trl.forecast.loss import OffsetStats, forecast_loss
from cope_trl.forecast.packing import BLOCK, ForecastRows, SharedPrefixBatch, pack_shared_prefix
from cope_trl.forecast.separate import SeparateBatch, unpack_separate

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored branch tokens: four tensors of one shape, whichever it is.

    Attributes:
        log_probs: log-probability of each token; meaningful where the weight is not 0.
        is_top1: whether the token was the most likely one.
        weight: weight in the loss.
        offset: offset k of the action the token belongs to, or -1.
    """

    log_probs: torch.Tensor
    is_top1: torch.Tensor
    weight: torch.Tensor
    offset: torch.Tensor

    def loss(self, scale: float) -> torch.Tensor:
        """Their share of Eq. 5 (see [`~cope_trl.forecast.loss.forecast_loss`])."""
        return forecast_loss(self.log_probs, self.weight, scale)

    def stats(self, horizon: int) -> OffsetStats:
        """Negative log-probability and accuracy by offset."""
        return OffsetStats.of(self.log_probs, self.is_top1, self.weight, self.offset, horizon)


def score_shared(
    forward: Forward,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    rows: ForecastRows,
    completion: torch.Tensor | None,
    implementation: str,
) -> tuple[Any, SharedPrefixBatch, Scores]:
    """Score completions and branches in one forward.

    Args:
        forward: see the module.
        input_ids, attention_mask: (B, L) trajectories.
        rows: their branches.
        completion: (B, C) 1 on the tokens of the last C columns to score as well; `None` for the branches only.
        implementation: attention implementation of the model, FlexAttention or one of
            [`~cope_trl.forecast.attention.BRANCHED`].

    Returns:
        The forward's output, the batch it was called with, and the branches' scores of shape (B, F).
    """
    flex = implementation == "flex_attention"
    batch = pack_shared_prefix(input_ids, attention_mask, rows, completion, multiple=BLOCK if flex else 1)
    attention = {"attention_mask": batch.block_mask()} if flex else branched_arguments(batch)
    output = forward(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        shift_labels=batch.shift_labels,
        forecasts=batch.is_branch,
        **attention,
    )
    log_probs, is_top1 = batch.branch_slice(output.log_probs), batch.branch_slice(output.is_top1)
    return output, batch, Scores(log_probs, is_top1, rows.weight, rows.offset)


def count_windows(rows: ForecastRows) -> int:
    """Windows of all rows together."""
    return int((rows.window.amax(dim=1) + 1).sum()) if rows.window.numel() else 0


def score_separate(
    forward: Forward,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    rows: ForecastRows,
    pad_token_id: int,
    batch_size: int,
    forwards: int,
) -> Scores:
    """Score each window as a sequence of its own.

    Args:
        forward: see the module.
        input_ids, attention_mask: (B, L) trajectories.
        rows: their branches.
        pad_token_id: id for padding.
        batch_size: windows in one forward.
        forwards: number of forwards to make, the same on every rank; surplus ones score a placeholder.

    Returns:
        Scores of shape (tokens,).
    """
    windows = unpack_separate(input_ids, attention_mask, rows, pad_token_id)
    parts: list[list[torch.Tensor]] = [[], [], [], []]
    for index in range(forwards):
        chunk = windows[index * batch_size : (index + 1) * batch_size]
        if not len(chunk.input_ids):
            chunk = _placeholder(input_ids, pad_token_id)
        output = forward(
            input_ids=chunk.input_ids,
            attention_mask=chunk.attention_mask,
            shift_labels=chunk.shift_labels,
            forecasts=torch.ones_like(chunk.input_ids, dtype=torch.bool),
        )
        for part, values in zip(parts, (output.log_probs, output.is_top1, chunk.weight, chunk.offset), strict=True):
            part.append(values.flatten())
    if not forwards:
        empty = torch.zeros(0, device=input_ids.device)
        return Scores(empty, empty.bool(), empty, empty.long())
    return Scores(*(torch.cat(part) for part in parts))


def _placeholder(input_ids: torch.Tensor, pad_token_id: int) -> SeparateBatch:
    """One sequence of two tokens with nothing to score."""
    ids = torch.full((1, 2), pad_token_id, dtype=torch.int64, device=input_ids.device)
    nothing = torch.zeros((1, 2), device=input_ids.device)
    return SeparateBatch(ids, torch.ones_like(ids), torch.full_like(ids, -100), nothing, torch.full_like(ids, -1))
