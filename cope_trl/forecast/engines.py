"""Which engine can score the branches of a given model, and why not the faster one."""

import inspect
from dataclasses import dataclass
from typing import Any

from cope_trl.errors import ConfigError
from cope_trl.forecast.attention import BRANCHED

_MASKED_ATTENTION = ("sdpa", BRANCHED, "eager", "flex_attention")


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """What the choice depends on.

    Attributes:
        attention: name of the attention implementation.
        sliding_window: smallest sliding window of any layer in tokens, or `None`.
        recurrent: whether some layers have no softmax attention (linear attention, Mamba).
        mixture_of_experts: whether a load-balancing loss is computed from the policy's forward.
        plain_head: whether logits are a plain product with the LM head (no bias, no soft cap).
        positions: whether the model places tokens by `position_ids`, not by their column (ALiBi, RWKV).
    """

    attention: str
    sliding_window: int | None = None
    recurrent: bool = False
    mixture_of_experts: bool = False
    plain_head: bool = True
    positions: bool = True

    @staticmethod
    def of(model: Any, mixture_of_experts: bool = False) -> "ModelTraits":
        """Read the traits off a `transformers` model."""
        config = model.config.get_text_config()
        layers = set(getattr(config, "layer_types", None) or [])
        windowed = "sliding_attention" in layers or "chunked_attention" in layers
        if not layers:
            windowed = bool(getattr(config, "use_sliding_window", True))
        window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
        known = {"full_attention", "sliding_attention", "chunked_attention"}
        head = model.get_output_embeddings()
        return ModelTraits(
            attention=getattr(config, "_attn_implementation", None) or "eager",
            sliding_window=window if windowed else None,
            recurrent=bool(layers - known) or hasattr(config, "ssm_cfg") or hasattr(config, "state_size"),
            mixture_of_experts=mixture_of_experts,
            plain_head=getattr(head, "bias", None) is None
            and getattr(config, "final_logit_softcapping", None) is None,
            positions="position_ids" in inspect.signature(type(model).forward).parameters
            and not getattr(config, "alibi", False),
        )

    def obstacle(self, longest: int | None, temperature: float) -> str | None:
        """Why `shared_prefix` cannot be used, or `None`.

        Args:
            longest: longest trajectory in tokens, or `None` when unbounded.
            temperature: rollout temperature.
        """
        if self.attention not in _MASKED_ATTENTION:
            return f"attention {self.attention!r} takes no 4-D mask (use 'sdpa', 'eager' or 'flex_attention')"
        if self.recurrent:
            return (
                "the model has layers without softmax attention, which cannot skip the tokens between a branch and "
                "its history"
            )
        if not self.positions:
            return "the model takes no `position_ids`, so a branch cannot continue from the end of its history"
        if self.sliding_window is not None and (longest is None or longest > self.sliding_window):
            return (
                f"the model's sliding window of {self.sliding_window} tokens is shorter than a trajectory may be "
                f"({longest})"
            )
        if self.mixture_of_experts:
            return "the load-balancing loss of a mixture of experts would count the branches"
        if temperature != 1.0 and not self.plain_head:
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
    obstacle = traits.obstacle(longest, temperature)
    if obstacle is None:
        return "shared_prefix", "all windows ride in the policy's own forward"
    if requested == "shared_prefix":
        raise ConfigError(
            f'`forecast_engine` is \'shared_prefix\', but {obstacle}. Set `forecast_engine="auto"` or "separate".'
        )
    return "separate", f"one padded sequence a window, because {obstacle}"
