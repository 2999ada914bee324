"""Ranks that share one engine: the sampling calls of one turn, made for all of them.

A shared engine (vLLM's server, or a colocated one spread over several GPUs by tensor parallelism) answers by position:
TRL gives rank r the answers r·n to r·n+n-1, where n is the number of prompts *it* brought, and samples under the limit
of the rank that calls. Both suit a batch of prompts, of which every rank has as many. Episodes end at different turns,
so that ranks bring unequal numbers of prompts and unequal limits. Hence the first rank hands in the prompts of all,
and each rank takes its own answers out of the whole.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from cope_trl.rollout.endpoint import fit_context

# (B, lengths) sampled ids and their log-probabilities, or `None` for the latter.
Sampled = tuple[list[list[int]], list[list[float]] | None]


class SharedEngine:
    """The ranks that sample on one engine.

    Args:
        context: longest sequence the engine takes in tokens; `None` where it needs no telling.
        group: process group of the ranks; `None` holds all of them.
        alone: whether there is one rank only.
    """

    def __init__(self, context: int | None = None, group: Any = None, alone: bool = False) -> None:
        self.context, self.group = context, group
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(group), dist.get_world_size(group))
        self._first = 0 if group is None else dist.get_global_rank(group, 0)

    def sample(
        self, sample: Callable[[list[list[int]], int], Sampled], prompts: Sequence[Sequence[int]], limit: int
    ) -> Sampled:
        """Sample one turn for each prompt of this rank. Collective: every rank of the group calls it equally often.

        Args:
            sample: samples on the engine, given prompts and the limit on the ids of each. Collective as well; only
                the first rank hands it prompts.
            prompts: B lists of token ids. A single one of a single token is the placeholder of a rank that has
                finished: nothing is sampled for it, and the result is empty.
            limit: most ids to sample. What holds is the largest limit in the group, so some rows may be longer.

        Returns:
            Ids and log-probabilities, in the order of the prompts.
        """
        prompts = [list(prompt) for prompt in prompts]
        if self.size > 1 and len(prompts) == 1 and len(prompts[0]) == 1:
            prompts = []
        requests = self._gather((prompts, limit))
        together = [prompt for brought, _ in requests for prompt in brought]
        answers: dict[int, tuple[list[int], list[float] | None]] = {}
        for room, rows in fit_context(together, max(limit for _, limit in requests), self.context).items():
            ids, logprobs = sample([together[row] for row in rows] if self.rank == 0 else [], room)
            if self.rank == 0:
                scores: list[list[float] | None] = [None] * len(ids) if logprobs is None else list(logprobs)
                answers.update(zip(rows, zip(ids, scores, strict=True), strict=True))
        answers = self._from_first(answers)
        start = sum(len(brought) for brought, _ in requests[: self.rank])
        own = [answers[row] for row in range(start, start + len(prompts))]
        with_logprobs = all(logprobs is not None for _, logprobs in own)
        return [ids for ids, _ in own], [logprobs or [] for _, logprobs in own] if with_logprobs else None

    def _gather(self, value: Any) -> list[Any]:
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _from_first(self, value: Any) -> Any:
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=self._first, group=self.group)
        return values[0]
