"""A random micro-batch of ragged trajectories with branches, and token by token what must become of it."""

import random

import torch

from cope_trl.forecast.packing import pack_rows, pack_shared_prefix
from cope_trl.types import Branch

PAD = 7


class Ragged:
    """A micro-batch: prompts padded on the left, completions on the right, branches of any number and length.

    Some completion tokens are an environment's, which are not scored.
    """

    def __init__(self, seed, size=3, longest=9, windows=3, branch=6, reduction="mean", multiple=1):
        rng = random.Random(seed)
        self.prompts = [[rng.randint(10, 99) for _ in range(rng.randint(1, longest))] for _ in range(size)]
        self.completions = [[rng.randint(10, 99) for _ in range(rng.randint(1, longest))] for _ in range(size)]
        self.sampled = [[int(rng.random() < 0.7) for _ in completion] for completion in self.completions]
        self.branches, self.weights = [], []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            row = []
            for _ in range(rng.randint(0, windows)):
                length = rng.randint(1, branch)
                mask = [int(j > 0 and rng.random() < 0.6) for j in range(length)]
                offsets = [rng.randint(0, 2) if m and rng.random() < 0.8 else -1 for m in mask]
                ids = [rng.randint(100, 199) for _ in range(length)]
                cut = rng.randint(1, len(prompt) + len(completion))
                row.append((cut, Branch(tuple(ids), tuple(mask), tuple(offsets))))
            self.branches.append(row)
            self.weights.append(rng.choice([0.25, 0.5, 1.0]) if row else 0.0)
        self.width = max(map(len, self.completions))
        prompt_width = max(map(len, self.prompts))
        self.left = [prompt_width - len(p) for p in self.prompts]
        ids, mask, scored = [], [], []
        for prompt, completion, sampled, left in zip(
            self.prompts, self.completions, self.sampled, self.left, strict=True
        ):
            right = self.width - len(completion)
            ids.append([PAD] * left + prompt + completion + [PAD] * right)
            mask.append([0] * left + [1] * len(prompt + completion) + [0] * right)
            scored.append(sampled + [0] * right)
        self.input_ids, self.attention_mask = torch.tensor(ids), torch.tensor(mask)
        self.completion = torch.tensor(scored)
        self.rows = pack_rows(self.branches, self.weights, reduction)
        self.batch = pack_shared_prefix(
            self.input_ids, self.attention_mask, self.rows, self.completion, multiple=multiple
        )

    def tokens(self):
        """What stands in each place of the packed sequence: `("trajectory", row, i)` or `("branch", row, w, j)`."""
        places = []
        for row, branches in enumerate(self.branches):
            real = len(self.prompts[row]) + len(self.completions[row])
            places += [("trajectory", row, i) for i in range(real)]
            places += [("branch", row, w, j) for w, (_, b) in enumerate(branches) for j in range(len(b.ids))]
        return places + [("filler",)] * (self.batch.input_ids.size(1) - len(places))

    def sees(self, query, key):
        """Whether one token attends to another."""
        if "filler" in (query[0], key[0]):
            return query[0] == key[0]
        if query[1] != key[1]:
            return False
        if query[0] == "trajectory":
            return key[0] == "trajectory" and key[2] <= query[2]
        if key[0] == "trajectory":
            return key[2] < self.branches[query[1]][query[2]][0]
        return key[2] == query[2] and key[3] <= query[3]

    def expected_mask(self):
        """(N, N) what each token sees, fillers as a sequence of their own."""
        tokens = self.tokens()
        mask = torch.tensor([[self.sees(query, key) for key in tokens] for query in tokens])
        return mask.tril()

    def visible(self):
        """(N, N) what the batch's own function says."""
        index = torch.arange(self.batch.input_ids.size(1))
        return self.batch.visible(None, None, index[:, None], index[None])
