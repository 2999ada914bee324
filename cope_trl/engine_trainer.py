"""[`EngineTrainer`]: engines asked turn by turn, where TRL asks them once a batch: vLLM, and weights in shards.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from cope_trl.rollout.shared import SharedEngine


class EngineTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] whose ranks may sample unequal numbers of prompts on one vLLM engine, and that gathers the
    shards of DeepSpeed ZeRO-3 once a rollout.

    The first applies to a vLLM server and to a colocated engine with tensor parallelism; everything else samples as
    TRL does.
    """

    def _set_up_engine(self, args: Any) -> None:
        own = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        # Longest sequence the engine takes, in tokens. A server's is known only if `vllm_max_model_length` says it.
        length = args.vllm_max_model_length if self.use_vllm else None
        if self.use_vllm and self.vllm_mode == "colocate":
            length = self.vllm_generation.llm.llm_engine.model_config.max_model_len
        self._context: int | None = min((bound for bound in (own, length) if bound), default=None)
        self._engine: SharedEngine | None = None
        if self.use_vllm and self.vllm_mode == "server":
            self._engine = SharedEngine(self._context, alone=self.accelerator.num_processes == 1)
        elif self.use_vllm and self.vllm_generation.tensor_parallel_size > 1:
            self._engine = SharedEngine(group=self.vllm_generation.tp_group)

    def _stop_engine_at(self, token_ids: Sequence[int]) -> None:
        """Have vLLM end a turn at these ids. Of its own it knows only those in the folder the model came from."""
        engine = self.vllm_generation
        engine.generation_kwargs = {"stop_token_ids": list(token_ids), **engine.generation_kwargs}

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        sample = super()._generate_single_turn
        # With several generations a prompt it is the start of a batch, of which every rank has as many prompts.
        if self._engine is None or self._is_vlm or num_generations > 1:
            return sample(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        holder = self.vllm_generation
        asked = holder.max_completion_length

        def together(prompts: list[list[int]], limit: int) -> Any:
            holder.max_completion_length = limit
            return sample(prompts, None, {}, 1, *args, **kwargs)

        try:
            return self._engine.sample(together, prompt_ids, asked)
        finally:
            holder.max_completion_length = asked

    def _generate(self, prompts: list[Any]) -> Any:
        with self._whole_weights():
            return super()._generate(prompts)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        """Hold ZeRO-3's weights whole for all turns of a rollout; TRL alone gathers them at every turn."""
        if not (self._dist.is_zero3 and self.args.ds3_gather_for_generation) or self.use_vllm:
            yield
            return
        kwargs = self.args.gradient_checkpointing_kwargs
        with unwrap_model_for_generation(self.model_wrapped, self.accelerator, gradient_checkpointing_kwargs=kwargs):
            # DeepSpeed refuses to gather twice, so the calls inside are told to leave the weights as they are.
            self.args.ds3_gather_for_generation = False
            try:
                yield
            finally:
                self.args.ds3_gather_for_generation = True
