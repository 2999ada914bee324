"""[`BaseTrainer`]: what every trainer here adds to GRPO, whatever plays the episodes: metrics summed over ranks.

With `completion_trainer.py`, `episode_trainer.py` and `cope_trainer.py` one of the four files that touch
TRL internals; `tests/test_trl_seam.py` pins every name they rely on.
"""

import os
import time
from typing import Any

import torch
from transformers import PreTrainedModel
from trl import GRPOTrainer

from cope_trl.data.recorder import TrajectoryRecorder
from cope_trl.errors import RolloutError
from cope_trl.metrics import RunningMeans
from cope_trl.types import Trajectory


class BaseTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that keeps the batch's episodes and means of its own over a logging period.

    Attributes:
        trajectories: the episodes of the last batch of this process.
    """

    def _set_up_run(self, args: Any) -> None:
        self.trajectories: list[Trajectory] = []
        self._means = {mode: RunningMeans(args.forecast_horizon) for mode in ("train", "eval")}
        self._rollout_seconds = 0.0
        folder = os.path.join(args.output_dir, "trajectories")
        rank = self.accelerator.process_index
        self._recorder = TrajectoryRecorder(folder, rank) if args.save_trajectories else None

    def _keep_episodes(self, played: list[Trajectory]) -> None:
        """Count and record a batch of episodes.

        Raises:
            RolloutError: every episode of every process failed.
        """
        self.trajectories = played
        self._means[self._mode].add_episodes(played)
        if self._recorder is not None:
            self._recorder.record(self._mode, self.state.global_step, played)
        if not self._any_rank(not all(episode.failed for episode in played)):
            raise RolloutError(
                f"All {len(played)} rollouts of step {self.state.global_step} failed; nothing can be learned from. "
                f"The first cause: {played[0].error}"
            )

    @property
    def _base_model(self) -> PreTrainedModel:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @property
    def _mode(self) -> str:
        return "train" if self.model.training else "eval"

    @property
    def _group_size(self) -> int:
        return self.num_generations if self.model.training else self.num_generations_eval

    # ---------------------------------------------------------------- metrics

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> torch.Tensor:
        started, played = time.perf_counter(), self._rollout_seconds
        loss = super().training_step(model, inputs, num_items_in_batch)
        rollout = self._rollout_seconds - played
        # Seconds of one optimizer step, which is several micro-batches long.
        share = 1.0 / self.current_gradient_accumulation_steps
        means = self._means["train"]
        means.add("time/rollout", rollout, share)
        means.add("time/update", time.perf_counter() - started - rollout, share)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        for name, value in self._means[mode].flush(self._sum_over_ranks).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)

    # ---------------------------------------------------------------- ranks

    def _gathered(self, name: str) -> torch.Tensor:
        """(N,) bool attribute of the last batch's episodes, over all ranks."""
        values = torch.tensor([getattr(e, name) for e in self.trajectories], device=self.accelerator.device)
        return self.accelerator.gather(values)

    def _any_rank(self, local: bool) -> bool:
        if self.accelerator.num_processes == 1:
            return local
        flag = torch.tensor([float(local)], device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, reduction="sum").item())

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return tensor
        return self.accelerator.reduce(tensor.to(self.accelerator.device), reduction="sum")

    def _mean_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._sum_over_ranks(tensor) / self.accelerator.num_processes

    def _max_over_ranks(self, value: int) -> int:
        if self.accelerator.num_processes == 1:
            return value
        return int(self.accelerator.gather(torch.tensor([value], device=self.accelerator.device)).max())
