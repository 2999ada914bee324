"""[`BaseTrainer`]: what every trainer here adds to GRPO, whatever plays the episodes: metrics, checkpoints, the card.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import logging
import os
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import GRPOTrainer

from cope_trl import checkpoints
from cope_trl.data.recorder import TrajectoryRecorder
from cope_trl.errors import RolloutError
from cope_trl.metrics import RunningMeans
from cope_trl.model_card import CardFacts, complete_card
from cope_trl.timed_trainer import TimedTrainer
from cope_trl.types import Trajectory

logger = logging.getLogger(__name__)


class BaseTrainer(TimedTrainer):
    """
    [`~trl.GRPOTrainer`] that keeps the batch's episodes and means of its own over a logging period.

    Attributes:
        trajectories: the episodes of the last batch of this process.
    """

    def _set_up_run(self, args: Any) -> None:
        self._set_up_engine(args)
        self.trajectories: list[Trajectory] = []
        self._means = {mode: RunningMeans(args.forecast_horizon) for mode in ("train", "eval")}
        self._set_up_clock(args)
        folder = os.path.join(args.output_dir, "trajectories")
        rank = self.accelerator.process_index
        self._recorder = TrajectoryRecorder(folder, rank) if args.save_trajectories else None
        self._resume_settings: list[str] = []
        self._sampler: Any = ()  # streams have none

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

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if "importance_sampling_ratio" in output:
            # A ratio summed over an episode masks long ones first; the metric shows how much of them is left.
            mask = output["completion_mask"] * output.get("tool_mask", 1)
            kept, sampled = ((output["importance_sampling_ratio"] > 0) * mask).sum(1), mask.sum(1)
            median = float(self.accelerator.gather(sampled).float().median())
            self._means[self._mode].add_kept(kept, sampled, median)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = self._mode
        for name, value in self._means[mode].flush(self._sum_over_ranks).items():
            self._metrics[mode][name].append(value)
        super().log(logs, start_time)

    # ---------------------------------------------------------------- checkpoints

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """
        As [`~transformers.Trainer.train`]; `True` resumes from the latest checkpoint that was written to its end.

        Raises:
            ConfigError: there is no such checkpoint, or the one named was not written to its end.
        """
        return super().train(checkpoints.resolve(resume_from_checkpoint, self.args.output_dir), *args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        self._sampler = super()._get_train_sampler(*args, **kwargs)
        return self._sampler

    def _init_training_state(
        self, max_steps: Any, steps_per_epoch: Any, epochs: Any, resume_from_checkpoint: str | None, trial: Any
    ) -> tuple[int, int]:
        position = super()._init_training_state(max_steps, steps_per_epoch, epochs, resume_from_checkpoint, trial)
        self._step = 0
        self._buffered_inputs: Any = None
        if self.use_vllm:
            self._last_loaded_step = -1  # the engine holds other weights than those just loaded
        for _ in range(position[0]):
            next(iter(self._sampler), None)  # every epoch shuffles on from where the one before left the generator
        self._set_episodes_aside(resume_from_checkpoint)
        if resume_from_checkpoint is not None:
            self._warn_of_differences(resume_from_checkpoint)
        return position

    def _set_episodes_aside(self, resume_from_checkpoint: str | None) -> None:
        if self._recorder is None:
            return
        self._recorder.restart()
        moved = self._recorder.set_aside(self.state.global_step) if self.accelerator.is_local_main_process else 0
        self.accelerator.wait_for_everyone()
        if moved and resume_from_checkpoint is None:
            logger.warning(
                "`output_dir` is %r, where an earlier run left episodes; %d files of them were moved to %s. Give each "
                "run a folder of its own, or resume with `resume_from_checkpoint`.",
                self.args.output_dir,
                moved,
                self._recorder.superseded,
            )
        elif moved:
            logger.info("%d files of episodes after the checkpoint moved to %s.", moved, self._recorder.superseded)

    def _warn_of_differences(self, checkpoint: str) -> None:
        settings = checkpoints.settings_of(self.args, self.accelerator.num_processes)
        self._resume_settings = checkpoints.differences(checkpoint, settings)
        if self._resume_settings:
            logger.warning(
                "The run resumed from %s goes on with other settings than it was made with, so it is no longer the "
                "run it was:\n%s",
                checkpoint,
                "\n".join(f"- {line}" for line in self._resume_settings),
            )
        if self.args.sync_ref_model:
            logger.warning(
                "`sync_ref_model` is True, but checkpoints hold no reference model: it starts from the initial one "
                "again."
            )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            checkpoints.begin_writing(os.path.join(self._get_output_dir(trial=trial), name))
        super()._save_checkpoint(model, trial)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        if self.args.should_save:
            settings = checkpoints.settings_of(self.args, self.accelerator.num_processes)
            checkpoints.write_settings(output_dir, settings)
        inside = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        state = checkpoints.RunState(
            micro_batches=self._step,
            buffer=self._buffered_inputs if inside else None,
            means={mode: checkpoints.sums_of(means) for mode, means in self._means.items()},
            metrics={mode: checkpoints.plain_metrics(values) for mode, values in self._metrics.items()},
        )
        state.save(output_dir, self.accelerator.process_index)
        # The main process writes trainer_state.json next, which says that everything else is there.
        self.accelerator.wait_for_everyone()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # called once a resume, right before its first step
        if checkpoint is None:
            return
        # Without a buffer TRL rolls out at once, for what is left of its iterations.
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        device = self.accelerator.device
        state = checkpoints.RunState.load(checkpoint, self.accelerator.process_index, device)
        if state is None or self._resume_settings:
            return
        self._step, self._buffered_inputs = state.micro_batches, state.buffer
        for mode, sums in state.means.items():
            checkpoints.restore_sums(self._means[mode], sums)
        for mode, values in state.metrics.items():
            self._metrics[mode].clear()
            self._metrics[mode].update(values)

    # ---------------------------------------------------------------- the Hub

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """As TRL's, with environments, forecasting settings, success and both papers added."""
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            complete_card(self.args.output_dir, self._card_facts())

    def _card_facts(self) -> CardFacts:
        names = {episode.task.environment for episode in self.trajectories}
        if isinstance(self.train_dataset, Dataset) and "environment" in self.train_dataset.column_names:
            names.update(map(str, self.train_dataset.unique("environment")))
        return CardFacts(
            args=self.args,
            forecast_coef=getattr(self, "forecast_coef", 0.0),
            environments=sorted(filter(None, names)),
            step=self.state.global_step,
            log_history=self.state.log_history,
            citations={} if self._paper is GRPOTrainer._paper else {GRPOTrainer._name: GRPOTrainer._paper["citation"]},
            repository=self.hub_model_id,
            trajectories=self._recorder is not None,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        self._report_failed_push()
        super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_failed_push()

    def _report_failed_push(self) -> None:
        """Say what the Trainer keeps to itself: a push that failed in the background, which ends no run."""
        push = getattr(self, "push_in_progress", None)
        if push is None or not push.is_done():
            return
        self.push_in_progress = None
        failed = [error for job in push.jobs if (error := job.exception()) is not None]
        if failed:
            logger.warning(
                "A push to the Hub failed; training goes on and everything is in %r. Push again with "
                "`trainer.push_to_hub()`. The cause: %s: %s",
                self.args.output_dir,
                type(failed[0]).__name__,
                failed[0],
            )

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
