"""The head on scored positions only, against the head on all of them."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support import make_model
from trl.trainer.utils import add_fused_lm_head

from cope_trl.forecast.head import IGNORE, ScoredForward

FIELDS = ("log_probs", "entropy", "is_top1")


def fused(temperature=1.0):
    model = make_model().eval()
    add_fused_lm_head(model, temperature, False, outputs=FIELDS)
    return model


def example(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 60, (2, 9), generator=generator)
    labels = torch.randint(10, 60, (2, 9), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.6] = IGNORE
    return ids, labels


def scored(model, labels, *temperature, forecasts=None, **inputs):
    forward = ScoredForward(partial(model, fused_lm_head=True), model.base_model, *temperature)
    return forward(labels, torch.zeros_like(labels).bool() if forecasts is None else forecasts, **inputs)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_the_same_scores_as_a_plain_softmax(temperature):
    model, (ids, labels) = fused(temperature), example()
    output = scored(model, labels, input_ids=ids)
    log_probs = torch.log_softmax(model(input_ids=ids).logits / temperature, dim=-1)
    real = labels != IGNORE
    chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert torch.allclose(output.log_probs[real], chosen[real], atol=1e-5)
    assert torch.allclose(output.entropy[real], entropy[real], atol=1e-5)
    assert torch.equal(output.is_top1[real].bool(), (log_probs.argmax(-1) == labels)[real])
    for values in (output.log_probs, output.entropy, output.is_top1):
        assert (values[~real] == 0).all()


@torch.no_grad()
def test_forecasts_are_scored_at_temperature_one():
    model, (ids, labels) = fused(0.5), example(1)
    forecasts = torch.zeros_like(labels, dtype=torch.bool)
    forecasts[0, 4:], forecasts[1, :3] = True, True
    output = scored(model, labels, 0.5, forecasts=forecasts, input_ids=ids)
    logits = model(input_ids=ids).logits
    logits[~forecasts] /= 0.5
    expected = torch.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    real = labels != IGNORE
    assert real[forecasts].any()
    assert real[~forecasts].any()
    assert torch.allclose(output.log_probs[real], expected[real], atol=1e-5)


def test_the_same_gradients_as_the_whole_head():
    ids, labels = example(2)
    gradients = []
    for sparse in (True, False):
        model = fused()
        if sparse:
            output = scored(model, labels, input_ids=ids)
        else:
            output = model(shift_labels=labels, input_ids=ids, fused_lm_head=True)
        output.log_probs.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_the_head_sees_no_other_position():
    model, (ids, labels) = fused(), example(3)
    shapes = []

    def forward(shift_labels, input_ids):
        hidden = model.base_model(input_ids=input_ids).last_hidden_state
        shapes.append((hidden.shape[:2], shift_labels.shape))
        zeros = torch.zeros(shift_labels.shape)
        return SimpleNamespace(log_probs=zeros, entropy=zeros, is_top1=zeros)

    ScoredForward(forward, model.base_model)(labels, labels > 0, input_ids=ids)
    count = int((labels != IGNORE).sum())
    assert shapes == [((1, count), (1, count))]


def test_nothing_to_score_still_gives_a_gradient_of_zero():
    model, (ids, labels) = fused(), example()
    output = scored(model, torch.full_like(labels, IGNORE), input_ids=ids)
    assert (output.log_probs == 0).all()
    output.log_probs.sum().backward()
    assert all((p.grad == 0).all() for p in model.parameters())


@torch.no_grad()
def test_the_hook_goes_also_after_an_error():
    model, (ids, labels) = fused(), example()
    plain = model(input_ids=ids).logits

    def broken(**_):
        raise ValueError("in between")

    with pytest.raises(ValueError, match="in between"):
        ScoredForward(broken, model.base_model)(labels, labels > 0, input_ids=ids)
    assert torch.equal(model(input_ids=ids).logits, plain)
