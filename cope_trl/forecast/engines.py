"""Which engine can score the branches of a given model, and why not the faster one."""

from dataclasses import replace
from typing import Any

from cope_trl.errors import ConfigError
from cope_trl.forecast.attention import BRANCHED, takes_plans
from cope_trl.model_traits import ModelTraits

_ATTENTIONS = (*BRANCHED, *BRANCHED.values(), "flex_attention")


def scoring_traits(model: Any, mixture_of_experts: bool = False) -> ModelTraits:
    """The traits of a `transformers` model that the choice depends on."""
    return replace(ModelTraits.of(model, mixture_of_experts), replaceable=takes_plans(model))


def obstacle(traits: ModelTraits, longest: int | None, temperature: float) -> str | None:
    """Why `shared_prefix` cannot be used, or `None`.

    Args:
        traits: what the model is.
        longest: longest trajectory in tokens, or `None` when unbounded.
        temperature: rollout temperature.
    """
    if traits.attention not in _ATTENTIONS:
        return f"attention {traits.attention!r} takes no 4-D mask (use 'sdpa', 'eager' or 'flex_attention')"
    if traits.recurrent:
        return (
            "the model has layers without softmax attention, which cannot skip the tokens between a branch and "
            "its history"
        )
    if not traits.positions:
        return "the model takes no `position_ids`, so a branch cannot continue from the end of its history"
    if not traits.replaceable:
        return "the model's layers do not pass keyword arguments on to their attention"
    if traits.sliding_window is not None and (longest is None or longest > traits.sliding_window):
        return (
            f"the model's sliding window of {traits.sliding_window} tokens is shorter than a trajectory may be "
            f"({longest})"
        )
    if traits.mixture_of_experts:
        return "the load-balancing loss of a mixture of experts would count the branches"
    if temperature != 1.0 and not traits.plain_head:
        return f"the LM head has a bias or a soft cap, and the rollout temperature is {temperature}, not 1"
    return None


def choose_engine(requested: str, traits: ModelTraits, longest: int | None, temperature: float) -> tuple[str, str]:
    """The engine in force and one sentence why.

    Args:
        requested: `"auto"`, `"shared_prefix"` or `"separate"`.
        traits: what the model is.
        longest: longest trajectory in tokens, or `None`.
        temperature: rollout temperature.

    Raises:
        [`ConfigError`]: `shared_prefix` was asked for and cannot be used.
    """
    if requested == "separate":
        return "separate", "one padded sequence a window, as `forecast_engine` asks"
    problem = obstacle(traits, longest, temperature)
    if problem is None:
        return "shared_prefix", "all windows ride in the policy's own forward"
    if requested == "shared_prefix":
        raise ConfigError(
            f'`forecast_engine` is \'shared_prefix\', but {problem}. Set `forecast_engine="auto"` or "separate".'
        )
    return "separate", f"one padded sequence a window, because {problem}"
