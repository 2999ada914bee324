"""The LM head on the scored positions only.

A branch opens with the request for a plan, and a trajectory is mostly observations: positions without a label need no
logits. TRL's fused head leaves them out on CUDA and scores them all on a CPU; here they are left out everywhere, by
handing the head only the hidden states that are scored.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from cope_trl.forecast.packing import IGNORE


@dataclass(frozen=True, slots=True)
class TokenScores:
    """What the head says of each position; 0 where the label is -100.

    Attributes:
        log_probs: (B, N) log-probability of the label.
        entropy: (B, N) entropy of the distribution in nats.
        is_top1: (B, N) whether the label is the most likely token.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    is_top1: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScoredForward:
    """A forward of a causal language model that runs its head on the labelled positions only.

    Args:
        forward: the model with a fused LM head, called with `shift_labels`; returns per-position `log_probs`,
            `entropy` and `is_top1`.
        backbone: the module whose `last_hidden_state` that head reads.
        temperature: what that head divides the logits by. Forecasts are scored at temperature 1 all the same:
            scaling a hidden state scales its logits, so one head serves both (exact without bias or soft cap).
    """

    forward: Callable[..., Any]
    backbone: torch.nn.Module
    temperature: float = 1.0

    def __call__(self, shift_labels: torch.Tensor, forecasts: torch.Tensor, **inputs: Any) -> TokenScores:
        """Score the labels.

        Args:
            shift_labels: (B, N) id scored at each position, or -100.
            forecasts: (B, N) bool, the positions that score forecasts.
            inputs: arguments of the model's forward, `input_ids` of shape (B, N) among them.
        """
        kept = shift_labels != IGNORE
        with self._reduced(kept, forecasts[kept]):
            output = self.forward(shift_labels=shift_labels[kept][None], **inputs)
        log_probs, entropy, top = (
            values.new_zeros(kept.shape).masked_scatter(kept, values)
            for values in (output.log_probs, output.entropy, output.is_top1)
        )
        return TokenScores(log_probs, entropy, top)

    @contextmanager
    def _reduced(self, kept: torch.Tensor, forecasts: torch.Tensor) -> Iterator[None]:
        """Make the backbone return (1, M, H) hidden states of the M kept positions, in reading order."""

        def reduce(module: torch.nn.Module, args: Any, output: Any) -> Any:
            hidden = output.last_hidden_state
            hidden = hidden[kept.to(hidden.device)]
            if self.temperature != 1.0:
                hidden = torch.where(forecasts.to(hidden.device)[:, None], hidden * self.temperature, hidden)
            output.last_hidden_state = hidden[None]
            return output

        hook = self.backbone.register_forward_hook(reduce)
        try:
            yield
        finally:
            hook.remove()
