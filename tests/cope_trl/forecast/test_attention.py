"""Attention by layout against attention under the dense mask, written out."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import make_model
from torch import nn

from cope_trl.forecast.attention import (
    BRANCHED,
    RowLayout,
    branched_arguments,
    branched_attention,
    row_layouts,
    use_branched_attention,
)
from cope_trl.forecast.packing import pack_rows, pack_shared_prefix
from cope_trl.types import Branch


def make_rows(mask, windows):
    """Rows of branches `(cut, size)`."""
    branches = [
        [(cut, Branch((7,) * size, (0,) + (1,) * (size - 1), (-1,) + (0,) * (size - 1))) for cut, size in row]
        for row in windows
    ]
    return pack_rows(branches, [1.0] * len(mask), "mean")


def reference(query, key, value, mask, scaling):
    """Softmax over allowed pairs, in double precision; 0 where no trajectory or branch token stands."""
    key, value = (x.double().repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2)) * scaling
    return (torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ value).transpose(1, 2)


@st.composite
def batches(draw):
    """(mask, windows): ragged trajectories with padding on either side and any number of branches."""
    columns = draw(st.integers(3, 12))
    mask, windows = torch.zeros((draw(st.integers(1, 3)), columns), dtype=torch.int64), []
    for row in mask:
        left = draw(st.integers(0, columns - 2))
        right = draw(st.integers(left + 1, columns))
        row[left:right] = 1
        cuts = draw(st.lists(st.integers(1, right - left), max_size=4))
        windows.append([(cut, draw(st.integers(1, 4))) for cut in sorted(cuts)])
    return mask, windows


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from([1, 2, 4]), st.sampled_from([None, 0.3]))
def test_the_same_as_the_dense_mask(batch, key_heads, scaling):
    mask, windows = batch
    rows = make_rows(mask, windows)
    shared = pack_shared_prefix(torch.full_like(mask, 5), mask, rows, 0)
    size = shared.input_ids.size(1)
    generator = torch.Generator().manual_seed(size)
    tensors = [torch.randn((len(mask), heads, size, 8), generator=generator) for heads in (4, key_heads, key_heads)]
    real = torch.cat([mask.bool(), rows.window >= 0], dim=1)
    outputs, gradients = [], []
    for dense in (True, False):
        query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
        if dense:
            output = reference(query, key, value, shared.dense_mask(), scaling or 8**-0.5)
        else:
            layouts = row_layouts(mask, rows)
            output, weights = branched_attention(
                nn.Identity(), query, key, value, None, scaling=scaling, branches=layouts
            )
            assert weights is None
            assert (output[~real] == 0).all()
        (output[real].double() ** 3).sum().backward()
        outputs.append(output[real].double())
        gradients.append([x.grad.double() for x in (query, key, value)])
    assert torch.allclose(*outputs, atol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


def test_layout_by_hand():
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    rows = make_rows(mask, [[(1, 2), (3, 4)], []])
    assert row_layouts(mask, rows) == (
        RowLayout(left=2, right=5, start=5, cuts=(3, 5), sizes=(2, 4)),
        RowLayout(left=0, right=4, start=5, cuts=(), sizes=()),
    )


class TestInAModel:
    def test_other_forwards_stay_as_they_were(self):
        model, ids = make_model().eval(), torch.arange(10, 30)[None]
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            before = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits]
            sampled = model.generate(ids, max_new_tokens=5, do_sample=False)
            assert use_branched_attention(model)
            assert torch.equal(before[0], model(input_ids=ids).logits)
            assert torch.equal(before[1], model(input_ids=ids, attention_mask=mask).logits)
            assert torch.equal(sampled, model.generate(ids, max_new_tokens=5, do_sample=False))

    def test_the_name_is_not_saved(self, tmp_path):
        model = make_model()
        use_branched_attention(model)
        model.save_pretrained(tmp_path)
        assert BRANCHED not in (tmp_path / "config.json").read_text()

    def test_only_sdpa_is_replaced(self):
        model = make_model(attn_implementation="eager")
        assert not use_branched_attention(model)
        assert model.config._attn_implementation == "eager"

    def test_a_model_that_passes_nothing_on_is_left_alone(self, monkeypatch):
        model = make_model()
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
        assert not use_branched_attention(model)
        assert model.config._attn_implementation == "sdpa"

    def test_layers_that_drop_the_layout_are_an_error(self):
        model, ids = make_model(), torch.arange(10, 22)[None]
        use_branched_attention(model)
        mask = torch.ones((1, 8), dtype=torch.int64)
        arguments = branched_arguments(mask, make_rows(mask, [[(4, 4)]]))
        arguments.pop("branches")
        with pytest.raises(RuntimeError, match="received no `branches`"):
            model(input_ids=ids, **arguments)

    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradient_checkpointing_gives_the_same_gradients(self, reentrant):
        random.seed(0)
        mask = torch.ones((1, 8), dtype=torch.int64)
        rows = make_rows(mask, [[(3, 3), (6, 2)]])
        batch = pack_shared_prefix(torch.arange(10, 18)[None], mask, rows, 0)
        gradients = []
        for checkpointing in (False, True):
            model = make_model().train()
            use_branched_attention(model)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            output = model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, **branched_arguments(mask, rows)
            )
            output.logits.square().sum().backward()
            gradients.append([p.grad for p in model.parameters()])
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
