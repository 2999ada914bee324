"""[`SamplingTrainer`]: what samples the turns of a rollout, each when it is ready where the engine can do that.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl.models import unwrap_model_for_generation

from cope_trl.engine_trainer import EngineTrainer
from cope_trl.rollout.cache_support import cache_obstacle, masked_attention
from cope_trl.rollout.cached import CachedEngine
from cope_trl.rollout.generation import Generation, Policy, TurnEngine
from cope_trl.rollout.sampling import RowSampler

logger = logging.getLogger(__name__)

# What `RowSampler` and the limits of a turn cover of `generate`'s arguments, as TRL fills them in.
_COVERED = frozenset(("max_new_tokens", "do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"))


class SamplingTrainer(EngineTrainer):
    """
    [`~trl.GRPOTrainer`] that samples with a cache kept from turn to turn wherever the model and its sharding allow it.

    Attributes:
        lock_step_reason: why episodes advance in lock step, or `None` where each goes at its own pace.
    """

    def _set_up_sampling(self, args: Any, longest: int | None) -> None:
        self.lock_step_reason = self._why_lock_step(args, longest)
        if self.lock_step_reason is None:
            logger.info("Rollouts: every episode at its own pace, its cache kept from turn to turn.")
        else:
            logger.info("Rollouts: all episodes in lock step, because %s.", self.lock_step_reason)

    def _why_lock_step(self, args: Any, longest: int | None) -> str | None:
        if args.rollout_schedule == "lock_step":
            return "`rollout_schedule` asks for it"
        if getattr(self._sample_turn, "__func__", None) is not SamplingTrainer._sample_turn:
            return "`_sample_turn` is overridden"
        if self.use_vllm:
            return self._why_vllm_in_lock_step(args)
        if self.use_transformers_continuous_batching:
            return "`use_transformers_continuous_batching` samples a batch of turns at a time"
        if self._is_vlm:
            return "the model takes images, whose tokens only `generate` keeps from being sampled"
        if self.is_fsdp_enabled:
            return "FSDP gathers weights in calls that all ranks make together"
        if self._dist.is_zero3 and not args.ds3_gather_for_generation:
            return "`ds3_gather_for_generation` is False, so ZeRO-3 gathers weights in calls all ranks make together"
        unknown = sorted(set(args.generation_kwargs or ()) - _COVERED)
        if unknown:
            return f"`generation_kwargs` holds {unknown}, which only `generate` knows"
        if self.generation_config.repetition_penalty not in (None, 1.0):
            return f"`repetition_penalty` is {self.generation_config.repetition_penalty}, which only `generate` knows"
        return cache_obstacle(self._base_or_adapted_model, longest)

    @property
    def _base_or_adapted_model(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    @contextmanager
    def _sampling(self, episodes: int) -> Iterator[Policy | TurnEngine]:
        """What samples the turns of a rollout of at most so many episodes at a time."""
        if self.lock_step_reason is not None:
            yield self._sample_turn
            return
        if self.use_vllm:
            yield self._vllm_engine(episodes)
            return
        config = self.generation_config
        temperature = config.temperature if config.do_sample else 0.0
        sampler = RowSampler(temperature, config.top_p, config.top_k, config.min_p)
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            masked_attention(model),
        ):
            yield CachedEngine(model, self.eos_token_ids, sampler, episodes, spans=self.spans)

    def _sample_turn(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        """Sample one turn with whatever engine TRL is set up with; its own limit is that of a whole completion."""
        holder, name = (
            (self.vllm_generation, "max_completion_length")
            if self.use_vllm
            else (self.generation_config, "max_new_tokens")
        )
        limit = getattr(holder, name)
        setattr(holder, name, max_new_tokens)
        try:
            ids, logprobs = self._generate_single_turn([list(prompt) for prompt in prompts], None, {}, 1)
        finally:
            setattr(holder, name, limit)
        return [Generation(list(row), None if logprobs is None else logprobs[i]) for i, row in enumerate(ids)]
