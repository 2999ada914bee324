"""Sampling with a plain model against a greedy loop and a softmax written here."""

import pytest
import torch
from support import make_model

from cope_trl.rollout.generation import Generation, TransformersPolicy

PROMPTS = [[5, 6, 7, 8], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19], [300, 5]]
PAD = 0
NEVER = [419]


@pytest.fixture(scope="module")
def model():
    return make_model().eval()


@torch.no_grad()
def greedy(model, prompt, length, stop=()):
    """The most likely continuation, one whole forward a token, no padding, no cache."""
    ids = list(prompt)
    for _ in range(length):
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in stop:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3, 99])
def test_greedy_is_each_prompt_alone(model, batch_size):
    policy = TransformersPolicy(model, NEVER, PAD, temperature=0, batch_size=batch_size)
    assert policy(PROMPTS, 8) == [Generation(greedy(model, prompt, 8)) for prompt in PROMPTS]


def test_generation_stops_at_any_end_token_and_keeps_it(model):
    free = [greedy(model, prompt, 8) for prompt in PROMPTS]
    stops = [free[0][3], free[1][0]]
    policy = TransformersPolicy(model, stops, PAD, temperature=0)
    generations = policy(PROMPTS, 8)
    assert [g.ids for g in generations] == [greedy(model, prompt, 8, stops) for prompt in PROMPTS]
    assert len(generations[1].ids) == 1
    assert generations[0].ids[-1] in stops


def test_the_end_token_may_be_the_padding_token(model):
    """The real one is kept, the padding after it is not."""
    stop = greedy(model, PROMPTS[0], 3)[-1]
    policy = TransformersPolicy(model, [stop], stop, temperature=0)
    assert [g.ids for g in policy(PROMPTS, 8)] == [greedy(model, prompt, 8, [stop]) for prompt in PROMPTS]


def test_sampling_is_reproducible(model):
    policy = TransformersPolicy(model, NEVER, PAD)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(policy(PROMPTS, 8))
    assert drawn[0] == drawn[1] != drawn[2]
    assert all(len(g.ids) == 8 and g.logprobs is None for g in drawn[0])


@pytest.fixture
def opinionated(model):
    """A model whose own generation config asks for what a chat model's asks for, and more."""
    original = model.generation_config
    model.generation_config = type(original)(
        repetition_penalty=3.0,
        top_k=1,
        top_p=0.1,
        min_p=0.9,
        temperature=0.1,
        no_repeat_ngram_size=2,
        min_new_tokens=6,
    )
    yield model
    model.generation_config = original


def test_the_models_own_generation_config_changes_nothing(opinionated):
    free = greedy(opinionated, PROMPTS[0], 12)
    assert len(set(free)) < len(free)  # it does repeat itself
    policy = TransformersPolicy(opinionated, NEVER, PAD, temperature=0)
    assert policy(PROMPTS[:1], 12)[0].ids == free
    stop = free[2]
    assert TransformersPolicy(opinionated, [stop], PAD, temperature=0)(PROMPTS[:1], 12)[0].ids == free[:3]


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_samples_follow_the_softmax(opinionated, temperature):
    count = 4000
    prompt = [5, 6, 5, 6]
    with torch.no_grad():
        logits = opinionated(input_ids=torch.tensor([prompt])).logits[0, -1]
    expected = torch.softmax(logits.double() / temperature, dim=-1)
    torch.manual_seed(0)
    generations = TransformersPolicy(opinionated, NEVER, PAD, temperature=temperature)([prompt] * count, 1)
    seen = torch.bincount(torch.tensor([g.ids[0] for g in generations]), minlength=len(expected)) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((seen - expected).abs() <= 5 * error + 1e-3).all()
    assert (seen > 0).sum() > 20


def test_top_p_keeps_the_nucleus(model):
    with torch.no_grad():
        probabilities = torch.softmax(model(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1], dim=-1)
    order = probabilities.argsort(descending=True)
    nucleus = order[: int((probabilities[order].cumsum(0) < 0.5).sum()) + 1].tolist()
    torch.manual_seed(0)
    drawn = TransformersPolicy(model, NEVER, PAD, top_p=0.5)([PROMPTS[0]] * 500, 1)
    assert {g.ids[0] for g in drawn} <= set(nucleus)
    assert len({g.ids[0] for g in drawn}) > 1


def test_no_prompts(model):
    assert TransformersPolicy(model, NEVER, PAD)([], 4) == []


def test_the_mode_is_left_alone(model):
    TransformersPolicy(model, NEVER, PAD)([[5]], 1)
    assert not model.training
