"""Attention by plan against attention over all pairs under the mask, written out."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged
from support import make_model
from torch import nn
from transformers.models.qwen2 import modeling_qwen2

from cope_trl.forecast import attention
from cope_trl.forecast.attention import (
    BRANCHED,
    AttentionPlan,
    branched_arguments,
    eager_branched,
    sdpa_branched,
    takes_plans,
    use_branched_attention,
)
from cope_trl.forecast.packing import pack_rows, pack_shared_prefix
from cope_trl.types import Branch

KINDS = {"sdpa": sdpa_branched, "eager": eager_branched}


def layer(groups):
    """What eager attention reads of the layer it belongs to; its class stands beside `eager_attention_forward`."""
    made = modeling_qwen2.Qwen2Attention.__new__(modeling_qwen2.Qwen2Attention)
    nn.Module.__init__(made)
    made.num_key_value_groups = groups
    return made


def reference(query, key, value, mask, scaling):
    """Softmax over allowed pairs, in double precision."""
    key, value = (x.double().repeat_interleave(query.size(1) // key.size(1), dim=1) for x in (key, value))
    scores = (query.double() @ key.transpose(-1, -2)) * scaling
    return (torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ value).transpose(1, 2)


def long_example(length=40, branch=9, windows=4, seed=0):
    """One trajectory with branches that are longer than a group, and one without."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 99, (2, length), generator=generator)
    cuts = torch.linspace(length // 4, length, windows).int().tolist()
    branches = [
        (cut, Branch(tuple(range(10, 10 + branch)), (0,) + (1,) * (branch - 1), (0,) * branch)) for cut in cuts
    ]
    rows = pack_rows([branches, []], [1.0, 0.0], "mean")
    return pack_shared_prefix(ids, torch.ones_like(ids), rows)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.sampled_from(list(KINDS)),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.3, 8**-0.5]),
    st.sampled_from([1, 7, 10**6]),
    st.sampled_from([5, 60, 10**6]),
)
def test_the_same_as_all_pairs_under_the_mask(seed, kind, key_heads, scaling, group, pairs):
    """However the branches are grouped and the trajectories cut into parts."""
    example = Ragged(seed)
    size = example.batch.input_ids.size(1)
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn((1, heads, size, 8), generator=generator) for heads in (4, key_heads, key_heads)]
    outputs, gradients = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "GROUP", group)
        patch.setattr(attention, "PAIRS", pairs)
        plan = AttentionPlan(example.batch)
        for planned in (False, True):
            query, key, value = (tensor.clone().requires_grad_() for tensor in tensors)
            if planned:
                output, weights = KINDS[kind](
                    layer(4 // key_heads), query, key, value, None, scaling=scaling, dropout=0.0, branches=plan
                )
                assert weights is None
            else:
                output = reference(query, key, value, example.expected_mask(), scaling)
            (output.double() ** 3).sum().backward()
            outputs.append(output.double())
            gradients.append([x.grad.double() for x in (query, key, value)])
    assert torch.allclose(*outputs, atol=1e-5)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


class TestPlan:
    def test_by_hand(self, monkeypatch):
        monkeypatch.setattr(attention, "GROUP", 20)
        plan = AttentionPlan(long_example(length=40, branch=9, windows=4))  # cuts 10, 20, 30, 40
        assert plan.sizes == [40, 18, 18, 40]
        assert plan.histories == [None, (0, 20), (0, 40), None]
        mask = plan.mask(1, torch.float32)
        assert mask.shape == (18, 20 + 18)
        first, second = (mask == 0)[0].tolist(), (mask == 0)[9].tolist()
        assert first == [True] * 10 + [False] * 10 + [True] + [False] * 17
        assert second == [True] * 20 + [False] * 9 + [True] + [False] * 8

    def test_a_branch_longer_than_a_group_is_one_of_its_own(self, monkeypatch):
        monkeypatch.setattr(attention, "GROUP", 5)
        assert AttentionPlan(long_example(branch=9, windows=2)).sizes == [40, 9, 9, 40]

    def test_a_mask_is_made_once_for_all_layers(self):
        plan = AttentionPlan(long_example())
        assert plan.mask(1, torch.float32) is plan.mask(1, torch.float32)
        assert plan.mask(1, torch.bfloat16).dtype == torch.bfloat16

    def test_a_trajectory_has_no_mask(self):
        with pytest.raises(ValueError, match="piece 0 is a trajectory"):
            AttentionPlan(long_example()).mask(0, torch.float32)


def largest_tensor(function):
    """Elements of the largest tensor that any operation makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, torch.Tensor):
                    self.largest = max(self.largest, tensor.numel())
            return output

    with Watch() as watch:
        function()
    return watch.largest


@pytest.mark.parametrize("kind", KINDS)
def test_memory_grows_with_the_length_not_with_its_square(kind, monkeypatch):
    """The largest tensor of forward and backward, for one head, from 512 to 1024 tokens."""
    monkeypatch.setattr(attention, "GROUP", 16)
    monkeypatch.setattr(attention, "PAIRS", 2**13)
    sizes = []
    for length in (512, 1024):
        batch = long_example(length, branch=8, windows=8)
        plan = AttentionPlan(batch)
        shape = (1, 1, batch.input_ids.size(1), 4)
        tensors = [torch.randn(shape, requires_grad=True) for _ in range(3)]

        def both(plan=plan, tensors=tensors):
            output = KINDS[kind](layer(1), *tensors, None, scaling=0.5, dropout=0.0, branches=plan)[0]
            output.sum().backward()

        sizes.append(largest_tensor(both))
    # A group of 16 queries by the history and itself, or the parts of a trajectory: far from 1024² pairs.
    assert sizes[1] <= max(2 * sizes[0], 2**13)
    assert sizes[1] <= 32 * 1024


def test_eager_attention_keeps_no_scores_of_a_long_trajectory(monkeypatch):
    """What waits for the backward pass, for one head; the scores of 1024 tokens would be a million numbers."""
    monkeypatch.setattr(attention, "PAIRS", 2**13)
    batch, kept = long_example(1024, branch=2, windows=1), {}
    tensors = [torch.randn((1, 1, batch.input_ids.size(1), 4), requires_grad=True) for _ in range(3)]

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # views of one tensor count once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        eager_branched(layer(1), *tensors, None, scaling=0.5, dropout=0.0, branches=AttentionPlan(batch))
    assert sum(size for size, _ in kept.values()) < 4 * 100_000


class TestInAModel:
    @pytest.mark.parametrize("kind", KINDS)
    def test_other_forwards_stay_as_they_were(self, kind):
        model, ids = make_model(attn_implementation=kind).eval(), torch.arange(10, 30)[None]
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        with torch.no_grad():
            before = [model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits]
            sampled = model.generate(ids, max_new_tokens=5, do_sample=False)
            assert use_branched_attention(model)
            assert torch.equal(before[0], model(input_ids=ids).logits)
            assert torch.equal(before[1], model(input_ids=ids, attention_mask=mask).logits)
            assert torch.equal(sampled, model.generate(ids, max_new_tokens=5, do_sample=False))

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_name_is_not_saved(self, tmp_path, kind):
        model = make_model(attn_implementation=kind)
        use_branched_attention(model)
        assert model.config._attn_implementation == BRANCHED[kind]
        model.save_pretrained(tmp_path)
        assert BRANCHED[kind] not in (tmp_path / "config.json").read_text()

    def test_other_attentions_are_left_alone(self):
        model = make_model(attn_implementation="flex_attention")
        assert not use_branched_attention(model)
        assert model.config._attn_implementation == "flex_attention"

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_model_that_passes_nothing_on_is_left_alone(self, monkeypatch, kind):
        model = make_model(attn_implementation=kind)
        assert takes_plans(model)
        monkeypatch.setattr(type(model), "_supports_attention_backend", False)
        assert not takes_plans(model)
        assert not use_branched_attention(model)
        assert model.config._attn_implementation == kind

    def test_eager_attention_must_stand_beside_its_layer(self, monkeypatch):
        model = make_model(attn_implementation="eager")
        monkeypatch.delattr(modeling_qwen2, "eager_attention_forward")
        assert not use_branched_attention(model)
        with pytest.raises(RuntimeError, match="`eager_attention_forward` is missing beside Qwen2Attention"):
            eager_branched(layer(1), *[torch.zeros(1, 1, 2, 4)] * 3, None)

    @pytest.mark.parametrize("kind", KINDS)
    def test_layers_that_drop_the_plan_are_an_error(self, kind):
        model, batch = make_model(attn_implementation=kind), long_example()
        use_branched_attention(model)
        arguments = branched_arguments(batch)
        arguments.pop("branches")
        with pytest.raises(RuntimeError, match="received no `branches`"):
            model(input_ids=batch.input_ids, **arguments)

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("kind", KINDS)
    def test_gradient_checkpointing_gives_the_same_gradients(self, kind, reentrant, monkeypatch):
        monkeypatch.setattr(attention, "PAIRS", 400)  # eager attention checkpoints parts of its own
        batch, gradients = long_example(), []
        for checkpointing in (False, True):
            model = make_model(attn_implementation=kind).train()
            use_branched_attention(model)
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": reentrant})
                model.enable_input_require_grads()
            output = model(input_ids=batch.input_ids, position_ids=batch.position_ids, **branched_arguments(batch))
            output.logits.square().mean().backward()
            gradients.append([p.grad for p in model.parameters()])
        for ours, theirs in zip(*gradients, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)


def test_off_the_cpu_grouped_heads_are_repeated_only_under_a_mask(monkeypatch):
    """`transformers` knows which kernels take grouped heads; a stand-in for CUDA's answer."""
    seen = []

    def kernel(q, k, v, attn_mask, enable_gqa, **_):
        seen.append((attn_mask is not None, k.size(1), enable_gqa))
        return q

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(attention, "use_gqa_in_sdpa", lambda mask, key, value: mask is None)
    plan = AttentionPlan(long_example(windows=1))
    query, key = (torch.zeros((1, heads, sum(plan.sizes), 8), device="meta") for heads in (4, 2))
    plan._masks[1, query.dtype] = torch.zeros(1)
    sdpa_branched(SimpleNamespace(), query, key, key, None, branches=plan)
    assert seen == [(False, 2, True), (True, 4, False), (False, 2, True)]
