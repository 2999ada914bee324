"""How large the forecasting gradient is beside the policy's: the figure that tells whether λ is in scale."""

from collections.abc import Callable, Iterable

import torch


class GradientRatio:
    """Accumulates the forecasting part of one optimizer step's gradient.

    Args:
        threshold: ratio above which a measurement counts as high.
        patience: consecutive high ratios before [`stays_high`] says so.
    """

    def __init__(self, threshold: float = 0.5, patience: int = 3) -> None:
        self.threshold = threshold
        self.patience = patience
        self._high = 0
        self._parts: dict[int, torch.Tensor] = {}

    def add(self, loss: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Add the gradient of a micro-batch's (weighted) forecasting loss; the graph is kept for the real backward."""
        trained = [p for p in parameters if p.requires_grad]
        grads = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
        for parameter, grad in zip(trained, grads, strict=True):
            if grad is not None:
                key = id(parameter)
                self._parts[key] = self._parts[key] + grad if key in self._parts else grad.detach().clone()

    def measure(
        self,
        parameters: Iterable[torch.nn.Parameter],
        reduce_mean: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> float | None:
        """‖g_forecast‖ / ‖g_policy‖ with g_policy = g − g_forecast; `None` if g_policy is 0.

        Args:
            parameters: the parameters, their `.grad` holding the whole (averaged) gradient before clipping.
            reduce_mean: averages a tensor over ranks.
        """
        forecast = policy = 0.0
        for parameter in parameters:
            part = self._parts.get(id(parameter))
            if parameter.grad is None:
                continue
            # Also a rank that forecast nothing takes part in the reduction.
            part = reduce_mean(torch.zeros_like(parameter.grad) if part is None else part)
            forecast += float(part.float().square().sum())
            policy += float((parameter.grad - part).float().square().sum())
        self._parts = {}
        if policy == 0.0:
            return None
        return (forecast / policy) ** 0.5

    @property
    def pending(self) -> bool:
        """Whether anything was added since the last measurement."""
        return bool(self._parts)

    def stays_high(self, ratio: float) -> bool:
        """Record one ratio; true when it is the one that makes `patience` high ratios in a row, so once a run."""
        self._high = self._high + 1 if ratio > self.threshold else 0
        return self._high == self.patience
