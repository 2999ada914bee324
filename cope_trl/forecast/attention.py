"""Attention over packed trajectories with branches, without the pairs that no token may see.

A dense mask makes every token of a sequence meet every other, though a trajectory sees neither another trajectory nor
a branch, and no branch sees another: most of that work would be masked away, and the mask alone grows with the square
of the length. The attentions registered with `transformers` here make one causal call a trajectory, as plain GRPO
would, and one call for every few branches over `[history | these branches]`, under a mask of a few hundred queries.
There is one for SDPA and one for a model's own eager attention; both are the plain one for every forward that brings
no plan.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import eager_mask, sdpa_mask

from cope_trl.forecast.packing import SharedPrefixBatch

BRANCHED = {"sdpa": "sdpa_branched", "eager": "eager_branched"}
"""Attention implementation → its counterpart here."""

GROUP = 256
"""Most branch tokens in one call, unless a single branch is longer. More would meet more pairs that are masked away,
fewer would copy the history more often."""

PAIRS = 2**22
"""Pairs of query and key (a head) beyond which eager attention goes over a trajectory in parts, each computed again in
the backward pass, so that memory grows with the length, not with its square."""

_Kernel = Callable[..., torch.Tensor]


class AttentionPlan:
    """Which calls make up the attention of a packed batch.

    The sequence is cut into *pieces*, which stand end to end: for each trajectory its own tokens, then groups of its
    branches. Each piece is the queries of one call; its keys are itself, after the first `seen` tokens of its
    trajectory.

    Args:
        batch: the packed trajectories and branches.

    Attributes:
        sizes: tokens of each piece.
        histories: for each piece, `(index of its trajectory's piece, seen)`, or `None` for a trajectory.
    """

    def __init__(self, batch: SharedPrefixBatch) -> None:
        self.sizes: list[int] = []
        self.histories: list[tuple[int, int] | None] = []
        for span in batch.spans:
            trajectory = len(self.sizes)
            self.sizes.append(span.size)
            self.histories.append(None)
            for cuts, sizes in _groups(span.cuts, span.branches):
                self.sizes.append(sum(sizes))
                self.histories.append((trajectory, max(cuts)))
        self._visible, self._device = batch.visible, batch.input_ids.device
        self._masks: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def mask(self, piece: int, dtype: torch.dtype) -> torch.Tensor:
        """(queries, keys) mask of a group of branches to add to its scores; made once for all layers."""
        history = self.histories[piece]
        if history is None:
            raise ValueError(f"piece {piece} is a trajectory, which is causal and has no mask")
        if (piece, dtype) not in self._masks:
            trajectory, seen = history
            begins = [sum(self.sizes[:index]) for index in (trajectory, piece)]
            queries = torch.arange(begins[1], begins[1] + self.sizes[piece], device=self._device)
            keys = torch.cat([torch.arange(begins[0], begins[0] + seen, device=self._device), queries])
            allowed = self._visible(None, None, queries[:, None], keys[None])
            self._masks[piece, dtype] = _additive(allowed, dtype)
        return self._masks[piece, dtype]


def _groups(cuts: Sequence[int], sizes: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of branches of at most [`GROUP`] tokens, as `(cuts, sizes)`."""
    groups: list[tuple[list[int], list[int]]] = []
    for cut, size in zip(cuts, sizes, strict=True):
        if not groups or sum(groups[-1][1]) + size > GROUP:
            groups.append(([], []))
        groups[-1][0].append(cut)
        groups[-1][1].append(size)
    return groups


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where attention is allowed, the smallest value elsewhere."""
    zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return zeros.masked_fill(~allowed, torch.finfo(dtype).min)


def takes_plans(model: Any) -> bool:
    """Whether a model's attention can be replaced by one of those here: its layers pass keyword arguments on."""
    if not getattr(model, "_supports_attention_backend", False):
        return False
    name = model.config.get_text_config()._attn_implementation
    return name != "eager" or any(_eager_of(module) is not None for module in model.modules())


def use_branched_attention(model: Any) -> bool:
    """Switch a model from SDPA or eager attention to its counterpart here; false, and nothing done, for any other.

    The name is not written to a saved `config.json`; a saved model loads with its default attention.
    """
    name = model.config.get_text_config()._attn_implementation
    if name not in BRANCHED or not takes_plans(model):
        return False
    model.set_attn_implementation(BRANCHED[name])
    return True


def branched_arguments(batch: SharedPrefixBatch) -> dict[str, Any]:
    """Arguments of a forward over a packed batch in a model that uses one of [`BRANCHED`]."""
    # A mask of four dimensions keeps the model from making one of its own.
    none = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=batch.input_ids.device)
    return {"attention_mask": none, "branches": AttentionPlan(batch)}


def sdpa_branched(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    branches: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """SDPA by the plan in `branches`, or plain SDPA where it is `None`.

    Args:
        module: the attention layer.
        query: (B, heads, N, D); B is 1 with a plan.
        key, value: (B, key-value heads, N, D).
        attention_mask: SDPA's mask; not read with a plan.
        dropout: probability.
        scaling: factor on the scores; 1/√D when `None`.
        branches: the plan.
        kwargs: further arguments of SDPA's forward.

    Returns:
        (B, N, heads, D) tensor, and `None`.

    Raises:
        RuntimeError: a plan was made, and the model's layers did not hand it on.
    """
    if branches is None:
        _check_handed_on(module, key, attention_mask)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    groups = query.size(1) // key.size(1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        # Off the CPU, grouped heads under a mask take the slowest kernel; `transformers` knows which do not.
        grouped = q.device.type == "cpu" or use_gqa_in_sdpa(mask, k, v)
        if groups > 1 and not grouped:
            k, v = repeat_kv(k, groups), repeat_kv(v, groups)
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=dropout,
            scale=scaling,
            is_causal=mask is None,
            enable_gqa=groups > 1 and grouped,
        )

    return _attend(query, key, value, branches, attend), None


def eager_branched(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    branches: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The layer's own eager attention by the plan in `branches`, or as it is where that is `None`.

    Arguments as in [`sdpa_branched`]; `kwargs` are those of the layer's eager attention. With a plan no attention
    weights are returned.
    """
    eager = _eager_of(module)
    if eager is None:
        raise RuntimeError(f"`eager_attention_forward` is missing beside {type(module).__name__}")
    if branches is None:
        _check_handed_on(module, key, attention_mask)
        return eager(module, query, key, value, attention_mask, **kwargs)

    def under_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return eager(module, q, k, v, mask[None, None], **kwargs)[0].transpose(1, 2)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return _causal_in_parts(q, k, v, under_mask) if mask is None else under_mask(q, k, v, mask)

    return _attend(query, key, value, branches, attend), None


def _causal_in_parts(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, under_mask: _Kernel) -> torch.Tensor:
    """Causal attention, (1, heads, T, D), through a kernel that needs the mask written out."""
    length = q.size(2)
    rows = max(1, min(length, PAIRS // max(length, 1)))

    def part(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size, seen = q.size(2), k.size(2)
        allowed = torch.ones((size, seen), dtype=torch.bool, device=q.device).tril(seen - size)
        return under_mask(q, k, v, _additive(allowed, q.dtype))

    outputs = []
    for first in range(0, length, rows):
        end = min(first + rows, length)
        tensors = (q[:, :, first:end], k[:, :, :end], v[:, :, :end])
        again = rows < length and torch.is_grad_enabled()
        outputs.append(checkpoint(part, *tensors, use_reentrant=False) if again else part(*tensors))
    return torch.cat(outputs, dim=2)


@torch.compiler.disable  # `torch.compile` would unroll every batch's plan into a graph of its own
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: AttentionPlan, attend: _Kernel
) -> torch.Tensor:
    """(1, N, heads, D): one call a piece."""
    pieces = [tensor.split(plan.sizes, dim=2) for tensor in (query, key, value)]
    outputs = []
    for index, (q, k, v) in enumerate(zip(*pieces, strict=True)):
        history = plan.histories[index]
        if history is None:
            outputs.append(attend(q, k, v, None) if q.size(2) else q)
            continue
        trajectory, seen = history
        keys, values = (
            torch.cat([whole[trajectory][:, :, :seen], whole[index]], dim=2) for whole in (pieces[1], pieces[2])
        )
        outputs.append(attend(q, keys, values, plan.mask(index, q.dtype)))
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _eager_of(module: torch.nn.Module) -> Callable[..., Any] | None:
    """The eager attention that stands beside a layer's class."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _check_handed_on(module: torch.nn.Module, key: torch.Tensor, attention_mask: torch.Tensor | None) -> None:
    if attention_mask is not None and attention_mask.shape[-1] == 1 < key.shape[-2]:
        raise RuntimeError(
            f"{type(module).__name__} received no `branches`: the layers of this model do not pass keyword "
            'arguments on to their attention. Set `forecast_engine="separate"`.'
        )


AttentionInterface.register(BRANCHED["sdpa"], sdpa_branched)
AttentionMaskInterface.register(BRANCHED["sdpa"], sdpa_mask)
AttentionInterface.register(BRANCHED["eager"], eager_branched)
AttentionMaskInterface.register(BRANCHED["eager"], eager_mask)
