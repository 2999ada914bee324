"""Progress in a terminal: one bar with the figures that matter, instead of a wall of metrics."""

from collections.abc import Callable
from typing import Any

from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback

from cope_trl.types import Trajectory

_SHOWN = {
    "episode/success": ("success", "{:.0%}"),
    "episode/turns": ("turns", "{:.1f}"),
    "forecast/nll_k1": ("forecast nll (k=1)", "{:.2f}"),
    "kl": ("kl", "{:.3f}"),
}


class CompactProgress(ProgressCallback):
    """The Trainer's own progress bar, with a few metrics behind it. All metrics still go to the trackers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self.training_bar is None or not logs:
            return
        shown = {
            label: form.format(logs[name]) for name, (label, form) in _SHOWN.items() if logs.get(name) is not None
        }
        if shown:
            self.training_bar.set_postfix(shown, refresh=False)


def evaluation_bar(total: int, label: str, enabled: bool) -> tuple[tqdm, Callable[[list[Trajectory]], None]]:
    """A bar over episodes with the success so far, and the function that advances it."""
    bar = tqdm(total=total, desc=label, dynamic_ncols=True, disable=not enabled)
    counts = {"won": 0, "played": 0}

    def advance(batch: list[Trajectory]) -> None:
        counts["won"] += sum(episode.success for episode in batch)
        counts["played"] += len(batch)
        bar.set_postfix(success=f"{counts['won'] / counts['played']:.0%}", refresh=False)
        bar.update(min(len(batch), total - bar.n))

    return bar, advance
