"""[`CoPETrainer`]: GRPO on episodes in real environments, with action forecasting. Wiring only.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import logging
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from transformers import TrainerCallback
from trl.trainer.utils import add_fused_lm_head

from cope_trl.chat import ChatFormat
from cope_trl.citation import COPE
from cope_trl.cope_config import CoPEConfig
from cope_trl.episode_trainer import EpisodeTrainer
from cope_trl.errors import ConfigError
from cope_trl.forecast.attention import use_branched_attention
from cope_trl.forecast.builder import BranchSettings, build_branches
from cope_trl.forecast.engines import choose_engine, scoring_traits
from cope_trl.forecast.gradients import GradientRatio
from cope_trl.forecast.head import ScoredForward
from cope_trl.forecast.loss import task_scale, trajectory_weights
from cope_trl.forecast.packing import ForecastRows, pack_rows
from cope_trl.forecast.scoring import Scores, count_windows, score_separate, score_shared

logger = logging.getLogger(__name__)

# What the LM head reports a token; the accuracy by offset needs the last one.
_SCORED = ("log_probs", "entropy", "is_top1")


class CoPETrainer(EpisodeTrainer):
    """
    Trainer for co-evolving acting and forecasting (CoPE): GRPO plus a loss by which the same model forecasts, from
    every history of its successful on-policy episodes, the next K+1 actions it went on to take.

    Example:
    ```python
    from cope_trl import CoPEConfig, CoPETrainer, load_tasks

    trainer = CoPETrainer(
        model="Qwen/Qwen2.5-7B-Instruct",
        args=CoPEConfig(output_dir="out"),
        train_dataset=load_tasks("scienceworld", split="train"),
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or `PeftModel`):
            The policy, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Rewards instead of the terminal success reward. They also receive `success`, `score`, `truncated`, `failed`
            and `num_turns`, one value an episode. What is forecast still depends on the environment's own success.
        args ([`CoPEConfig`], *optional*):
            Configuration.
        train_dataset, eval_dataset:
            Task datasets with the columns `prompt`, `environment` and `task_id` (see [`load_tasks`]), or whatever the
            arguments below need.
        tools, rollout_func, environment_factory:
            As for [`~trl.GRPOTrainer`]: TRL rolls out, and forecasting reads the turns off its token mask.
        environments (`dict[str, Callable[[], gymnasium.Env]]`, *optional*):
            Factories for values of the `environment` column; they come before the registry's names.
        success_fn (`Callable[..., bool]`, *optional*):
            Where TRL rolls out: which episodes are a success, from `row`, `completion`, `environment`, `rewards`.
            Without it, the environment's attribute `success`, else total reward ≥ `args.success_threshold`.
        processing_class, reward_processing_classes, callbacks, optimizers, quantization_config, peft_config:
            As for [`~trl.GRPOTrainer`].
    """

    _tag_names = ["trl", "grpo", "cope"]  # noqa: RUF012
    _name = "CoPE"
    _paper = COPE

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._set_up_forecasting(self.args)

    def _set_up_forecasting(self, args: CoPEConfig) -> None:
        self.forecast_coef = args.forecast_coef if self.chat is not None else 0.0
        self._pending: tuple[ForecastRows, torch.Tensor, torch.Tensor | None] | None = None
        self._scores: Scores | None = None
        self._step_inputs: list[tuple[dict[str, Any], ForecastRows]] = []
        self._ratio = GradientRatio()
        self._policy_norm = 0.0
        self.forecast_engine = "none"
        if not self.forecast_coef:
            return
        if self._is_vlm:
            raise ConfigError(
                f"`forecast_coef` is {self.forecast_coef}, but {type(self._base_model).__name__} takes images, which "
                "branches do not carry. Use its text-only model class, or `forecast_coef=0`."
            )
        traits = scoring_traits(self._base_model, self.aux_loss_enabled)
        self.forecast_engine, reason = choose_engine(args.forecast_engine, traits, self._longest, self.temperature)
        logger.info("Forecasting engine: %s (%s).", self.forecast_engine, reason)
        base, fp32 = self._base_model, args.cast_lm_head_to_fp32
        policy_forward = base.forward
        # Forecasts are maximum likelihood at temperature 1, whatever temperature the rollouts are sampled at.
        add_fused_lm_head(base, 1.0, fp32, outputs=_SCORED)
        self._forecast_forward = base.forward
        base.forward = policy_forward
        if self.forecast_engine == "shared_prefix":
            use_branched_attention(base)
            add_fused_lm_head(base, self.temperature, fp32, outputs=_SCORED)
        if args.forecast_update == "separate":
            if self.is_deepspeed_enabled:
                raise ConfigError(
                    "`forecast_update` is 'separate', but DeepSpeed counts every backward pass as a micro-batch of "
                    'its own optimizer step. Use `forecast_update="joint"`.'
                )
            self.add_callback(_ForecastStep(self))

    # ---------------------------------------------------------------- what is forecast

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if self.forecast_coef and self.chat:
            output.update(self._forecast_buffer(self.chat))
        return output

    def _forecast_buffer(self, chat: ChatFormat) -> dict[str, torch.Tensor]:
        args, means, played = self.args, self._means[self._mode], self.trajectories
        success, failed = self._gathered("success"), self._gathered("failed")
        weighting = (args.forecast_gate, args.forecast_group_norm, args.forecast_task_weight)
        weights = trajectory_weights(success, failed, self._group_size, *weighting)
        first = self.accelerator.process_index * len(played)
        local = weights[first : first + len(played)].tolist()
        if self.mask_truncated_completions:  # their tokens are hidden from attention, so nothing can branch off them
            ended = [not e.truncated and e.completion_ids[-1] in self.eos_token_ids for e in played]
            local = [weight * end for weight, end in zip(local, ended, strict=True)]
        settings = BranchSettings(args.forecast_horizon, args.forecast_skip_invalid, args.forecast_max_windows)
        rng = random.Random(f"{args.seed}-{self.state.global_step}-{self.accelerator.process_index}")
        branches = build_branches(played, local, chat, settings, rng)
        rows = pack_rows(branches, local, args.forecast_reduction, self.accelerator.device)
        means.add_groups(success, self._gathered("refusal"), self._group_size)
        processes = self.accelerator.num_processes  # the mean over ranks of `processes × local` is the total
        history = sum(cut for row in branches for cut, _ in row)
        means.add_branches(branch for row in branches for _, branch in row)
        shared = self.forecast_engine == "shared_prefix"
        means.add("forecast/windows", processes * sum(map(len, branches)))
        means.add("tokens/policy", processes * sum(len(episode.ids) for episode in played))
        means.add("tokens/forecast", processes * (rows.tokens + (0 if shared else history)))
        means.add("tokens/saved", processes * (history if shared else 0))
        return rows.to_buffer()

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        rows = ForecastRows.from_buffer(inputs) if self.forecast_coef else None
        if rows is None:
            return super()._compute_loss(model, inputs)
        if self.args.forecast_update == "separate" and self.model.training:
            self._step_inputs.append((inputs, rows))
            return super()._compute_loss(model, inputs)
        shared = self.forecast_engine == "shared_prefix"
        self._scores, self._pending = None, None
        if shared:
            sampled = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # what TRL's loss does not mask away
            self._pending = rows, sampled.bool(), inputs.get("old_per_token_logps")
        loss = super()._compute_loss(model, inputs)
        if not shared:
            self._scores = self._score_alone(model, inputs, rows)
        if self._scores is None:
            self._means[self._mode].add("forecast/loss", 0.0)
            return loss
        return loss + self.forecast_coef * self._forecast_term(self._scores, len(inputs["prompt_ids"]))

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Any:
        pending, self._pending = self._pending, None
        if pending is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        rows, sampled, old_log_probs = pending
        forward = self._scored_forward(model, self.temperature)
        with self.accelerator.autocast():
            output, batch, scores = self._shared(forward, input_ids, attention_mask, rows, sampled)
        self._scores = scores if rows.tokens else None
        log_probs = batch.completion_slice(output.log_probs, logits_to_keep)
        if old_log_probs is not None:  # ratios of 1, or those of tokens that do not count could overflow
            log_probs = torch.where(sampled, log_probs, old_log_probs)
        entropy = batch.completion_slice(output.entropy, logits_to_keep) if kwargs.get("compute_entropy") else None
        return log_probs, entropy, None

    def _scored_forward(self, model: Any, temperature: float = 1.0) -> ScoredForward:
        return ScoredForward(partial(model, fused_lm_head=True), self._base_model.base_model, temperature)

    def _shared(self, forward: ScoredForward, ids: Any, mask: Any, rows: ForecastRows, sampled: Any) -> Any:
        attention = self._base_model.config.get_text_config()._attn_implementation
        return score_shared(forward, ids, mask, rows, sampled, attention)

    def _score_alone(self, model: Any, inputs: Mapping[str, Any], rows: ForecastRows) -> Scores:
        """Score the branches in forwards of their own, at temperature 1."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
        forward = self._scored_forward(model)
        with self._forecast_head(), self.accelerator.autocast():
            if self.forecast_engine == "shared_prefix":
                some = (rows.window >= 0).any(dim=1) if rows.tokens else torch.arange(len(ids)) == 0
                return self._shared(forward, ids[some], mask[some], rows.select(some), None)[2]
            size = self.args.forecast_batch_size or self.args.per_device_train_batch_size
            forwards = self._max_over_ranks(-(-count_windows(rows) // size))
            return score_separate(forward, ids, mask, rows, self._tokenizer.pad_token_id, size, forwards)

    @contextmanager
    def _forecast_head(self) -> Iterator[None]:
        base = self._base_model
        policy_forward, base.forward = base.forward, self._forecast_forward
        try:
            yield
        finally:
            base.forward = policy_forward

    # ---------------------------------------------------------------- the loss and its scale

    def _forecast_term(self, scores: Scores, rows_in_batch: int) -> torch.Tensor:
        """L_AF's share of this micro-batch, noted in the metrics."""
        training = self.model.training
        accumulation = self.current_gradient_accumulation_steps if training else 1
        means = self._means[self._mode]
        forecast = scores.loss(task_scale(self._group_size, rows_in_batch, accumulation))
        means.add("forecast/loss", float(forecast.detach()) * accumulation)
        means.add_offsets(scores.stats(self.args.forecast_horizon))
        if training and self._measures_ratio and forecast.requires_grad:
            self._ratio.add(self.forecast_coef * forecast, self.model.parameters())
        return forecast

    @property
    def _measures_ratio(self) -> bool:
        """Whether this optimizer step measures the ratio of the gradients. Sharded gradients cannot be compared."""
        every = self.args.forecast_grad_norm_steps
        reentrant = (self.args.gradient_checkpointing_kwargs or {}).get("use_reentrant", False)
        plain = not (self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.fp16 or reentrant)
        joint_and_clipped = self.args.forecast_update == "joint" and self.args.max_grad_norm > 0
        return bool(every) and plain and joint_and_clipped and self.state.global_step % every == 0

    def _clip_grad_norm(self, model: Any) -> Any:
        if self.forecast_coef and self._measures_ratio and self._any_rank(self._ratio.pending):
            ratio = self._ratio.measure(model.parameters(), self._mean_over_ranks)
            self._note_ratio(ratio)
        norm = super()._clip_grad_norm(model)
        self._policy_norm = float(norm)
        return norm

    def _note_ratio(self, ratio: float | None) -> None:
        if ratio is None:
            return
        self._means["train"].add("forecast/grad_ratio", ratio)
        if self._ratio.stays_high(ratio):
            logger.warning(
                "The forecasting gradient has stayed above %.1f of the policy's (now %.2f); forecasting is steering "
                "the update. Lower `forecast_coef` (now %g).",
                self._ratio.threshold,
                ratio,
                self.forecast_coef,
            )

    # ---------------------------------------------------------------- a step of its own

    def _forecast_step(self) -> None:
        """Optimizer step on the forecasting loss alone, over the micro-batches of the policy's step before it."""
        batches, self._step_inputs = self._step_inputs, []
        started, model = time.perf_counter(), self.model_wrapped
        if not self._any_rank(any(rows.tokens for _, rows in batches)):
            return  # no success: with zero gradients Adam would still move the weights
        for inputs, rows in batches:
            if rows.tokens or self.accelerator.num_processes > 1:
                scores = self._score_alone(model, inputs, rows)
                self.accelerator.backward(self.forecast_coef * self._forecast_term(scores, len(inputs["prompt_ids"])))
        norm = self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm or float("inf"))
        if self._policy_norm > 0:
            self._note_ratio(float(norm) / self._policy_norm)
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self.args.forecast_lr_scale
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        model.zero_grad()
        self._means["train"].add("time/forecast_step", time.perf_counter() - started)


class _ForecastStep(TrainerCallback):
    """Runs the separate forecasting step right after the policy's optimizer step."""

    def __init__(self, trainer: CoPETrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._trainer._forecast_step()
