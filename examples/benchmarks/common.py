"""Long synthetic episodes that the benchmarks share, and policies that make them as long as is asked.

A benchmark compares costs, so its episodes must have the lengths it asks for. Here one word is one token, every
episode has as many turns as its [`EpisodeShape`] says, and the policy is either scripted (no model is asked; for the
cost of an update) or a model that recites (a real model of any size, whose constructed LM head makes it sample the
reply of the shape; for the cost of a rollout on whatever engine).

Used by the scripts of this folder: `from common import …` works in a script that is run from any place.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerFast, PrinterCallback, Qwen2Config

from cope_trl import CoPEConfig, CoPETrainer
from cope_trl.chat import ChatFormat
from cope_trl.forecast.prompts import plan_ahead
from cope_trl.local_agent.model import build_tokenizer
from cope_trl.rollout.generation import Generation
from env_adapters import Action, Outcome, ReActText, TextEnv

WORDS = [
    a + b
    for a in ("ba", "ki", "lo", "mu", "re", "sa", "ti", "vo", "du", "fe", "ga", "ho", "ju", "ne", "pi", "zu")
    for b in (
        "dan",
        "fer",
        "gol",
        "hin",
        "jut",
        "kap",
        "lem",
        "nor",
        "bis",
        "cor",
        "tam",
        "vel",
        "wig",
        "rud",
        "sol",
        "pax",
    )
]

# ---------------------------------------------------------------- episodes


@dataclass(frozen=True)
class EpisodeShape:
    """Lengths of one episode, in words, which are tokens.

    Attributes:
        turns: policy turns.
        observation: words of an observation.
        thought: words of a reply before its action.
        action: words of the action, the first of which says whether the episode is won.
        instruction: words of the standing instruction.
    """

    turns: int = 15
    observation: int = 100
    thought: int = 24
    action: int = 8
    instruction: int = 60


def words(count: int, rng: random.Random) -> str:
    """That many words, drawn at random."""
    return " ".join(rng.choices(WORDS, k=count))


def reply(shape: EpisodeShape, won: bool, rng: random.Random) -> str:
    """A policy turn; the last one's first action word decides the episode."""
    return f"Thought: {words(shape.thought, rng)} Action: {'win' if won else 'wait'} {words(shape.action - 1, rng)}"


def long_env(shape: EpisodeShape) -> type[TextEnv]:
    """An environment whose episodes have that shape: the same observations for the same task, whatever is done."""

    class LongEnv(TextEnv):
        name, protocol, acknowledgement = "long", ReActText(), "OK."
        instruction = words(shape.instruction, random.Random(0))
        max_turns = max_turns_eval = shape.turns

        @classmethod
        def tasks(cls, split: str) -> list:
            return []

        def _begin(self, task_id: str | None, seed: int | None) -> str:
            self.turn, self.rng = 0, random.Random(task_id)
            return words(shape.observation, self.rng)

        def _act(self, action: Action) -> Outcome:
            self.turn += 1
            last = self.turn == shape.turns
            return Outcome(
                words(shape.observation, self.rng), success=last and action.text.startswith("win"), done=last
            )

    return LongEnv


def task_rows(shape: EpisodeShape, count: int) -> Dataset:
    """That many different tasks of [`long_env`]."""
    prompt = long_env(shape).standing_messages()
    return Dataset.from_list(
        [{"prompt": prompt, "environment": "long", "task_id": str(index), "family": ""} for index in range(count)]
    )


def word_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer to which every word is one token, those of the plan-ahead request among them."""
    texts = [f"Thought: {' '.join(WORDS)} Action: win wait {plan_ahead(k, 'list')}" for k in range(1, 20)]
    texts += [f"{word} {word}" for word in WORDS]
    return build_tokenizer(texts * 6, vocab_size=2048)


# ---------------------------------------------------------------- policies


def qwen2_config(hidden: int, layers: int, vocab_size: int = 2048, tied: bool = True, **changes: Any) -> Qwen2Config:
    """A small Qwen2 with heads 32 wide, two query heads to a key-value head."""
    heads = max(2, hidden // 32)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": tied,
        **changes,
    }
    return Qwen2Config(**sizes)


Script = Callable[[int, int], str]


def half_winning_script(shape: EpisodeShape, won: int) -> Script:
    """`script(row, turn)` of replies that all differ; the first `won` rows of a batch win."""

    def script(row: int, turn: int) -> str:
        return reply(shape, row < won, random.Random(f"{row}-{turn}"))

    return script


class ScriptedTrainer(CoPETrainer):
    """A `CoPETrainer` whose policy says what is scripted, so that a rollout costs next to nothing.

    Attributes:
        script: what row i of a batch says at turn t.
    """

    script: Script

    def _sample_turn(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        assert self.chat is not None
        encode, end = self.chat.tokenizer, self.chat.end_of_turn_id
        # The instruction, its acknowledgement and the first observation are three turns; each reply adds two.
        turns = [(list(prompt).count(end) - 3) // 2 for prompt in prompts]
        replies = [self.script(row, turn) for row, turn in enumerate(turns)]
        return [Generation([*encode(text, add_special_tokens=False)["input_ids"], end]) for text in replies]


@torch.no_grad()
def make_reciting(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, shape: EpisodeShape, certainty: float = 40.0
) -> None:
    """Have a model sample replies of a shape, with a coin toss for the word that wins.

    The embeddings stand out of the residual stream, and the LM head gives each token of the reply a logit on the
    embedding of the token before it. Every layer still computes what it would compute.

    Args:
        model: Llama-like, with an LM head of its own (`tie_word_embeddings=False`).
        tokenizer: of [`word_tokenizer`].
        shape: of the replies.
        certainty: logit of the next token; all others' are near 0.

    Raises:
        ValueError: the LM head is tied, or a reply would need a token twice.
    """
    if model.config.tie_word_embeddings:
        raise ValueError("`model` has a tied LM head, which cannot recite; use `tie_word_embeddings=False`.")
    count = shape.thought + shape.action - 1
    if count > len(WORDS):
        raise ValueError(
            f"`shape` has replies of {count} words; a model can recite at most {len(WORDS)} words, each once."
        )
    said = random.Random(0).sample(WORDS, count)
    text = f"{' '.join(['', *said[: shape.thought]]).strip()} Action: {{}} {' '.join(said[shape.thought :])}"
    win, wait = (tokenizer(text.format(word), add_special_tokens=False)["input_ids"] for word in ("win", "wait"))
    chat = ChatFormat(tokenizer)
    chain = [chat.generation_prompt_ids[-1], *win, chat.end_of_turn_id]
    if len(set(chain)) < len(chain):
        raise ValueError(
            f"`tokenizer` writes {text!r} with a token twice, which cannot be recited; use another shape."
        )
    fork = next(i for i, (one, other) in enumerate(zip(win, wait, strict=True)) if one != other)
    steps = [*itertools.pairwise(chain), (win[fork - 1], wait[fork]), (wait[fork], wait[fork + 1])]
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embeddings.normal_()
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.mul_(0.01)
    for _, token in steps:
        head[token] = 0
    for before, token in steps:
        head[token] += (embeddings[before] * certainty / embeddings[before].float().square().sum()).to(head.dtype)


def build_trainer(
    model: Any,
    shape: EpisodeShape,
    folder: str,
    episodes: int,
    script: Script | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> CoPETrainer:
    """A trainer whose batch is one micro-batch and one group, and that writes nothing but its logs.

    Args:
        model: the policy, or a folder.
        shape: of the episodes.
        folder: `output_dir`.
        episodes: of a batch; at least 2, which GRPO asks of a group.
        script: what is said; without it the model samples.
        tokenizer: [`word_tokenizer`]'s, made anew when `None`.
        changes: other arguments of [`~cope_trl.CoPEConfig`].
    """
    settings = {
        "output_dir": folder,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "save_trajectories": False,
        "per_device_train_batch_size": episodes,
        "per_device_eval_batch_size": episodes,
        "num_generations": episodes,
        "max_turns": shape.turns,
        "max_turns_eval": shape.turns,
        "max_completion_length": 32_000,
        "beta": 0.0,
        "forecast_grad_norm_steps": 0,
        "learning_rate": 1e-9,  # the same weights, hence the same work, in every step
        "optim": "sgd",
        **changes,
    }
    trainer = (CoPETrainer if script is None else ScriptedTrainer)(
        model=model,
        args=CoPEConfig(**settings),
        train_dataset=task_rows(shape, episodes),
        processing_class=tokenizer or word_tokenizer(),
        environments={"long": long_env(shape)},
    )
    trainer.remove_callback(PrinterCallback)
    if script is not None:
        trainer.script = script
    return trainer
