"""Which models keep their cache, decided from configurations of real architectures without their weights."""

from types import SimpleNamespace

import pytest
import torch
from support import make_model
from transformers import AutoConfig, AutoModelForCausalLM

from cope_trl.rollout.cache_support import cache_obstacle, masked_attention

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}


def build(kind, attention=None, **changes):
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **{**SMALL, **changes})
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


@pytest.mark.parametrize(
    ("kind", "changes", "longest", "obstacle"),
    [
        ("qwen2", {"num_key_value_heads": 2}, None, None),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2}, 500, None),
        ("mistral", {"sliding_window": 16, "num_key_value_heads": 2}, 16, None),
        ("mistral", {"sliding_window": 16, "num_key_value_heads": 2}, 17, "sliding window of 16 tokens"),
        ("mistral", {"sliding_window": 16, "num_key_value_heads": 2}, None, "sliding window of 16 tokens"),
        ("gemma3_text", {"sliding_window": 16, "head_dim": 8, "num_key_value_heads": 2}, 100, "its cache drops"),
        ("mamba", {"state_size": 4}, None, "state cannot be continued"),
        ("qwen3_next", {"num_hidden_layers": 4, "head_dim": 8, "num_key_value_heads": 2}, None, "linear attention"),
        ("bloom", {"n_head": 4, "n_layer": 2}, None, "no `position_ids`"),
    ],
)
def test_architectures(kind, changes, longest, obstacle):
    found = cache_obstacle(build(kind, **changes), longest)
    assert found is None if obstacle is None else obstacle in found


def test_virtual_tokens_stand_in_the_way_and_other_adapters_do_not():
    peft = pytest.importorskip("peft")
    lora = peft.get_peft_model(make_model(), peft.LoraConfig(target_modules=["q_proj"]))
    assert cache_obstacle(lora, None) is None
    prompt = peft.get_peft_model(make_model(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    assert "virtual tokens" in cache_obstacle(prompt, None)


def test_attention_without_a_mask_and_no_other():
    model = build("qwen2", num_key_value_heads=2)
    model.config._attn_implementation = "flash_attention_2"
    assert cache_obstacle(model, None) is None  # it is exchanged for SDPA
    model._supports_sdpa = False
    assert "attention 'flash_attention_2' takes no 4-D mask" in cache_obstacle(model, None)


@pytest.mark.parametrize("own", ["sdpa", "eager", "sdpa_branched"])
def test_attention_that_takes_masks_is_left_alone(own):
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(_attn_implementation=own)))
    with masked_attention(model):  # has no `set_attn_implementation` to call
        pass


def test_other_attention_is_exchanged_for_the_time_and_put_back():
    model = make_model(attn_implementation="flex_attention")

    def work():
        with masked_attention(model):
            assert model.config._attn_implementation == "sdpa"
            raise OSError("inside")

    with pytest.raises(OSError, match="inside"):
        work()
    assert model.config._attn_implementation == "flex_attention"
