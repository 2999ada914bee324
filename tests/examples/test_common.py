"""The benchmarks' episodes have the lengths asked for, whoever plays them."""

import random

import common
import pytest
import torch
from transformers import Qwen2ForCausalLM

SHAPE = common.EpisodeShape(turns=3, observation=12, thought=5, action=4, instruction=6)
CPU = {"use_cpu": True, "bf16": False}


@pytest.fixture(scope="module")
def tokenizer():
    return common.word_tokenizer()


def replies(episode, tokenizer):
    """What the policy said, turn by turn."""
    return [tokenizer.decode(episode.ids[turn.start : turn.end]) for turn in episode.turns]


def test_a_word_is_a_token(tokenizer):
    assert len(set(common.WORDS)) == len(common.WORDS) == 256
    for word in common.WORDS:
        assert len(tokenizer(f" {word}", add_special_tokens=False)["input_ids"]) == 1


def test_scripted_episodes(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(common.qwen2_config(64, 1))
    script = common.half_winning_script(SHAPE, 1)
    trainer = common.build_trainer(model, SHAPE, str(tmp_path), 2, script, tokenizer, max_steps=1, **CPU)
    trainer.train()
    trainer.close()
    won, lost = trainer.trajectories
    assert (won.success, lost.success) == (True, False)
    for row, episode in enumerate((won, lost)):
        said = [script(row, turn) + "<|im_end|>" for turn in range(SHAPE.turns)]
        assert replies(episode, tokenizer) == said
        # The words, `Thought` and `:`, `Action` and `:`, the end of the turn.
        assert [turn.end - turn.start for turn in episode.turns] == [SHAPE.thought + SHAPE.action + 5] * SHAPE.turns
        observations = [episode.first_observation, *(turn.observation for turn in episode.turns)]
        assert [len(text.split()) for text in observations] == [SHAPE.observation] * (SHAPE.turns + 1)


def test_a_model_recites_and_tosses_a_coin(tmp_path, tokenizer):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(common.qwen2_config(64, 2, tied=False))
    common.make_reciting(model, tokenizer, SHAPE)
    trainer = common.build_trainer(model, SHAPE, str(tmp_path), 8, None, tokenizer, **CPU)
    played = trainer.evaluate_tasks(common.task_rows(SHAPE, 8))
    trainer.close()
    words = random.Random(0).sample(common.WORDS, 8)
    said = f"{' '.join(words[:5])} Action: {{}} {' '.join(words[5:])}<|im_end|>"
    for episode in played:
        assert set(replies(episode, tokenizer)) <= {said.format("win"), said.format("wait")}
        assert len(episode.turns) == SHAPE.turns
        assert episode.success == (replies(episode, tokenizer)[-1] == said.format("win"))
    assert 0 < sum(episode.success for episode in played) < 8


def test_what_cannot_recite_is_refused(tokenizer):
    tied = Qwen2ForCausalLM(common.qwen2_config(64, 1))
    with pytest.raises(ValueError, match=r"tied LM head, which cannot recite; use `tie_word_embeddings=False`"):
        common.make_reciting(tied, tokenizer, SHAPE)
    model = Qwen2ForCausalLM(common.qwen2_config(64, 1, tied=False))
    long = common.EpisodeShape(thought=250, action=8)
    with pytest.raises(ValueError, match="at most 256 words"):
        common.make_reciting(model, tokenizer, long)
