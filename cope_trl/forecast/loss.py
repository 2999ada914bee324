"""Weights and value of the action-forecasting loss (paper Eq. 5), as pure tensor functions.

    L_AF = mean over tasks x of  Σ_{τ in G_x} w(τ) · R_t[ R_tok[ −log p(a_t:t+K | h_t) ] ],
    w(τ) = Y(τ) / max(1, |S_x|)

Every token of every target carries one weight, the product of its trajectory's w and of its share in the two
reductions, so that the loss of any subset of the rows is a weighted sum of negative log-probabilities.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Gate = Literal["success", "mixed", "all"]
Reduction = Literal["mean", "sum"]
TaskWeight = Literal["uniform", "failure_rate"]


def trajectory_weights(
    success: torch.Tensor,
    failed: torch.Tensor,
    num_generations: int,
    gate: Gate = "success",
    group_norm: bool = True,
    task_weight: TaskWeight = "uniform",
) -> torch.Tensor:
    """Weight w of each trajectory (paper Eq. 5 for `gate="success"`).

    Args:
        success: (N,) bool, Y(τ); groups are consecutive runs of `num_generations`.
        failed: (N,) bool, rollouts whose environment broke: weight 0, and no member of their group.
        num_generations: size G of a group; must divide N.
        gate: `"success"` takes all successes; `"mixed"` only successes of groups that also hold a failure (where GRPO
            has a signal); `"all"` takes every trajectory that did not fail.
        group_norm: divide by the number of trajectories the gate takes in the group; otherwise they weigh 1.
        task_weight: `"uniform"` lets every task with a success weigh the same (Eq. 5), however easy it is;
            `"failure_rate"` multiplies by the share of its group that did not succeed, so that tasks the policy
            already solves fade out (§8 discusses the harm that easy refusals do).

    Returns:
        (N,) float32.
    """
    alive = ~failed.view(-1, num_generations)
    hits = success.view(-1, num_generations) & alive
    taken = alive if gate == "all" else hits
    if gate == "mixed":
        taken = taken & (hits.sum(1, keepdim=True) < alive.sum(1, keepdim=True))
    weights = taken.float()
    if group_norm:
        weights = weights / taken.sum(1, keepdim=True).clamp(min=1)
    if task_weight == "failure_rate":
        weights = weights * (1 - hits.sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp(min=1))
    return weights.view(-1)


def token_share(tokens_in_window: int, windows: int, reduction: Reduction) -> float:
    """Share of one target token in R_t[R_tok[·]].

    Args:
        tokens_in_window: target tokens of the window the token belongs to, end-of-turn tokens included.
        windows: windows of the trajectory.
        reduction: `"mean"` is the token mean inside a window, then the mean over windows; `"sum"` is Eq. 5 to the
            letter, the plain sum over both.
    """
    return 1.0 if reduction == "sum" else 1.0 / (tokens_in_window * windows)


def task_scale(num_generations: int, local_batch_size: int, gradient_accumulation_steps: int) -> float:
    """Factor that makes the sum over local rows the mean over the tasks of one optimizer step.

    The micro-batches of a step add up, and data-parallel averaging divides by the number of processes; a step holds
    `local_batch_size · gradient_accumulation_steps · processes / G` tasks.
    """
    return num_generations / (local_batch_size * gradient_accumulation_steps)


def forecast_loss(log_probs: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """Eq. 5 over some rows: `scale · Σ weight · (−log p)`.

    Args:
        log_probs: (…) log-probability of each branch token; only those with a non-zero weight are read.
        weights: (…) weight of each token.
        scale: see [`task_scale`].

    Returns:
        Scalar tensor, 0 with a gradient of 0 when no token has a weight.
    """
    return -scale * torch.where(weights > 0, log_probs, 0.0).mul(weights).sum()


@dataclass(frozen=True, slots=True)
class OffsetStats:
    """Sums over target tokens for each offset k = 0 … K, additive over micro-batches and ranks.

    Attributes:
        nll: (K+1,) summed negative log-probability, natural log.
        hits: (K+1,) number of tokens that were the most likely ones.
        tokens: (K+1,) number of tokens.
    """

    nll: torch.Tensor
    hits: torch.Tensor
    tokens: torch.Tensor

    @staticmethod
    def of(
        log_probs: torch.Tensor, is_top1: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, horizon: int
    ) -> "OffsetStats":
        """Collect from tensors of one shape; tokens without a weight or an offset (line breaks) are left out."""
        chosen = (weights > 0) & (offsets >= 0)
        index = offsets[chosen]
        zeros = torch.zeros(horizon + 1, dtype=torch.float32, device=log_probs.device)
        values = (-log_probs.detach()[chosen].float(), is_top1[chosen].float(), torch.ones_like(index).float())
        return OffsetStats(*(zeros.index_add(0, index, value) for value in values))

    def stacked(self) -> torch.Tensor:
        """(3, K+1) tensor, for one reduction over ranks."""
        return torch.stack([self.nll, self.hits, self.tokens])
