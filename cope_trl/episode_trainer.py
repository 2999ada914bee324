"""[`EpisodeTrainer`]: GRPO on multi-turn episodes in real environments, without forecasting.

Like the other `*_trainer.py` files this one touches TRL internals; `tests/test_trl_seam.py` pins every name they
rely on.
"""

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium
import torch
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import GRPOTrainer

from cope_trl.chat import ChatFormat
from cope_trl.completion_trainer import CompletionTrainer, check_tool_template
from cope_trl.cope_config import CoPEConfig
from cope_trl.data.tasks import check_dataset
from cope_trl.drivers import OWN, find_driver
from cope_trl.environments import EnvironmentTable
from cope_trl.errors import ConfigError
from cope_trl.evaluation.episodes import play_dataset
from cope_trl.rollout.episodes import EpisodePlayer
from cope_trl.rollout.generation import Policy, TurnEngine
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.types import TaskRef, Trajectory

logger = logging.getLogger(__name__)


def success_reward(success: Sequence[bool], failed: Sequence[bool], **_: Any) -> list[float | None]:
    """Terminal reward of the paper (B.3): 1.0 on success, 0.0 otherwise, `None` where the environment broke."""
    return [None if broke else float(won) for won, broke in zip(success, failed, strict=True)]


class EpisodeTrainer(CompletionTrainer):
    """
    [`~trl.GRPOTrainer`] whose completions are episodes: policy turns with environment turns between them.

    The rows of the dataset say what to play (columns `environment` and `task_id`). Environment tokens are masked from
    the loss, failed episodes carry no signal, and every episode is counted in the metrics and kept on disk. With
    `tools`, `environment_factory`, `rollout_func` or rows that name no environment, TRL rolls out and the episodes are
    read off its completions. Arguments as for [`CoPETrainer`].
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any = None,
        args: CoPEConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Dataset | IterableDataset] | None = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., dict[str, Any]] | None = None,
        environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
        *,
        environments: Mapping[str, Callable[[], gymnasium.Env]] | None = None,
        success_fn: Callable[..., bool] | None = None,
    ) -> None:
        args = _checked_config(args, model, peft_config)
        loops = {"tools": tools, "rollout_func": rollout_func, "environment_factory": environment_factory}
        driver = find_driver(loops, environments, train_dataset, reward_funcs, success_fn)
        # Everything a user can get wrong is checked before a model is loaded.
        self._table = EnvironmentTable(environments)
        if driver == OWN:
            for argument, dataset in _named_datasets(train_dataset, eval_dataset):
                check_dataset(dataset, argument)
                self._table.check(dataset)
            processing_class = self._prepared_tokenizer(processing_class, model, args)
            loops["rollout_func"] = self._rollout
            reward_funcs = success_reward if reward_funcs is None else reward_funcs
        elif driver in ("tools", "environment_factory"):
            check_tool_template(processing_class, driver)
        with warnings.catch_warnings():
            if driver == OWN:
                warnings.filterwarnings("ignore", message=".*rollout_func.*")
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=reward_processing_classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                **loops,
            )
        self._set_up_run(args)
        if driver != OWN:
            self._set_up_completions(args, success_fn)
        self._set_up_episodes(args)

    # ---------------------------------------------------------------- set-up

    def _prepared_tokenizer(self, processing_class: Any, model: Any, args: CoPEConfig) -> Any:
        """The tokenizer, with a chat template that leaves earlier turns as they are."""
        if processing_class is None:
            processing_class = AutoTokenizer.from_pretrained(
                model if isinstance(model, str) else model.config._name_or_path,
                padding_side="left",
                truncation_side="left",
                trust_remote_code=args.trust_remote_code,
            )
        self.chat = ChatFormat(processing_class, template_kwargs=args.chat_template_kwargs)
        if self.chat.replaced:
            logger.warning("The chat template rewrites earlier turns; TRL's training variant of it is used and saved.")
            processing_class.chat_template = self.chat.chat_template
        return processing_class

    def _stop_at_end_of_turn(self, end_of_turn_id: int) -> None:
        missing = end_of_turn_id not in self.eos_token_ids
        if missing:
            self.eos_token_ids: list[int] = [*self.eos_token_ids, end_of_turn_id]
        if self.use_vllm:
            self._stop_engine_at(self.eos_token_ids)
        elif missing:
            self.generation_config.eos_token_id = self.eos_token_ids
            self.generation_kwargs["eos_token_id"] = self.eos_token_ids

    def _set_up_episodes(self, args: CoPEConfig) -> None:
        if self.chat is not None and not self._reads_completions:
            self._stop_at_end_of_turn(self.chat.end_of_turn_id)
        self.pool = EnvironmentPool(self._table.make, timeout=args.environment_timeout)
        self._finalizer = weakref.finalize(self, self.pool.close)
        self._set_limits()
        # Longest trajectory there can be, in tokens, or `None` when nothing bounds it.
        asked = args.max_prompt_length and args.max_prompt_length + args.max_completion_length
        self._longest = min((bound for bound in (self._context, asked) if bound), default=None)
        self._set_up_sampling(args, self._longest)
        self._rows: list[dict[str, Any]] = []

    def _set_limits(self) -> None:
        self.limits = {
            mode: self._table.limits(self.args, mode == "eval", self._context) for mode in ("train", "eval")
        }

    def close(self) -> None:
        """Close all environments. Also done when the trainer is collected or the interpreter ends."""
        self._finalizer()

    # ---------------------------------------------------------------- episodes

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._rows = inputs  # a rollout function is handed the prompts only
        return super()._generate_and_score_completions(inputs)

    def _rollout(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        tasks = [TaskRef(row["environment"], str(row["task_id"]), row.get("family") or "") for row in self._rows]
        if self._table.learn(task.environment for task in tasks):  # only a stream's are new here
            self._set_limits()
        first = self.accelerator.process_index * len(tasks)
        # One seed a group: its members differ in what the policy samples, not in the world they start from.
        seeds = [
            (self.args.seed * 1_000_003 + self.state.global_step * 10_007 + (first + i) // self._group_size) % 2**31
            for i in range(len(tasks))
        ]
        limit = min(len(tasks), self.args.max_concurrent_episodes or len(tasks))
        with self.spans("rollout"), self._sampling(limit) as policy:
            player = self._player(policy, limit)
            played = player.play(tasks, prompts, self.limits[self._mode], seeds, self._sampling_seeds(tasks))
        self._keep_episodes(played)
        return {
            "prompt_ids": [list(episode.prompt_ids) for episode in played],
            "completion_ids": [list(episode.completion_ids) for episode in played],
            # A failed episode carries no learning signal: none of its tokens is trained.
            "env_mask": [[0] * len(e.completion_mask) if e.failed else list(e.completion_mask) for e in played],
            "logprobs": None if any(e.logprobs is None for e in played) else [list(e.logprobs or ()) for e in played],
            "success": [episode.success for episode in played],
            "score": [episode.score for episode in played],
            "truncated": [episode.truncated for episode in played],
            "failed": [episode.failed for episode in played],
            "num_turns": [len(episode.turns) for episode in played],
        }

    def evaluate_tasks(
        self, dataset: Dataset, on_finished: Callable[[list[Trajectory]], None] = lambda _: None
    ) -> list[Trajectory]:
        """Play every task of a dataset once with the evaluation limits, sampling as in training; nothing is recorded.

        Args:
            dataset: tasks, as for training.
            on_finished: called with the episodes of this process that have just ended.

        Returns:
            Trajectories in the order of the rows, on every process.
        """
        self._table.check(dataset)
        self.limits["eval"] = self._table.limits(self.args, True, self._context)
        training, rank, size = self.model.training, self.accelerator.process_index, self.accelerator.num_processes
        self.model.eval()
        try:
            # Ranks share the rows evenly, so that collective calls stay in step; surplus episodes are dropped.
            share = -(-len(dataset) // size)
            numbers = [min(rank * share + i, len(dataset) - 1) for i in range(share)]
            limit = min(self.args.eval_batch_size, self.args.max_concurrent_episodes or share, share)
            with self._whole_weights(), self._sampling(limit) as policy:
                player = self._player(policy, limit)
                seed = f"{self.args.seed}-eval-{self.state.global_step}"
                played = play_dataset(player, dataset.select(numbers), self.limits["eval"], seed, numbers, on_finished)
        finally:
            self.model.train(training)
        return gather_object(played)[: len(dataset)] if size > 1 else played

    def _player(self, policy: Policy | TurnEngine, max_concurrent: int) -> EpisodePlayer:
        if self.chat is None:
            raise ConfigError(
                "`processing_class` has no usable chat template, so no episode can be played; use an instruct model."
            )
        return EpisodePlayer(
            self.pool, policy, self.chat, self.eos_token_ids, self._any_rank, max_concurrent, self.spans
        )

    def _sampling_seeds(self, tasks: Sequence[TaskRef]) -> list[str]:
        """What decides the tokens of each episode: the run's seed, the batch, and the place in it over all ranks."""
        first = self.accelerator.process_index * len(tasks)
        batch = f"{self.args.seed}-{self._mode}-{self.state.global_step}-{self._step}"
        return [f"{batch}-{first + i}-{task.environment}-{task.task_id}" for i, task in enumerate(tasks)]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # Whatever the reward functions say, a failed episode has no reward and no part in its group's baseline.
        return rewards.masked_fill(self._gathered("failed").unsqueeze(1), torch.nan)


def _checked_config(args: Any, model: Any, peft_config: Any) -> CoPEConfig:
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        args = CoPEConfig(f"{name.split('/')[-1] or 'model'}-CoPE")
    if not isinstance(args, CoPEConfig):
        raise ConfigError(f"`args` is a {type(args).__name__}; use `CoPEConfig`, which takes the same arguments.")
    unsaved = not isinstance(model, str) and not model.config._name_or_path
    if args.beta and unsaved and peft_config is None and not hasattr(model, "peft_config"):
        raise ConfigError(
            f"`beta` is {args.beta}, which needs a second copy of the model as reference, but the model was not "
            "loaded from anywhere. Save it and pass the path, or set `beta=0`."
        )
    return args


def _named_datasets(train: Any, evaluation: Any) -> Iterator[tuple[str, Any]]:
    if train is not None:
        yield "train_dataset", train
    if isinstance(evaluation, dict):
        yield from ((f"eval_dataset[{name!r}]", dataset) for name, dataset in evaluation.items())
    elif evaluation is not None:
        yield "eval_dataset", evaluation
