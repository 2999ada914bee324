"""What a model is, as far as a choice depends on it: where forecasts are scored, whether its cache can be kept."""

import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Properties of a `transformers` model.

    Attributes:
        attention: name of the attention implementation.
        sliding_window: smallest sliding window of any layer in tokens, or `None`.
        recurrent: whether some layers have no softmax attention (linear attention, Mamba).
        mixture_of_experts: whether a load-balancing loss is computed from the policy's forward.
        plain_head: whether logits are a plain product with the LM head (no bias, no soft cap).
        positions: whether the model places tokens by `position_ids`, not by their column (ALiBi, RWKV).
        replaceable: whether its attention can be replaced by one that knows branches; see
            [`~cope_trl.forecast.engines.scoring_traits`].
    """

    attention: str
    sliding_window: int | None = None
    recurrent: bool = False
    mixture_of_experts: bool = False
    plain_head: bool = True
    positions: bool = True
    replaceable: bool = True

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
