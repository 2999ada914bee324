"""[`TimedTrainer`]: where the time of a step goes, as metrics and (with `profile`) as a table and a Chrome trace.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import TrainerCallback

from cope_trl.evaluation.times import time_table
from cope_trl.metrics import ROLLOUT_TIMES, RunningMeans
from cope_trl.sampling_trainer import SamplingTrainer
from cope_trl.spans import Spans


class TimedTrainer(SamplingTrainer):
    """
    [`~trl.GRPOTrainer`] that times its rollouts, its reference model and its update.

    Attributes:
        spans: times of what is under way.
    """

    _means: dict[str, RunningMeans]

    def _set_up_clock(self, args: Any) -> None:
        self.spans = Spans(recording=args.profile)
        self._first_step: int | None = None  # of the present `train`, once it has begun
        self.add_callback(_OptimizerClock(self))

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        self.spans.take()  # what an evaluation before this step has left
        if self._first_step is None:
            self._first_step = self.state.global_step
        started = time.perf_counter()
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.spans.add("micro-batch", started, ended := time.perf_counter(), total=False)
        self._note_times(self.spans.take(), ended - started)
        return loss

    def _note_times(self, spent: dict[str, float], total: float) -> None:
        rollout, reference = spent.get("rollout", 0.0), spent.get("reference", 0.0)
        times = {"rollout": rollout, "reference": reference, "update": total - rollout - reference}
        if not getattr(self, "_reads_completions", False):  # else TRL rolls out, and its parts are not known
            parts = {name: spent.get(name, 0.0) for name in ROLLOUT_TIMES}
            times |= {**parts, "idle": max(0.0, rollout - sum(parts.values()))}
        # Seconds of one optimizer step, which is several micro-batches long.
        share = 1.0 / self.current_gradient_accumulation_steps
        for name, seconds in times.items():
            self._means["train"].add(f"time/{name}", seconds, share)

    def _note_optimizer(self, started: float) -> None:
        self.spans.add("optimizer", started, ended := time.perf_counter(), total=False)
        self._means["train"].add("time/optimizer", ended - started)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        # Without gradients it scores by the reference model, or by the policy before the step.
        clock = contextlib.nullcontext() if torch.is_grad_enabled() else self.spans("reference")
        with clock:
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~transformers.Trainer.train`]; with `profile`, what was timed is told however it ends."""
        started, self._first_step = time.perf_counter(), None
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.args.profile:
                self._report_times(time.perf_counter() - started)

    def _report_times(self, seconds: float) -> None:
        rank = self.accelerator.process_index
        trace = Path(self.args.output_dir) / "profile" / f"trace-rank{rank}.json"
        self.spans.write_trace(trace, rank)
        if self.is_world_process_zero():
            Console().print(time_table(self.state.log_history, seconds, self._first_step or 0))
            print(f"Chrome trace (chrome://tracing or Perfetto): {trace}")


class _OptimizerClock(TrainerCallback):
    """Times the optimizer's own work."""

    def __init__(self, trainer: TimedTrainer) -> None:
        self._trainer = trainer
        self._started = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._note_optimizer(self._started)
