"""What samples turns, behind two signatures: token ids in, sampled token ids out.

- A [`Policy`] answers a batch of prompts at once, so the episodes of a process advance in lock step.
- A [`TurnEngine`] takes each turn when its episode is ready for it and delivers it when it is done.

The trainer supplies either (see `cope_trl/engine_trainer.py`); [`TransformersPolicy`] is the simplest policy: it fills
the cache anew at every turn and serves models that nothing faster can take.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Generation:
    """One sampled turn.

    Attributes:
        ids: (N,) sampled ids, the stop token included when one was sampled.
        logprobs: (N,) natural-log probabilities of those ids under the sampling distribution, or `None`.
    """

    ids: list[int]
    logprobs: list[float] | None = None


class Policy(Protocol):
    """Samples one turn for each prompt.

    Args:
        prompts: B lists of token ids, each a whole history with its generation prompt.
        max_new_tokens: limit on the ids sampled for each prompt.

    Returns:
        B generations, in the order of the prompts.
    """

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]: ...


class TurnEngine(Protocol):
    """Samples the turns of episodes that come and go, each at its own time. One thread calls it.

    `deliver` is called once a turn, from any thread, with the turn, or with the exception that ends the run.
    """

    def open(self, seed: str) -> int:
        """Begin an episode and return its key. Equal seeds and histories give equal turns, whatever runs beside."""
        ...

    def sample(
        self, episode: int, ids: Sequence[int], limit: int, deliver: Callable[[Generation | Exception], None]
    ) -> None:
        """Ask for the next turn of an episode.

        Args:
            episode: its key.
            ids: its whole history with the generation prompt.
            limit: most ids to sample.
            deliver: takes the turn.
        """
        ...

    def advance(self) -> bool:
        """Do a piece of the work asked for; false when there is none for the calling thread."""
        ...

    def close(self, episode: int) -> None:
        """End an episode: what is kept for it may go, and a turn still being sampled is not delivered."""
        ...


class TransformersPolicy:
    """Samples with `model.generate`, prompts left-padded into batches.

    Args:
        model: causal language model; call `eval()` on it first, its mode is left as it is.
        eos_token_ids: ids that end a turn.
        pad_token_id: id used for padding.
        temperature: sampling temperature; 0 is greedy decoding.
        top_p: nucleus sampling mass.
        batch_size: prompts in one forward pass; `None` takes all at once.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        temperature: float = 1.0,
        top_p: float = 1.0,
        batch_size: int | None = None,
    ) -> None:
        self.model = model
        self.eos_token_ids = sorted(eos_token_ids)
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "min_p": 0.0}
        # What is left open here, `generate` takes from the model's own generation config: a chat model's repetition
        # penalty would change both modes.
        neutral = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0}
        self.generation_kwargs = neutral | ({"do_sample": False} if temperature == 0 else sampling)

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        step = self.batch_size or max(len(prompts), 1)
        generations = []
        for start in range(0, len(prompts), step):
            generations.extend(self._generate(prompts[start : start + step], max_new_tokens))
        return generations

    def _generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        width = max(map(len, prompts))
        device = self.model.device
        input_ids = torch.full((len(prompts), width), self.pad_token_id, dtype=torch.long)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, width - len(prompt) :] = torch.tensor(list(prompt))
            attention_mask[row, width - len(prompt) :] = 1
        output = self.model.generate(
            input_ids=input_ids.to(device),
            attention_mask=attention_mask.to(device),
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens,
                eos_token_id=self.eos_token_ids,
                pad_token_id=self.pad_token_id,
                disable_compile=True,
                **self.generation_kwargs,
            ),
        )
        return [Generation(self._until_stop(row)) for row in output[:, width:].tolist()]

    def _until_stop(self, ids: list[int]) -> list[int]:
        for position, token in enumerate(ids):
            if token in self.eos_token_ids:
                return ids[: position + 1]
        return ids
