"""Row sampling against the inverse of the distribution function written out, and against `generate`'s own warpers."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TopKLogitsWarper, TopPLogitsWarper

from cope_trl.rollout.sampling import RowSampler

LOGITS = torch.tensor([[0.3, -1.0, 2.0, 0.0], [5.0, 5.0, -2.0, 1.0]])


def by_hand(logits, number):
    """The token at which the running sum of the softmax passes `number`."""
    weights = [float(value) for value in logits.double().exp()]
    reached, total = 0.0, sum(weights)
    for token, weight in enumerate(weights):
        reached += weight
        if reached > number * total:
            return token
    raise AssertionError


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=9),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([0.3, 1.0, 1.7]),
)
def test_a_token_is_where_the_summed_probabilities_pass_the_number(values, number, temperature):
    logits = torch.tensor([values])
    token = RowSampler(temperature)(logits, [number])[0]
    expected = by_hand(logits[0] / temperature, number)
    if token != expected:  # only on the boundary itself, where float32 decides
        sums = (logits[0].double() / temperature).softmax(-1).cumsum(-1)
        assert abs(sums[min(token, expected)] - number) < 1e-6


def test_the_frequencies_are_the_probabilities():
    numbers = [(i + 0.5) / 4000 for i in range(4000)]
    tokens = torch.tensor(RowSampler()(LOGITS[:1].expand(4000, -1), numbers))
    share = torch.bincount(tokens, minlength=4) / 4000
    assert torch.allclose(share, LOGITS[0].softmax(-1), atol=1e-3)


def test_a_row_does_not_depend_on_the_others():
    generator = random.Random(0)
    numbers = [generator.random() for _ in range(50)]
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(1))
    together = RowSampler(0.8, top_p=0.9)(logits, numbers)
    assert together == [RowSampler(0.8, top_p=0.9)(logits[i : i + 1], numbers[i : i + 1])[0] for i in range(50)]


def test_temperature_0_takes_the_most_likely():
    assert RowSampler(0)(LOGITS, [0.99, 0.99]) == [2, 0]


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {2, 0}),
        ({"top_p": 0.5}, {2}),
        ({"min_p": 0.15}, {2, 0}),
        ({"top_k": 0, "top_p": 1.0, "min_p": None}, {0, 1, 2, 3}),
        ({"top_k": None, "min_p": 0.0}, {0, 1, 2, 3}),
    ],
)
def test_tokens_that_are_cut_off_are_never_sampled(settings, allowed):
    numbers = [i / 500 for i in range(500)]
    assert set(RowSampler(**settings)(LOGITS[:1].expand(500, -1), numbers)) == allowed


def test_cuts_come_in_the_order_of_generate():
    """Top-k first: the nucleus is one of the tokens it left."""
    logits = torch.tensor([[0.0, 0.1, 0.2, 0.3]])
    warped = LogitsProcessorList([TopKLogitsWarper(2), TopPLogitsWarper(0.52)])(None, logits)
    kept = set(torch.nonzero(warped[0] > -torch.inf).flatten().tolist())
    numbers = [i / 100 for i in range(100)]
    assert set(RowSampler(top_k=2, top_p=0.52)(logits.expand(100, -1), numbers)) == kept == {3}


def test_the_ends_of_the_range():
    """0 skips tokens of probability 0 at the front; just below 1 stays inside the vocabulary."""
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])
    assert RowSampler()(logits.expand(2, -1), [0.0, 1 - 2**-53]) == [1, 2]


def test_rare_tokens_are_told_apart():
    """Each of the 19,900 rare tokens has a probability of 1e-9: in float32, sums near 1 are steps of 6e-8 apart."""
    logits = torch.zeros(1, 20_000)
    logits[0, :100] = 16.0
    numbers = [1 - 1.5e-5 + i * 1.5e-8 for i in range(500)]
    tokens = RowSampler()(logits.expand(500, -1), numbers)
    assert min(tokens) >= 100
    assert len(set(tokens)) == 500
    assert tokens == sorted(tokens)
