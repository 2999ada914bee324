"""Both engines against one plain forward a window."""

from types import SimpleNamespace

import pytest
import torch
from support import VOCABULARY, make_model
from torch.nn.attention import flex_attention as torch_flex
from transformers.integrations import flex_attention

from cope_trl.forecast.attention import BRANCHED, use_branched_attention
from cope_trl.forecast.packing import pack_rows
from cope_trl.forecast.scoring import Scores, count_windows, score_separate, score_shared
from cope_trl.types import Branch


def branched(kind="sdpa"):
    """A model that can score branches, and the name of its attention."""
    model = make_model(attn_implementation=kind).eval()
    use_branched_attention(model)
    return model, model.config._attn_implementation


@pytest.fixture(scope="module")
def model():
    return branched()[0]


def uncompiled(query, key, value, training=False, **kwargs):
    """FlexAttention as a formula: its compiled kernel needs minutes to build on a CPU."""
    return torch_flex.flex_attention(query, key, value, **kwargs)


def forward_of(model, calls=None):
    """The contract of a forward, with a plain log-softmax."""

    def forward(shift_labels, forecasts, **inputs):
        assert forecasts.shape == shift_labels.shape
        if calls is not None:
            calls.append(inputs["input_ids"].shape)
        log_probs = torch.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
        chosen = log_probs.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=chosen, is_top1=log_probs.argmax(-1) == shift_labels)

    return forward


def example(seed=0, columns=16):
    """Three trajectories (left-padded, whole, right-padded); the second has no branch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, VOCABULARY, (3, columns), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    mask[2, -4:] = 0

    def branch(plan, target):
        tokens = tuple(torch.randint(10, VOCABULARY, (plan + target,), generator=generator).tolist())
        return Branch(tokens, (0,) * plan + (1,) * target, (-1,) * plan + tuple(range(target)))

    branches = [
        [(4, branch(3, 2)), (8, branch(3, 3)), (11, branch(2, 1))],
        [],
        [(1, branch(1, 1)), (12, branch(4, 3))],
    ]
    return ids, mask, branches, pack_rows(branches, [0.5, 0.0, 1.0], "mean")


@torch.no_grad()
def by_hand(model, ids, mask, branches):
    """(row, position in the row) → log-probability and whether it is the largest, one window at a time."""
    scored = {}
    for row, windows in enumerate(branches):
        whole, column = ids[row][mask[row].bool()], 0
        for cut, branch in windows:
            sequence = torch.cat([whole[:cut], torch.tensor(branch.ids)])
            log_probs = torch.log_softmax(model(input_ids=sequence[None]).logits[0].double(), dim=-1)
            for j, trained in enumerate(branch.loss_mask):
                if trained:
                    at = log_probs[cut + j - 1]
                    scored[row, column + j] = (float(at[branch.ids[j]]), int(at.argmax()) == branch.ids[j])
            column += len(branch.ids)
    return scored


def loss_by_hand(scored, rows):
    return -sum(float(rows.weight[key]) * value for key, (value, _) in scored.items())


@pytest.mark.parametrize("kind", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("policy", [False, True])
@torch.no_grad()
def test_shared_prefix(kind, policy, monkeypatch):
    monkeypatch.setattr(flex_attention, "compile_friendly_flex_attention", uncompiled)
    model, implementation = branched(kind)
    assert implementation == BRANCHED.get(kind, kind)
    ids, mask, branches, rows = example()
    completion = mask[:, -6:] * torch.tensor([0, 1, 1, 0, 1, 1])  # some tokens are an environment's
    calls = []
    output, batch, scores = score_shared(
        forward_of(model, calls), ids, mask, rows, completion if policy else None, implementation
    )
    tokens = int(mask.sum()) + rows.tokens
    assert calls == [(1, 128 if kind == "flex_attention" else tokens)]
    alone = make_model().eval()
    scored = by_hand(alone, ids, mask, branches)
    assert set(scored) == {tuple(where) for where in (rows.weight > 0).nonzero().tolist()}
    for (row, column), (value, top) in scored.items():
        assert float(scores.log_probs[row, column]) == pytest.approx(value, abs=1e-4)
        assert bool(scores.is_top1[row, column]) == top
    assert float(scores.loss(2.0)) == pytest.approx(2 * loss_by_hand(scored, rows), rel=1e-5)
    if policy:  # the policy's own scores are those of a padded forward without branches
        plain = torch.log_softmax(alone(input_ids=ids, attention_mask=mask).logits, dim=-1)[:, -7:-1]
        expected = plain.gather(-1, ids[:, -6:, None])[..., 0]
        ours = batch.completion_slice(output.log_probs, 6)
        assert torch.allclose(ours[completion.bool()], expected[completion.bool()], atol=1e-4)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("surplus", [0, 2])
@torch.no_grad()
def test_separate(model, batch_size, surplus):
    ids, mask, branches, rows = example()
    assert count_windows(rows) == 5
    forwards, calls = -(-5 // batch_size) + surplus, []
    scores = score_separate(forward_of(model, calls), ids, mask, rows, 0, batch_size, forwards)
    assert len(calls) == forwards
    assert calls[len(calls) - surplus :] == [(1, 2)] * surplus  # placeholders
    scored = by_hand(model, ids, mask, branches)
    used = scores.weight > 0
    # The shorter sequences first: of lengths 2, 9, 14, 13 and 19, their windows in the order of the rows.
    sizes = {(0, 0): 4 + 5, (0, 1): 8 + 6, (0, 2): 11 + 3, (2, 0): 1 + 2, (2, 1): 12 + 7}
    windows = [(row, int(rows.window[row, column])) for row, column in sorted(scored)]
    in_order = sorted(zip(windows, sorted(scored), strict=True), key=lambda pair: sizes[pair[0]])
    assert scores.log_probs[used].tolist() == pytest.approx([scored[key][0] for _, key in in_order], abs=1e-4)
    assert scores.is_top1[used].tolist() == [scored[key][1] for _, key in in_order]
    assert float(scores.loss(2.0)) == pytest.approx(2 * loss_by_hand(scored, rows), rel=1e-5)


@torch.no_grad()
def test_both_engines_give_the_same_statistics(model):
    ids, mask, branches, rows = example(1)
    shared = score_shared(forward_of(model), ids, mask, rows, None, BRANCHED["sdpa"])[2].stats(2)
    alone = score_separate(forward_of(model), ids, mask, rows, 0, 2, 3).stats(2)
    assert torch.allclose(shared.stacked(), alone.stacked(), atol=1e-3)
    assert shared.tokens.tolist() == [5.0, 3.0, 2.0]
    scored = by_hand(model, ids, mask, branches)
    total = -sum(value for value, _ in scored.values())
    assert float(shared.nll.sum()) == pytest.approx(total, rel=1e-5)


@torch.no_grad()
def test_nothing_to_score(model):
    ids, mask, _, _ = example()
    rows = pack_rows([[], [], []], [0.0] * 3, "mean")
    assert count_windows(rows) == 0
    none = score_separate(forward_of(model), ids, mask, rows, 0, 2, 0)
    assert none.log_probs.shape == none.weight.shape == (0,)
    assert float(none.loss(1.0)) == 0.0
    assert none.stats(1).stacked().sum() == 0
    calls = []
    waiting = score_separate(forward_of(model, calls), ids, mask, rows, 0, 2, 3)  # for another rank
    assert calls == [(1, 2)] * 3
    assert float(waiting.loss(1.0)) == 0.0
    shared = score_shared(forward_of(model), ids, mask, rows, None, BRANCHED["sdpa"])[2]
    assert float(shared.loss(1.0)) == 0.0


def test_a_placeholder_gives_a_gradient_of_zero(model):
    """Every parameter takes part in the backward pass, so that ranks reduce the same gradients."""
    ids, mask, _, _ = example()
    rows = pack_rows([[], [], []], [0.0] * 3, "mean")
    model.zero_grad()
    score_separate(forward_of(model), ids, mask, rows, 0, 2, 1).loss(1.0).backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None and (g == 0).all() for g in gradients)
    model.zero_grad()


def test_scores_are_weighed_like_the_loss():
    scores = Scores(
        torch.tensor([-1.0, float("nan")]), torch.tensor([True, True]), torch.tensor([0.5, 0.0]), torch.tensor([0, 0])
    )
    assert float(scores.loss(4.0)) == 2.0
    assert scores.stats(0).stacked().tolist() == [[1.0], [1.0], [1.0]]
