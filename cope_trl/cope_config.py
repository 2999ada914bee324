"""[`CoPEConfig`]: `GRPOConfig` plus what forecasting and episodes need. Only new fields and changed defaults."""

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.trainer_utils import SchedulerType
from trl import GRPOConfig

from cope_trl.errors import ConfigError

_CHOICES: dict[str, tuple[str, ...]] = {
    "forecast_gate": ("success", "mixed", "all"),
    "forecast_task_weight": ("uniform", "failure_rate"),
    "forecast_reduction": ("mean", "sum"),
    "forecast_update": ("joint", "separate"),
    "forecast_engine": ("auto", "shared_prefix", "separate"),
    "rollout_schedule": ("auto", "lock_step"),
}
_AT_LEAST: dict[str, tuple[float, str]] = {
    "forecast_coef": (0, "0 turns forecasting off"),
    "forecast_horizon": (0, "0 forecasts the current action only"),
    "forecast_lr_scale": (0, "1.0 is the policy's learning rate"),
    "forecast_grad_norm_steps": (0, "0 never measures"),
    "forecast_max_windows": (1, "`None` keeps every window"),
    "forecast_batch_size": (1, "`None` takes `per_device_train_batch_size`"),
    "max_turns": (1, "`None` takes the environment's own limit"),
    "max_turns_eval": (1, "`None` takes the environment's own limit"),
    "max_tokens_per_turn": (1, "the paper uses 512"),
    "max_prompt_length": (1, "`None` sets no limit"),
    "max_completion_length": (1, "the paper uses 8192"),
    "max_concurrent_episodes": (1, "`None` plays a whole batch at once"),
}


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class CoPEConfig(GRPOConfig):
    r"""
    Configuration class for the [`CoPETrainer`].

    Lists only the parameters that differ from [`~trl.GRPOConfig`]. The paper's numbers come from a trainer with other
    conventions than TRL's, so some defaults change; each says why.

    Parameters that control the forecasting loss:
        forecast_coef (`float`, *optional*, defaults to `0.01`):
            λ, weight of the forecasting loss (paper §5.3). 0 gives plain GRPO.
        forecast_horizon (`int`, *optional*, defaults to `2`):
            K, largest future offset: a forecast holds up to K+1 actions (paper §9).
        forecast_gate (`str`, *optional*, defaults to `"success"`):
            Which trajectories are forecast from: `"success"` (paper Eq. 5), `"mixed"` (successes of groups that also
            hold a failure), `"all"` (no success condition).
        forecast_group_norm (`bool`, *optional*, defaults to `True`):
            Divide by the number of successes of the group (paper §5.2).
        forecast_task_weight (`str`, *optional*, defaults to `"uniform"`):
            `"uniform"`: every task with a success weighs the same (paper Eq. 5). `"failure_rate"`: by the share of its
            group that did not succeed, so that tasks the policy already solves do not crowd out the others.
        forecast_reduction (`str`, *optional*, defaults to `"mean"`):
            `"mean"`: token mean inside a window, mean over the windows of a trajectory. `"sum"`: Eq. 5 to the letter,
            hundreds of times larger, so that `forecast_coef` must be smaller.
        forecast_skip_invalid (`bool`, *optional*, defaults to `False`):
            Drop actions without effect from the targets and look past them to the next effective one (paper §8 Q2).
        forecast_max_windows (`int` or `None`, *optional*, defaults to `None`):
            Keep at most this many windows a trajectory, drawn at random with the trainer's seed.
        forecast_update (`str`, *optional*, defaults to `"joint"`):
            `"joint"` adds the two losses (paper §5.3); `"separate"` gives forecasting an optimizer step of its own
            after the policy's. With Adam the size of λ then hardly matters; `forecast_lr_scale` is the knob.
        forecast_lr_scale (`float`, *optional*, defaults to `1.0`):
            Learning rate of the separate step, as a factor of the policy's.
        forecast_engine (`str`, *optional*, defaults to `"auto"`):
            `"shared_prefix"` scores all windows in the policy's own forward; `"separate"` scores one padded sequence a
            window; `"auto"` takes the first wherever the model's attention allows it.
        forecast_batch_size (`int` or `None`, *optional*, defaults to `None`):
            Windows in one forward of the separate engine; `None` takes `per_device_train_batch_size`.
        forecast_grad_norm_steps (`int`, *optional*, defaults to `25`):
            Measure the ratio of the two gradients' norms every so many optimizer steps, at the price of one more
            backward pass in that step. 0 never measures. A separate update knows the ratio at every step, at no cost.

    Parameters that control episodes:
        max_turns (`int` or `None`, *optional*, defaults to `None`):
            Policy turns of a training episode. `None` takes the environment's own limit (the paper's).
        max_turns_eval (`int` or `None`, *optional*, defaults to `None`):
            Policy turns of an evaluation episode. `None` takes the environment's own limit.
        max_tokens_per_turn (`int`, *optional*, defaults to `512`):
            Tokens the policy may sample in one turn (Table 9). A turn that reaches it ends the episode, truncated.
        max_prompt_length (`int` or `None`, *optional*, defaults to `None`):
            Longest prompt, first observation included; a longer one fails the episode, nothing is cut silently.
        environment_timeout (`float`, *optional*, defaults to `120.0`):
            Deadline in seconds of one `reset` or `step`; a slower environment fails its episode.
        max_concurrent_episodes (`int` or `None`, *optional*, defaults to `None`):
            Most episodes a process plays at a time, each with an environment and a place in the KV cache of its own.
            `None` plays the whole batch at once.
        rollout_schedule (`str`, *optional*, defaults to `"auto"`):
            `"auto"` lets every episode go at its own pace, its KV cache kept from turn to turn, wherever the engine
            and the model allow it; `"lock_step"` samples one turn of all episodes at a time with TRL's own engine.
        profile (`bool`, *optional*, defaults to `False`):
            Print where the time of each step goes, and write a Chrome trace to `output_dir/profile`.
        save_trajectories (`bool`, *optional*, defaults to `True`):
            Write every episode to `output_dir/trajectories` as Parquet shards.
        success_threshold (`float`, *optional*, defaults to `1.0`):
            Where TRL rolls out (`tools`, `environment_factory`, `rollout_func`, single turns) and neither `success_fn`
            nor the environment says what a success is: the smallest total reward that counts as one.

    Changed defaults:
        max_completion_length: 8192, the paper's response length (Table 9); TRL's 512 would cut most episodes.
        loss_type: `"grpo"`, the mean over tokens of a sequence first, as the paper's trainer computes it.
        beta: 0.001, the paper's KL coefficient (Table 9).
        use_bias_correction_kl: `False`, since the paper's k3 estimator has no importance weight.
        entropy_coef: 0.001, the paper's entropy coefficient (Table 9).
        vllm_importance_sampling_correction: `False`; a sequence's summed log-ratio grows with its length, so the
            default correction masks long episodes.
        weight_decay: 0.01, the paper's optimizer setting.
        lr_scheduler_type: `"constant"`, the paper's schedule.
        use_cpu, bf16: on a machine without an accelerator, `True` and `False` unless `bf16` or `fp16` is set; the
            inherited default (bfloat16) is refused there.
    """

    forecast_coef: float = _option(0.01, "Weight of the forecasting loss (lambda). 0 gives plain GRPO.")
    forecast_horizon: int = _option(2, "Largest future offset K; a forecast holds up to K+1 actions.")
    forecast_gate: str = _option("success", "Trajectories to forecast from: 'success', 'mixed' or 'all'.")
    forecast_group_norm: bool = _option(True, "Divide by the number of successes of the group.")
    forecast_task_weight: str = _option("uniform", "Tasks weigh the same, or by their 'failure_rate'.")
    forecast_reduction: str = _option("mean", "'mean' over tokens and windows, or 'sum' (Eq. 5 to the letter).")
    forecast_skip_invalid: bool = _option(False, "Leave actions without effect out of the targets.")
    forecast_max_windows: int | None = _option(None, "At most this many windows a trajectory.")
    forecast_update: str = _option("joint", "'joint' loss, or a 'separate' optimizer step after the policy's.")
    forecast_lr_scale: float = _option(1.0, "Learning rate of the separate step, as a factor of the policy's.")
    forecast_engine: str = _option("auto", "'auto', 'shared_prefix' or 'separate'.")
    forecast_batch_size: int | None = _option(None, "Windows in one forward of the separate engine.")
    forecast_grad_norm_steps: int = _option(25, "Measure the gradient-norm ratio every so many steps; 0 never.")
    max_turns: int | None = _option(None, "Policy turns of a training episode.")
    max_turns_eval: int | None = _option(None, "Policy turns of an evaluation episode.")
    max_tokens_per_turn: int = _option(512, "Tokens the policy may sample in one turn.")
    max_prompt_length: int | None = _option(None, "Longest prompt, first observation included.")
    environment_timeout: float = _option(120.0, "Deadline in seconds of one environment call.")
    max_concurrent_episodes: int | None = _option(None, "Most episodes a process plays at a time.")
    rollout_schedule: str = _option("auto", "'auto', or all episodes in 'lock_step'.")
    profile: bool = _option(False, "Print where the time of each step goes, and write a Chrome trace.")
    save_trajectories: bool = _option(True, "Write every episode to output_dir/trajectories.")
    success_threshold: float = _option(1.0, "Total reward that is a success, where nothing else says so.")

    max_completion_length: int = _option(8192, "Tokens of an episode after its prompt.")
    loss_type: str = _option("grpo", "Loss type; 'grpo' is the paper's.")
    beta: float = _option(0.001, "KL coefficient.")
    use_bias_correction_kl: bool = _option(False, "Importance weight on the KL estimator.")
    entropy_coef: float = _option(0.001, "Entropy coefficient.")
    vllm_importance_sampling_correction: bool = _option(False, "Importance correction of vLLM's log-probabilities.")
    weight_decay: float = _option(0.01, "Weight decay.")
    lr_scheduler_type: SchedulerType | str = _option("constant", "Learning-rate schedule.")

    def __post_init__(self) -> None:
        self._check_own_fields()
        if self.bf16 is None and not self.fp16 and not self.use_cpu and not torch.accelerator.is_available():
            # Without an accelerator the inherited default (bfloat16) is refused; a laptop should simply train.
            self.use_cpu: bool = True
            self.bf16: bool | None = False
        try:
            super().__post_init__()
        except ValueError as error:
            explained = self._explained(error)
            if explained is None:
                raise
            raise explained from error

    def _explained(self, error: ValueError) -> ConfigError | None:
        """A message of TRL's on group sizes with the remedy added, or `None` for any other."""
        if "must be divisible by num_generations" in str(error):
            return ConfigError(
                f"`num_generations` is {self.num_generations}, which does not divide `generation_batch_size`="
                f"{self.generation_batch_size}; a batch must hold whole groups. Make `per_device_train_batch_size` × "
                "`steps_per_generation` × processes a multiple of `num_generations`."
            )
        if "number of generations used for evaluation" in str(error):
            return ConfigError(
                f"`num_generations_eval` is {self.num_generations_eval} (`None` takes `num_generations`="
                f"{self.num_generations}), which does not divide the evaluation batch of `per_device_eval_batch_size`="
                f"{self.per_device_eval_batch_size} × processes. Make the batch a multiple of it; 1 always fits."
            )
        return None

    def _check_own_fields(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ConfigError(f"`{name}` is {getattr(self, name)!r}; it must be one of {list(choices)}.")
        for name, (lowest, hint) in _AT_LEAST.items():
            value = getattr(self, name)
            if value is None and "`None`" in hint:
                continue
            if value is None or not value >= lowest:
                raise ConfigError(f"`{name}` is {value!r}; it must be at least {lowest} ({hint}).")
        if not self.environment_timeout > 0:
            raise ConfigError(f"`environment_timeout` is {self.environment_timeout!r}; it must be positive (seconds).")
        if self.forecast_coef > 0 and self.use_liger_kernel and self.forecast_engine != "separate":
            raise ConfigError(
                f"`use_liger_kernel` is True with `forecast_engine`={self.forecast_engine!r}: Liger's kernels take no "
                '4-D attention mask. Set `use_liger_kernel=False`, or `forecast_engine="separate"`.'
            )
