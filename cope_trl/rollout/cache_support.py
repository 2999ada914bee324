"""Which models can keep their cache from turn to turn, and why not the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cope_trl.model_traits import ModelTraits

# Attention that takes a mask of its own for every row and column; others are exchanged for SDPA while sampling.
_MASKED = ("sdpa", "eager")


def cache_obstacle(model: Any, longest: int | None) -> str | None:
    """Why [`~cope_trl.rollout.cached.CachedEngine`] cannot be used with a model, or `None`.

    Args:
        model: a `transformers` or PEFT model.
        longest: longest history in tokens, or `None` when unbounded.
    """
    adapters = getattr(model, "peft_config", None)
    if adapters and any(config.is_prompt_learning for config in adapters.values()):
        return "a prompt-learning adapter puts virtual tokens before every prompt"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    traits = ModelTraits.of(base)
    if traits.recurrent:
        return "the model has layers whose state cannot be continued from an earlier token (linear attention, Mamba)"
    if traits.sliding_window is not None and (longest is None or longest > traits.sliding_window):
        return (
            f"the model's sliding window of {traits.sliding_window} tokens is shorter than an episode may be "
            f"({longest}), and its cache drops what leaves the window"
        )
    if not traits.positions:
        return "the model takes no `position_ids`, so a cache with rows of unequal length cannot be continued"
    if base.config.is_encoder_decoder:
        return "the model is an encoder-decoder"
    if not _takes_masks(traits.attention) and not base._supports_sdpa:
        return f"attention {traits.attention!r} takes no 4-D mask, and the model does not support 'sdpa'"
    return None


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Have a model use attention that takes a 4-D mask: SDPA in place of FlashAttention and FlexAttention."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = base.config.get_text_config()._attn_implementation
    if _takes_masks(own):
        yield
        return
    base.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        base.set_attn_implementation(own)


def _takes_masks(attention: str | None) -> bool:
    return attention is None or attention.startswith(_MASKED)
