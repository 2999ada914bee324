"""[`VLLMEngine`]: vLLM in this process, a request a turn.

vLLM batches whatever requests it holds, a token of each at a time, and keeps the keys and values of past ones: the
prompt of a turn is the episode so far, so only what is new in it is computed.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cope_trl.rollout.endpoint import fit_limit, turn_seed
from cope_trl.rollout.generation import Generation
from cope_trl.spans import Spans


@dataclass(slots=True)
class _Open:
    """An episode: its seed, the turns asked for, and the request of the one being sampled."""

    seed: str
    turns: int = 0
    request: str | None = None


@dataclass(slots=True)
class RequestCounts:
    """Tokens of the requests a [`VLLMEngine`] has answered.

    Attributes:
        prompt: tokens of their prompts.
        cached: those of them whose keys and values were there already.
        sampled: tokens sampled.
    """

    prompt: int = 0
    cached: int = 0
    sampled: int = 0


class VLLMEngine:
    """A [`~cope_trl.rollout.generation.TurnEngine`] on a `vllm.LLM` in this process.

    Turns are seeded one by one. Equal seeds and histories give equal turns as far as vLLM computes equal logits for
    them, which in low precision may depend on the batch.

    Args:
        llm: the `vllm.LLM`. Nothing else may sample with it while an episode is open.
        sampling: arguments of `vllm.SamplingParams` but for the limit and the seed, which each turn has of its own.
        spans: notes where the time goes.

    Attributes:
        tokens: what has been sampled so far, and on how many tokens.
    """

    # Also tells its requests from those of other engines on the same `llm`.
    _numbers = itertools.count()

    def __init__(self, llm: Any, sampling: Mapping[str, Any], spans: Spans | None = None) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self.tokens = RequestCounts()
        self.spans = spans or Spans()
        self.context: int = llm.llm_engine.model_config.max_model_len
        self._vllm = llm.llm_engine
        self._parameters = SamplingParams
        # Only whole turns are of use, and only a stop string needs their text.
        self._sampling = {
            **sampling,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "detokenize": bool(sampling.get("stop")),
        }
        self._keys = itertools.count()
        self._open: dict[int, _Open] = {}
        self._requests: dict[str, tuple[_Open, Callable[[Generation | Exception], None]]] = {}

    def open(self, seed: str) -> int:
        """Begin an episode and return its key."""
        key = next(self._keys)
        self._open[key] = _Open(seed)
        return key

    def sample(
        self, episode: int, ids: Sequence[int], limit: int, deliver: Callable[[Generation | Exception], None]
    ) -> None:
        """Ask for the next turn of an episode (see [`~cope_trl.rollout.generation.TurnEngine`])."""
        state = self._open[episode]
        own = {"max_tokens": fit_limit(len(ids), limit, self.context), "seed": turn_seed(state.seed, state.turns)}
        name = f"turn-{next(self._numbers)}"
        # With its type, a prompt is ready for the engine, and nothing of it is rendered.
        prompt = {"type": "token", "prompt_token_ids": list(ids)}
        self._vllm.add_request(name, prompt, self._parameters(**self._sampling | own))
        self._requests[name] = (state, deliver)
        state.turns += 1
        state.request = name

    def advance(self) -> bool:
        """Sample a token for every turn under way, those that have just come in included."""
        if not self._requests:
            return False
        with self.spans("generate"):
            outputs = self._vllm.step()
        for output in outputs:
            # What somebody else has asked for and left behind is not for us.
            if output.finished and output.request_id in self._requests:
                self._finish(output)
        return True

    def close(self, episode: int) -> None:
        """End an episode; a turn being sampled is dropped. Its keys and values serve others while there is room."""
        request = self._open.pop(episode).request
        if request is not None and self._requests.pop(request, None) is not None:
            self._vllm.abort_request([request])

    def _finish(self, output: Any) -> None:
        state, deliver = self._requests.pop(output.request_id)
        state.request = None
        (sequence,) = output.outputs
        ids = list(sequence.token_ids)
        logprobs = None
        if sequence.logprobs is not None:
            logprobs = [entry[token].logprob for token, entry in zip(ids, sequence.logprobs, strict=True)]
        self.tokens.prompt += len(output.prompt_token_ids)
        self.tokens.cached += output.num_cached_tokens or 0
        self.tokens.sampled += len(ids)
        deliver(Generation(ids, logprobs))
