"""[`EngineTrainer`]: engines asked turn by turn, where TRL asks them once a batch: vLLM, and weights in shards.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from accelerate.utils import gather_object
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from cope_trl.errors import RolloutError
from cope_trl.rollout.endpoint import EndpointPolicy
from cope_trl.rollout.endpoint_engine import EndpointEngine
from cope_trl.rollout.generation import TurnEngine
from cope_trl.rollout.shared import SharedEngine
from cope_trl.rollout.vllm_engine import VLLMEngine
from cope_trl.spans import Spans

# Of what `generation_kwargs` may hold for vLLM: a turn has a limit of its own, and is one sequence of free text.
_WHOLE_BATCH = frozenset(("n", "max_tokens", "min_tokens", "structured_outputs"))
# Names every machine has for itself.
_LOOPBACK = frozenset(("localhost", "127.0.0.1", "0.0.0.0", "::1"))


class EngineTrainer(GRPOTrainer):
    """
    [`~trl.GRPOTrainer`] that asks vLLM for single turns, whose ranks may sample unequal numbers of prompts on one
    vLLM engine, and that gathers the shards of DeepSpeed ZeRO-3 once a rollout.

    The second applies to a vLLM server and to a colocated engine with tensor parallelism, where turns are sampled in
    lock step.
    """

    spans: Spans

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

    # ---------------------------------------------------------------- turns of episodes at their own pace

    def _why_vllm_in_lock_step(self, args: Any) -> str | None:
        """Why vLLM cannot be asked for single turns. Collective: ranks get the same answer."""
        if self.vllm_mode == "colocate" and args.vllm_tensor_parallel_size > 1:
            return f"`vllm_tensor_parallel_size` is {args.vllm_tensor_parallel_size}, so ranks sample together"
        if self.vllm_mode == "colocate" and args.vllm_enable_sleep_mode:
            return "`vllm_enable_sleep_mode` puts vLLM to sleep after every call"
        if args.vllm_structured_outputs_regex is not None:
            return "`vllm_structured_outputs_regex` is set, which is for TRL's own calls"
        batch = sorted(_WHOLE_BATCH.intersection(self.vllm_generation.generation_kwargs))
        if batch:
            return f"`generation_kwargs` holds {batch}, which is for TRL's own calls"
        if self.vllm_mode == "server" and not self._all_reach_the_server():
            return f"the vLLM server at {self._server} is within reach of the main process only"
        return None

    @property
    def _server(self) -> str:
        """Address of the vLLM server."""
        engine = self.vllm_generation
        return (engine.server_base_url or f"http://{engine.server_host}:{engine.server_port}").rstrip("/")

    def _endpoint(self, **options: Any) -> EndpointPolicy:
        return EndpointPolicy(f"{self._server}/v1", self.eos_token_ids, sampling=self._vllm_sampling(), **options)

    def _all_reach_the_server(self) -> bool:
        """Whether every process can ask the server that the main process sends the weights to."""
        try:
            self._endpoint(attempts=2, timeout=30.0)
        except RolloutError:
            reached = False
        else:
            reached = True
        if self.accelerator.num_processes == 1:
            return reached
        nodes, answers = zip(*gather_object([(platform.node(), reached)]), strict=True)
        another = len(set(nodes)) > 1 and urlsplit(self._server).hostname in _LOOPBACK
        return all(answers) and not another

    def _vllm_sampling(self) -> dict[str, Any]:
        """How vLLM samples, in the arguments that TRL hands over but for the limit."""
        engine = self.vllm_generation
        return {
            "n": 1,
            "repetition_penalty": engine.repetition_penalty,
            "temperature": engine.temperature,
            "top_p": engine.top_p,
            "top_k": engine.top_k,
            "min_p": 0.0 if engine.min_p is None else engine.min_p,
            "logprobs": engine.logprobs,
            **engine.generation_kwargs,
        }

    def _vllm_engine(self, episodes: int) -> TurnEngine:
        """vLLM with the weights of this step, for so many episodes at a time. Collective."""
        if self.state.global_step != self._last_loaded_step:
            self.vllm_generation.sync_weights()
            self._last_loaded_step: int = self.state.global_step
        if self.vllm_mode == "colocate":
            return VLLMEngine(self.vllm_generation.llm, self._vllm_sampling(), self.spans)
        self.accelerator.wait_for_everyone()  # only the main process knows when the server has the weights
        return EndpointEngine(self._endpoint(connections=episodes))

    # ---------------------------------------------------------------- turns of all ranks together

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

    # ---------------------------------------------------------------- weights in shards

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
