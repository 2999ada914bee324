"""[`CompletionTrainer`]: GRPO whose completions TRL rolls out itself, read as episodes.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from trl.chat_template_utils import supports_tool_calling

from cope_trl.base_trainer import BaseTrainer
from cope_trl.chat import ChatFormat
from cope_trl.cope_config import CoPEConfig
from cope_trl.errors import ConfigError, TemplateError
from cope_trl.rollout.success import SuccessRule
from cope_trl.rollout.token_mask import Completion, TurnReader, Verdict, holds_several_turns
from cope_trl.types import TaskRef

logger = logging.getLogger(__name__)


def check_tool_template(processing_class: Any, argument: str) -> None:
    """Raise [`TemplateError`] unless the chat template renders tool calls and their results."""
    if processing_class is not None and not supports_tool_calling(processing_class):
        name = getattr(processing_class, "name_or_path", type(processing_class).__name__)
        raise TemplateError(
            f"`{argument}` is given, but the chat template of {name!r} renders no tool calls or no tool "
            "results. Use a model whose template does (Qwen2.5, Qwen3, Llama 3.1), or set another with "
            "`trl.clone_chat_template`."
        )


class CompletionTrainer(BaseTrainer):
    """
    [`~trl.GRPOTrainer`] that keeps what TRL's own rollouts produced as [`Trajectory`] objects.

    Covers single turns, `tools`, `environment_factory` and `rollout_func` with an `env_mask`.
    """

    chat: ChatFormat | None
    _in_tool_loop = False  # also where this package plays the episodes

    def _set_up_completions(self, args: CoPEConfig, success_fn: Callable[..., bool] | None) -> None:
        self._success_rule = SuccessRule(success_fn, args.success_threshold)
        self._batch: tuple[Any, ...] = ()
        self._warned = False
        try:
            self.chat = ChatFormat(self._tokenizer, self.chat_template, self.chat_template_kwargs)
        except TemplateError as error:
            self.chat = None
            if args.forecast_coef:
                logger.warning("Forecasting is off, this is plain GRPO: %s", error)
        self._reader = TurnReader(self._decode, self.eos_token_ids, self.chat)
        if args.forecast_coef and self.chat and not self.tools and self.rollout_func is None:
            logger.warning(
                "Every episode is a single turn: forecasting has nothing to look ahead to. Each success gives one "
                "window with the reply itself (K=0), whatever `forecast_horizon` says."
            )

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    @property
    def _reads_completions(self) -> bool:
        """Whether TRL rolls out and its completions are read, rather than this package playing the episodes."""
        return hasattr(self, "_reader")

    # ---------------------------------------------------------------- TRL's rollout

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        if not self._reads_completions:
            return super()._generate(prompts)
        with self.spans("rollout"):
            self._batch = super()._generate(prompts)
        self._check_masks(*self._batch[:3])
        return self._batch

    def _check_masks(self, prompt_ids: Any, completion_ids: Any, mask: Any) -> None:
        if self.rollout_func is None:
            return
        for row, ids in enumerate(completion_ids):
            if mask is not None and len(mask[row]) != len(ids):
                raise ConfigError(
                    f"`rollout_func` returned an `env_mask` of {len(mask[row])} tokens for completion {row}, which "
                    f"has {len(ids)}; it needs one value a token: 1 where the model sampled it, 0 elsewhere."
                )
            prompt = self.chat.generation_prompt_ids if self.chat else ()
            if mask is None and self.chat and holds_several_turns(ids, self.eos_token_ids, prompt):
                raise ConfigError(
                    f"`rollout_func` returned no `env_mask`, but completion {row} goes on to another turn after its "
                    "first, so the environment's tokens would be trained as if the model had sampled them. Return "
                    "`env_mask` too: 1 where the model sampled the token, 0 elsewhere."
                )

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        # Where sampling is collective (ZeRO-3, FSDP, a vLLM server), ranks must sample equally often, but an episode
        # has as many turns as it has. A rank that is done samples a placeholder until every rank is.
        self._in_tool_loop = self.accelerator.num_processes > 1
        try:
            output = super()._tool_call_loop(*args, **kwargs)
            while self._in_tool_loop and self._any_rank(False):
                self._in_tool_loop = False
                self._generate_single_turn([[self.eos_token_ids[0]]], None, {}, 1)
                self._in_tool_loop = True
        finally:
            self._in_tool_loop = False
        return output

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if self._in_tool_loop:
            self._any_rank(True)
        return super()._generate_single_turn(*args, **kwargs)

    # ---------------------------------------------------------------- completions → trajectories

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._reads_completions:
            first = self.accelerator.process_index * len(inputs)
            local = rewards[first : first + len(inputs)].cpu()
            self._read_batch(inputs, completions, local)
        return rewards

    def _read_batch(self, inputs: Sequence[Mapping[str, Any]], completions: Any, rewards: torch.Tensor) -> None:
        """Trajectories of this process's rows, from what TRL generated and how it was scored."""
        prompt_ids, completion_ids, mask, _, logprobs = self._batch[:5]
        environments = self.environments or [None] * len(inputs)
        played = []
        for i, (row, values) in enumerate(zip(inputs, rewards.tolist(), strict=True)):
            completion = Completion(
                task=_task(row, environments[i]),
                prompt_ids=prompt_ids[i],
                ids=completion_ids[i],
                mask=None if mask is None else mask[i],
                logprobs=None if logprobs is None else logprobs[i],
                messages=completions[i],
                runs_tools=bool(self.tools),
            )
            verdict = self._verdict(row, completions[i], environments[i], values)
            played.append(self._reader.read(completion, verdict))
        self._batch = ()
        self._keep_episodes(played)
        if self.args.forecast_coef and self.chat and self._reader.unread and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d turns do not follow this chat template's generation prompt, so that nothing can be forecast "
                "from them. Use conversational prompts (lists of messages).",
                self._reader.unread,
                self._reader.turns,
            )

    def _verdict(self, row: Mapping[str, Any], completion: Any, environment: Any, values: Sequence[float]) -> Verdict:
        named = {
            name: None if math.isnan(value) else value
            for name, value in zip(self.reward_func_names, values, strict=True)
        }
        if all(value is None for value in named.values()):
            return Verdict(False, 0.0, failed=True)
        weighted = zip(values, self.reward_weights.tolist(), strict=True)
        total = sum(value * weight for value, weight in weighted if not math.isnan(value))
        return Verdict(self._success_rule(row, completion, environment, named, total), total)


def _task(row: Mapping[str, Any], environment: Any) -> TaskRef:
    name = row.get("environment") or (type(environment).__name__ if environment is not None else "")
    return TaskRef(str(name), str(row.get("task_id", "")), str(row.get("family") or ""))
