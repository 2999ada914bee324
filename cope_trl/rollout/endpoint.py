"""Sampling from an OpenAI-compatible server, in token ids.

vLLM's own server takes and returns ids at `/v1/completions` (`return_token_ids`), so that an episode played through it
holds exactly what was sampled. Servers that only speak text cannot be used.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import urllib3

from cope_trl.errors import RolloutError
from cope_trl.rollout.generation import Generation

# A server that is busy, restarting or briefly out of reach; anything else it says would say it again.
_PASSING = (429, 500, 502, 503, 504)


def fit_limit(length: int, limit: int, context: int | None) -> int:
    """The limit to send with a prompt of so many tokens: prompt and limit together have to fit into the context."""
    return limit if context is None else max(1, min(limit, context - length))


def turn_seed(seed: str, turn: int) -> int:
    """Seed of one turn of an episode, in [0, 2^63): the same on every machine and in every run."""
    return int.from_bytes(hashlib.sha256(f"{seed}-{turn}".encode()).digest()[:8], "big") >> 1


def fit_context(prompts: Sequence[Sequence[int]], limit: int, context: int | None) -> dict[int, list[int]]:
    """Which prompts to send under which limit: a server refuses a request if prompt and limit exceed its context.

    Args:
        prompts: B lists of token ids.
        limit: most ids to sample for any of them.
        context: longest sequence the server takes in tokens, or `None`.

    Returns:
        Indices of prompts by limit; a single entry unless some prompt is close to the context's end.
    """
    batches: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        batches.setdefault(fit_limit(len(prompt), limit, context), []).append(index)
    return batches


class EndpointPolicy:
    """Samples with a vLLM server (`vllm serve`).

    Args:
        base_url: address of the API, for example `"http://localhost:8000/v1"`.
        eos_token_ids: ids that end a turn.
        model: name under which the server knows the model; `None` takes the first one it serves.
        temperature: sampling temperature; 0 is greedy decoding.
        top_p: nucleus sampling mass.
        api_key: key of the server, where it asks for one.
        timeout: seconds to wait for an answer, which holds a turn of the whole batch.
        attempts: requests made in all, with growing pauses, where the server fails in passing.
        sampling: further fields of a request, in the server's own names; they override those above.
        connections: to keep open; as many as requests are made at a time.

    Attributes:
        model: name of the model at the server.
        context: longest sequence the server takes in tokens, or `None` where it does not say.

    Raises:
        [`RolloutError`]: the server cannot be reached, refuses, or returns no token ids.
    """

    def __init__(
        self,
        base_url: str,
        eos_token_ids: Sequence[int],
        model: str | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        api_key: str | None = None,
        timeout: float = 600.0,
        attempts: int = 5,
        sampling: Mapping[str, Any] | None = None,
        connections: int = 1,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.sampling = {
            "temperature": temperature,
            "top_p": top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "stop_token_ids": sorted(eos_token_ids),
            **(sampling or {}),
        }
        retries = urllib3.Retry(
            attempts - 1, status_forcelist=_PASSING, allowed_methods=None, backoff_factor=0.5, raise_on_status=False
        )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._pool = urllib3.PoolManager(maxsize=connections, retries=retries, timeout=timeout, headers=headers)
        served = self._ask("GET", "/models")["data"]
        chosen = next((entry for entry in served if model in (None, entry["id"])), None)
        if chosen is None:
            names = [entry["id"] for entry in served]
            raise RolloutError(f"`model` is {model!r}, but {self.base_url} serves {names}. Name one of them.")
        self.model: str = chosen["id"]
        self.context: int | None = chosen.get("max_model_len")

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        generations: dict[int, Generation] = {}
        for limit, rows in fit_context(prompts, max_new_tokens, self.context).items():
            sampled = self._complete([list(prompts[row]) for row in rows], limit)
            generations.update(zip(rows, sampled, strict=True))
        return [generations[row] for row in range(len(prompts))]

    def sample(self, prompt: Sequence[int], limit: int, seed: int) -> Generation:
        """Sample one turn; may be called from several threads.

        Args:
            prompt: token ids.
            limit: most ids to sample.
            seed: decides them.

        Returns:
            The turn.

        Raises:
            [`RolloutError`]: as for the class.
        """
        (generation,) = self._complete([list(prompt)], fit_limit(len(prompt), limit, self.context), seed=seed)
        return generation

    def _complete(self, prompts: list[list[int]], limit: int, **fields: Any) -> list[Generation]:
        body = {"model": self.model, "prompt": prompts, "max_tokens": limit, "logprobs": 0, "return_token_ids": True}
        answer = self._ask("POST", "/completions", body | self.sampling | fields)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if any(choice.get("token_ids") is None for choice in choices):
            raise RolloutError(
                f"{self.base_url} returned text without token ids; use a server that knows `return_token_ids`, "
                "such as `vllm serve` 0.22 or later."
            )
        return [Generation(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        try:
            response = self._pool.request(method, self.base_url + path, json=body)
        except urllib3.exceptions.HTTPError as error:
            raise RolloutError(
                f"`base_url` is {self.base_url!r}, which cannot be reached: {error}. Start the server, or correct the "
                "address (it ends in /v1)."
            ) from error
        if response.status != 200:
            text = response.data.decode(errors="replace")[:500]
            raise RolloutError(f"{self.base_url}{path} answered {response.status}: {text}")
        return response.json()
