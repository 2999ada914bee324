"""Which engine a model gets: every obstacle, the traits of real configurations, and that the choice is right."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cope_trl.errors import ConfigError
from cope_trl.forecast.attention import BRANCHED, use_branched_attention
from cope_trl.forecast.engines import choose_engine, obstacle, scoring_traits
from cope_trl.forecast.packing import pack_rows
from cope_trl.forecast.scoring import score_separate, score_shared
from cope_trl.model_traits import ModelTraits
from cope_trl.types import Branch

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
HEAD = {"head_dim": 8}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}


def config_of(kind, **changes):
    return AutoConfig.for_model(kind, **{**SMALL, **changes})


def traits_of(kind, attn_implementation=None, **changes):
    with torch.device("meta"):  # the traits need the modules, not their weights
        model = AutoModelForCausalLM.from_config(config_of(kind, **changes), attn_implementation=attn_implementation)
    return scoring_traits(model)


FULL = ModelTraits("sdpa")
WINDOWED = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "changes", "expected"),
    [
        ("qwen2", {}, FULL),
        ("qwen2", {"sliding_window": 16}, FULL),  # switched off, as in the published configurations
        ("qwen2", WINDOWED, ModelTraits("sdpa", sliding_window=16)),
        ("qwen2", {"attn_implementation": "eager"}, ModelTraits("eager")),
        ("qwen3", HEAD, FULL),
        ("llama", {}, FULL),
        ("mistral", {"sliding_window": None}, FULL),
        ("mistral", {"sliding_window": 16}, ModelTraits("sdpa", sliding_window=16)),
        ("phi3", {"sliding_window": 20}, ModelTraits("sdpa", sliding_window=20)),
        ("phi", {"num_key_value_heads": 4}, ModelTraits("sdpa", plain_head=False)),  # its head has a bias
        ("gemma2", {"sliding_window": 16, **HEAD}, ModelTraits("eager", sliding_window=16, plain_head=False)),
        ("gemma3_text", {"sliding_window": 16, **HEAD}, ModelTraits("sdpa", sliding_window=16)),
        ("gemma3_text", {"sliding_window": 16, "layer_types": ["full_attention"] * 2, **HEAD}, FULL),
        ("llama4_text", {"attention_chunk_size": 32, **HEAD}, ModelTraits("sdpa", sliding_window=32)),
        ("qwen3_5_text", {"num_hidden_layers": 4, **HEAD}, ModelTraits("sdpa", recurrent=True, replaceable=False)),
        ("qwen3_next", {"num_hidden_layers": 4, **HEAD}, ModelTraits("sdpa", recurrent=True, replaceable=False)),
        ("gpt2", GPT, FULL),
        ("stablelm", {}, ModelTraits("sdpa", replaceable=False)),
    ],
)
def test_traits(kind, changes, expected):
    assert traits_of(kind, **changes) == expected


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba", {}),
        ("rwkv", {"attention_hidden_size": 32}),
        ("bloom", {}),
        ("mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
        ("falcon", {"alibi": True}),
    ],
)
def test_models_that_a_branch_cannot_continue_in(kind, changes):
    traits = traits_of(kind, **changes)
    assert traits.recurrent or not traits.positions
    assert choose_engine("auto", traits, 100, 1.0)[0] == "separate"


def test_a_multimodal_configuration_is_read_through_its_text_part():
    text = config_of("qwen2", **WINDOWED)
    text._attn_implementation = "sdpa"

    class Composite:
        config = SimpleNamespace(get_text_config=lambda: text)
        _supports_attention_backend = True

        def get_output_embeddings(self):
            return torch.nn.Linear(2, 2, bias=True)

        def forward(self, input_ids, position_ids): ...

    assert scoring_traits(Composite()) == ModelTraits("sdpa", sliding_window=16, plain_head=False)


def test_mixture_of_experts_is_told_by_the_trainer():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of("qwen2"))
    assert scoring_traits(model, True) == ModelTraits("sdpa", mixture_of_experts=True)


@pytest.mark.parametrize(
    ("traits", "longest", "temperature", "reason"),
    [
        (FULL, None, 1.0, None),
        (ModelTraits("eager"), 100, 1.0, None),
        (ModelTraits("flex_attention"), 100, 0.7, None),
        (ModelTraits("flash_attention_2"), 100, 1.0, "attention 'flash_attention_2' takes no 4-D mask"),
        (ModelTraits("kernels-community/flash-attn"), 100, 1.0, "takes no 4-D mask"),
        (ModelTraits("eager_branched"), 100, 1.0, None),
        (ModelTraits("sdpa", replaceable=False), 100, 1.0, "do not pass keyword arguments on to their attention"),
        (ModelTraits("sdpa", recurrent=True), 100, 1.0, "layers without softmax attention"),
        (ModelTraits("sdpa", positions=False), 100, 1.0, "takes no `position_ids`"),
        (ModelTraits("sdpa", sliding_window=99), 100, 1.0, "sliding window of 99 tokens is shorter .* (100)"),
        (ModelTraits("sdpa", sliding_window=100), 100, 1.0, None),
        (ModelTraits("sdpa", sliding_window=10**6), None, 1.0, "sliding window of 1000000 tokens"),
        (ModelTraits("sdpa", mixture_of_experts=True), 100, 1.0, "mixture of experts"),
        (ModelTraits("sdpa", plain_head=False), 100, 1.0, None),
        (ModelTraits("sdpa", plain_head=False), 100, 0.7, "bias or a soft cap, and the rollout temperature is 0.7"),
    ],
)
def test_obstacles(traits, longest, temperature, reason):
    problem = obstacle(traits, longest, temperature)
    engine, why = choose_engine("auto", traits, longest, temperature)
    assert choose_engine("separate", traits, longest, temperature)[0] == "separate"
    if reason is None:
        assert problem is None
        assert engine == "shared_prefix"
        assert choose_engine("shared_prefix", traits, longest, temperature)[0] == "shared_prefix"
        return
    for part in reason.split(" .* "):
        assert part in problem
    assert engine == "separate"
    assert problem in why
    with pytest.raises(ConfigError) as refused:
        choose_engine("shared_prefix", traits, longest, temperature)
    assert "`forecast_engine` is 'shared_prefix', but " + problem in str(refused.value)
    assert '"auto"' in str(refused.value)


# ---------------------------------------------------------------- the choice is right: both engines agree


def forward_of(model):
    def forward(shift_labels, forecasts, **inputs):
        log_probs = torch.log_softmax(model(**inputs, use_cache=False).logits.float(), dim=-1)
        chosen = log_probs.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=chosen, is_top1=log_probs.argmax(-1) == shift_labels)

    return forward


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", HEAD),
        ("llama", {}),
        ("mistral", {"sliding_window": 256}),
        ("gemma2", {"sliding_window": 256, "query_pre_attn_scalar": 8, **HEAD}),
        ("gemma3_text", {"sliding_window": 256, **HEAD}),
        ("phi3", {"sliding_window": 256}),
        ("gpt_neox", {}),
        ("gpt2", GPT),
        ("mixtral", {}),
    ],
)
@torch.no_grad()
def test_where_the_prefix_may_be_shared_both_engines_agree(kind, changes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind, **changes)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(6.0)
    traits = scoring_traits(model)
    assert choose_engine("auto", traits, 256, 1.0)[0] == "shared_prefix"
    ids = torch.randint(3, 64, (2, 20))
    mask = torch.ones_like(ids)
    mask[1, 16:] = 0
    if kind != "gpt2":  # learned absolute positions count the padding, as they do in the policy's own forward
        mask[0, :4] = 0

    def branch(size):
        half = size // 2
        tokens = tuple(torch.randint(3, 64, (size,)).tolist())
        return Branch(tokens, (0,) * half + (1,) * (size - half), (-1,) * half + (0,) * (size - half))

    branches = [[(5, branch(6)), (9, branch(4)), (15, branch(7))], [(3, branch(5)), (12, branch(5))]]
    rows = pack_rows(branches, [0.5, 0.5], "mean")
    alone = score_separate(forward_of(model), ids, mask, rows, 0, 3, 2)
    expected = alone.log_probs[alone.weight > 0]
    assert expected.std() > 0.05
    for attention in {traits.attention, "eager"}:
        model.set_attn_implementation(attention)
        assert use_branched_attention(model)
        shared = score_shared(forward_of(model), ids, mask, rows, None, BRANCHED[attention])[2]
        # The one lists windows by length, the other by row.
        assert torch.allclose(shared.log_probs[shared.weight > 0].sort().values, expected.sort().values, atol=2e-5), (
            attention
        )
