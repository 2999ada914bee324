"""Sampling a token for each row of a batch, every row by its own random numbers.

`generate` draws for all rows from one generator, so that an episode depends on which others share its batch. Here a
row brings the number that decides its token, and gets the same token in any batch.
"""

from collections.abc import Sequence

import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)


class RowSampler:
    """Turns logits into ids.

    Args:
        temperature: sampling temperature; 0 takes the most likely token.
        top_p: nucleus sampling mass; 1 keeps every token.
        top_k: keep this many of the most likely tokens; 0 or `None` keeps all.
        min_p: keep tokens at least this likely, relative to the most likely one; `None` or 0 keeps all.
    """

    def __init__(
        self, temperature: float = 1.0, top_p: float = 1.0, top_k: int | None = 0, min_p: float | None = None
    ) -> None:
        self.greedy = temperature == 0
        # In the order of `generate`.
        self.warpers = LogitsProcessorList()
        if not self.greedy and temperature != 1.0:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1.0:
            self.warpers.append(TopPLogitsWarper(top_p))
        if min_p:
            self.warpers.append(MinPLogitsWarper(min_p))

    def __call__(self, logits: torch.Tensor, numbers: Sequence[float]) -> list[int]:
        """Sample.

        Args:
            logits: (S, V).
            numbers: S numbers in [0, 1); row i gets the token at which the summed probabilities pass `numbers[i]`.

        Returns:
            S ids.
        """
        if self.greedy:
            return logits.argmax(-1).tolist()
        ids = torch.empty((len(logits), 0), dtype=torch.long, device=logits.device)  # none of these warpers reads them
        probabilities = self.warpers(ids, logits.float()).softmax(-1)
        # In float32 the sums of a large vocabulary are off by more than its rare tokens' probabilities.
        summed = probabilities.double().cumsum(-1)
        targets = torch.tensor(numbers, dtype=torch.float64, device=logits.device)[:, None] * summed[:, -1:]
        return torch.searchsorted(summed, targets, right=True).clamp_(max=logits.size(-1) - 1).squeeze(-1).tolist()
