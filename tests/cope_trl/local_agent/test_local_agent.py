"""The agent built on the spot: demonstrations, tokenizer, model, warm start."""

import random

import pytest
from support import CountEnv
from transformers import AutoTokenizer

from cope_trl.chat import ChatFormat
from cope_trl.errors import ConfigError
from cope_trl.forecast.prompts import plan_ahead
from cope_trl.local_agent.demonstrations import demonstrate, demonstrations, with_plan
from cope_trl.local_agent.model import CHAT_TEMPLATE, build_model, build_tokenizer
from env_adapters import make

TASK = "tiny-train-00003"


def test_without_noise_the_expert_wins():
    env = make("household")
    messages = demonstrate(env, TASK, noise=0.0, max_turns=8, rng=random.Random(0))
    assert messages[:2] == env.standing_messages()
    assert [m["role"] for m in messages[2:]] == ["user", "assistant"] * ((len(messages) - 2) // 2)
    env.reset(options={"task_id": TASK})
    *_, last = [env.step(m["content"]) for m in messages[3::2]]
    assert last[2]
    assert last[4]["success"]


def test_noise_makes_detours_from_which_the_expert_goes_on():
    env, lengths = make("household"), []
    for seed in range(30):
        messages = demonstrate(env, TASK, noise=0.5, max_turns=40, rng=random.Random(seed))
        lengths.append(len(messages))
        env.reset(options={"task_id": TASK})
        *_, last = [env.step(m["content"]) for m in messages[3::2]]
        assert last[4]["success"], seed
    assert len(set(lengths)) > 3


def test_a_plan_lists_what_was_done_next():
    env = make("household")
    messages = demonstrate(env, TASK, noise=0.0, max_turns=8, rng=random.Random(0))
    actions = [m["content"].removeprefix("Action: ") for m in messages[3::2]]
    for seed in range(10):
        planned = with_plan(messages, 2, random.Random(seed))
        *history, request, plan = planned
        assert history == messages[: len(history)]
        done = (len(history) - 3) // 2
        expected = actions[done : done + 3]
        assert plan["content"] == "\n".join(expected)
        assert request["content"] == plan_ahead(len(expected), "list")


def test_demonstrations_are_reproducible():
    env, ids = make("household"), [f"tiny-train-{i:05d}" for i in range(5)]
    settings = {"noise": 0.5, "plan_share": 0.5, "horizon": 2, "max_turns": 8}
    assert demonstrations(env, ids, seed=1, **settings) == demonstrations(env, ids, seed=1, **settings)
    assert demonstrations(env, ids, seed=1, **settings) != demonstrations(env, ids, seed=2, **settings)


def test_an_environment_without_an_expert_is_refused():
    with pytest.raises(ConfigError, match=r"'count'.*no scripted expert"):
        demonstrate(CountEnv(), "count-1", noise=0.0, max_turns=3, rng=random.Random(0))


def test_tokenizer_encodes_any_text_and_its_template_extends_prefixes():
    tokenizer = build_tokenizer(["go to the table 1"] * 20, vocab_size=300)
    text = "unseen ünïcode 🎉 go to"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = ChatFormat(tokenizer)
    assert not chat.replaced
    assert not chat.merged
    assert chat.end_of_turn_id == tokenizer.eos_token_id
    assert "{% generation %}" in CHAT_TEMPLATE


def test_a_saved_agent_reads_and_writes_the_same_tokens(tmp_path):
    """`AutoTokenizer` must not replace the tokenizer by another class with other rules."""
    tokenizer = build_tokenizer(["Action: take watch 1 from desk 1"] * 20)
    build_model(tokenizer, hidden_size=32, layers=1).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Action: take watch 1 from desk 1", "You see 3.", "assistant\n\n  x"):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    messages = [{"role": "user", "content": "go 1"}, {"role": "assistant", "content": "take watch 1"}]
    assert loaded.apply_chat_template(messages, tokenize=False) == tokenizer.apply_chat_template(
        messages, tokenize=False
    )


def test_model_is_reproducible_and_fits_the_tokenizer():
    tokenizer = build_tokenizer(["go"] * 5)
    one, two = build_model(tokenizer, hidden_size=32, layers=1), build_model(tokenizer, hidden_size=32, layers=1)
    assert one.config.vocab_size == len(tokenizer)
    assert all((a == b).all() for a, b in zip(one.parameters(), two.parameters(), strict=True))
