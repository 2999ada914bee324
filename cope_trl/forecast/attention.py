"""Attention over trajectories with branches, without the pairs that no token may see.

A dense mask makes every one of the N = L + F tokens of a row meet every other, though a trajectory never sees a branch
and no branch sees another: at 15 windows most of that work is masked away. This attention, registered with
`transformers` under the name [`BRANCHED`], makes one causal call for the trajectory, as plain GRPO would, and one call
a branch over `[history | branch]`. It is SDPA in both, and plain SDPA for every forward that brings no layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cope_trl.forecast.packing import ForecastRows

BRANCHED = "sdpa_branched"


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where the tokens of one row stand, in columns.

    Attributes:
        left, right: the trajectory is `left:right`; the other columns before `start` are padding.
        start: first branch column.
        cuts: for each branch, the column at which its history ends (exclusive).
        sizes: tokens of each branch; they stand end to end from `start` on.
    """

    left: int
    right: int
    start: int
    cuts: tuple[int, ...]
    sizes: tuple[int, ...]


def row_layouts(attention_mask: torch.Tensor, rows: ForecastRows) -> tuple[RowLayout, ...]:
    """The layout of each row of a shared-prefix batch.

    Args:
        attention_mask: (B, L) 1 on the trajectories' tokens, which are contiguous.
        rows: branches of the same B trajectories.
    """
    layouts = []
    columns = zip(attention_mask.tolist(), rows.window.tolist(), rows.cut.tolist(), strict=True)
    for mask, window, cut in columns:
        left = mask.index(1) if 1 in mask else 0
        count = max(window, default=-1) + 1
        firsts = [window.index(index) for index in range(count)]
        layouts.append(
            RowLayout(
                left=left,
                right=left + sum(mask),
                start=len(mask),
                cuts=tuple(left + cut[first] for first in firsts),
                sizes=tuple(window.count(index) for index in range(count)),
            )
        )
    return tuple(layouts)


def use_branched_attention(model: Any) -> bool:
    """Switch a model from SDPA to [`BRANCHED`]; false, and nothing done, where its layers would not pass a layout on.

    The name is not written to a saved `config.json`; a saved model loads with its default attention.
    """
    backend = getattr(model, "_supports_attention_backend", False)
    if model.config.get_text_config()._attn_implementation != "sdpa" or not backend:
        return False
    model.set_attn_implementation(BRANCHED)
    return True


def branched_arguments(attention_mask: torch.Tensor, rows: ForecastRows) -> dict[str, Any]:
    """Arguments of a forward over a shared-prefix batch in a model that uses [`BRANCHED`]."""
    # A mask of four dimensions keeps the model from making one of its own.
    none = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=attention_mask.device)
    return {"attention_mask": none, "branches": row_layouts(attention_mask, rows)}


def branched_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    branches: Sequence[RowLayout] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the layout in `branches`, or SDPA where it is `None`.

    Args:
        module: the attention layer.
        query: (B, heads, N, D).
        key, value: (B, key-value heads, N, D).
        attention_mask: SDPA's mask; not read with a layout.
        dropout: probability.
        scaling: factor on the scores; 1/√D when `None`.
        branches: B layouts.
        kwargs: further arguments of SDPA's forward.

    Returns:
        (B, N, heads, D) tensor, 0 on padding, and `None`.

    Raises:
        RuntimeError: a layout was made, and the model's layers did not hand it on.
    """
    if branches is None:
        if attention_mask is not None and attention_mask.shape[-1] == 1 < key.shape[-2]:
            raise RuntimeError(
                f"{type(module).__name__} received no `branches`: the layers of this model do not pass keyword "
                'arguments on to their attention. Load it with `attn_implementation="eager"` or set '
                '`forecast_engine="separate"`.'
            )
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    return _attend(query, key, value, branches, {"dropout_p": dropout, "scale": scaling}), None


@torch.compiler.disable  # `torch.compile` would unroll every batch's layout into a graph of its own
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    branches: Sequence[RowLayout],
    options: dict[str, Any],
) -> torch.Tensor:
    """(B, N, heads, D) for a batch."""
    groups = query.size(1) // key.size(1)
    if groups > 1 and query.device.type != "cpu":  # elsewhere grouped heads under a mask take the slowest kernel
        key, value, groups = repeat_kv(key, groups), repeat_kv(value, groups), 1
    options = {**options, "enable_gqa": groups > 1}
    rows = zip(query.split(1), key.split(1), value.split(1), branches, strict=True)
    outputs = [_attend_row(q, k, v, layout, options) for q, k, v, layout in rows]
    return torch.cat(outputs).transpose(1, 2).contiguous()


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: RowLayout, options: dict[str, Any]
) -> torch.Tensor:
    """(1, heads, N, D) for one row."""
    used = layout.start + sum(layout.sizes)
    tail = query.size(2) - used
    sizes = [layout.left, layout.right - layout.left, layout.start - layout.right, *layout.sizes, tail]
    q, k, v = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    before, own, after = (torch.zeros_like(q[index]) for index in (0, 1, 2))
    if sizes[1]:
        own = scaled_dot_product_attention(q[1], k[1], v[1], is_causal=True, **options)
    outputs = [before, own, after]
    for cut, branch_q, branch_k, branch_v in zip(layout.cuts, q[3:-1], k[3:-1], v[3:-1], strict=True):
        seen, size = cut - layout.left, branch_q.size(2)
        mask = torch.ones((size, seen + size), dtype=torch.bool, device=query.device).tril(seen)
        keys = torch.cat([k[1][:, :, :seen], branch_k], dim=2)
        values = torch.cat([v[1][:, :, :seen], branch_v], dim=2)
        outputs.append(scaled_dot_product_attention(branch_q, keys, values, attn_mask=mask, **options))
    return torch.cat([*outputs, torch.zeros_like(q[-1])], dim=2)


AttentionInterface.register(BRANCHED, branched_attention)
AttentionMaskInterface.register(BRANCHED, sdpa_mask)
