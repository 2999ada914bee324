"""Rows and masks against a definition written token by token."""

import random
from itertools import groupby

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_mask

from cope_trl.forecast.packing import IGNORE, ForecastRows, pack_rows, pack_shared_prefix, unpack_separate
from cope_trl.types import Branch

PAD = 7


class Ragged:
    """A micro-batch: prompts padded on the left, completions on the right, branches of any number and length."""

    def __init__(self, seed, size=3, longest=9, windows=3, branch=6, reduction="mean"):
        rng = random.Random(seed)
        self.prompts = [[rng.randint(10, 99) for _ in range(rng.randint(1, longest))] for _ in range(size)]
        self.completions = [[rng.randint(10, 99) for _ in range(rng.randint(1, longest))] for _ in range(size)]
        self.branches, self.weights = [], []
        for prompt, completion in zip(self.prompts, self.completions, strict=True):
            row = []
            for _ in range(rng.randint(0, windows)):
                length = rng.randint(1, branch)
                mask = [int(rng.random() < 0.6) for _ in range(length)]
                offsets = [rng.randint(0, 2) if m and rng.random() < 0.8 else -1 for m in mask]
                ids = [rng.randint(100, 199) for _ in range(length)]
                cut = rng.randint(1, len(prompt) + len(completion))
                row.append((cut, Branch(tuple(ids), tuple(mask), tuple(offsets))))
            self.branches.append(row)
            self.weights.append(rng.choice([0.25, 0.5, 1.0]) if row else 0.0)
        self.width = max(map(len, self.completions))
        prompt_width = max(map(len, self.prompts))
        self.left = [prompt_width - len(p) for p in self.prompts]
        ids, mask = [], []
        for prompt, completion, left in zip(self.prompts, self.completions, self.left, strict=True):
            right = self.width - len(completion)
            ids.append([PAD] * left + prompt + completion + [PAD] * right)
            mask.append([0] * left + [1] * len(prompt + completion) + [0] * right)
        self.input_ids, self.attention_mask = torch.tensor(ids), torch.tensor(mask)
        self.rows = pack_rows(self.branches, self.weights, reduction)
        self.batch = pack_shared_prefix(self.input_ids, self.attention_mask, self.rows, self.width)

    def columns(self, row):
        """What stands in each column of a packed row: `("pad",)`, `("trajectory", i)` or `("branch", w, j)`."""
        real = len(self.prompts[row]) + len(self.completions[row])
        left = self.left[row]
        columns = [("pad",)] * self.batch.input_ids.size(1)
        columns[left : left + real] = [("trajectory", i) for i in range(real)]
        inside = [("branch", w, j) for w, (_, b) in enumerate(self.branches[row]) for j in range(len(b.ids))]
        columns[self.batch.start : self.batch.start + len(inside)] = inside
        return columns

    def sees(self, row, query, key):
        if query[0] == "trajectory":
            return key[0] == "trajectory" and key[1] <= query[1]
        if key[0] == "trajectory":
            return key[1] < self.branches[row][query[1]][0]
        return key[0] == "branch" and key[1] == query[1] and key[2] <= query[2]

    def expected_mask(self):
        """(B, N, N) what each real query sees; rows of padding are all False here."""
        size, length = self.batch.input_ids.shape
        mask = torch.zeros(size, length, length, dtype=torch.bool)
        for row in range(size):
            columns = self.columns(row)
            for q, query in enumerate(columns):
                if query != ("pad",):
                    mask[row, q] = torch.tensor([key != ("pad",) and self.sees(row, query, key) for key in columns])
        return mask

    def real(self):
        return torch.tensor([[c != ("pad",) for c in self.columns(row)] for row in range(len(self.prompts))])


ragged = settings(derandomize=True, deadline=None, max_examples=60)
seeds = given(st.integers(0, 10**6))


@ragged
@seeds
def test_who_sees_whom(seed):
    example = Ragged(seed)
    mask = example.batch.dense_mask()
    size, length = example.batch.input_ids.shape
    assert mask.shape == (size, 1, length, length)
    assert mask.dtype == torch.bool
    real = example.real()
    assert torch.equal(mask[:, 0][real], example.expected_mask()[real])
    # Padding sees something, or its row would be NaN; nobody sees padding but padding itself.
    assert mask.any(dim=-1).all()
    others = ~torch.eye(length, dtype=torch.bool)
    assert not (mask[:, 0] & ~real[:, None, :] & others).any()


@ragged
@seeds
def test_positions_and_ids(seed):
    example = Ragged(seed)
    for row in range(len(example.prompts)):
        for column, what in enumerate(example.columns(row)):
            position = int(example.batch.position_ids[row, column])
            token = int(example.batch.input_ids[row, column])
            if what[0] == "trajectory":
                assert position == column
                assert token == (example.prompts[row] + example.completions[row])[what[1]]
            elif what[0] == "branch":
                cut, branch = example.branches[row][what[1]]
                assert position == example.left[row] + cut + what[2]
                assert token == branch.ids[what[2]]


@ragged
@seeds
def test_labels_are_the_next_tokens_of_completions_and_targets(seed):
    example = Ragged(seed)
    for row in range(len(example.prompts)):
        expected = [IGNORE] * example.batch.input_ids.size(1)
        for column, what in enumerate(example.columns(row)):
            if what[0] == "trajectory" and what[1] >= len(example.prompts[row]):
                expected[column - 1] = example.completions[row][what[1] - len(example.prompts[row])]
            if what[0] == "branch":
                branch = example.branches[row][what[1]][1]
                if branch.loss_mask[what[2]]:
                    expected[column - 1] = branch.ids[what[2]]
        assert example.batch.shift_labels[row].tolist() == expected
    only_branches = pack_shared_prefix(example.input_ids, example.attention_mask, example.rows, 0)
    start = example.batch.start
    assert (only_branches.shift_labels[:, : start - 1] == IGNORE).all()
    assert torch.equal(only_branches.shift_labels[:, start - 1 :], example.batch.shift_labels[:, start - 1 :])


@ragged
@seeds
def test_slices_line_up_with_the_tokens_they_score(seed):
    """A value at position j is that of token j+1: undo the shift and every token gets its own id back."""
    example = Ragged(seed)
    next_ids = torch.cat([example.batch.input_ids[:, 1:], torch.full((3, 1), -1)], dim=1)
    assert torch.equal(example.batch.branch_slice(next_ids), example.rows.ids)
    completion = example.batch.completion_slice(next_ids, example.width)
    assert torch.equal(completion, example.input_ids[:, -example.width :])


@ragged
@seeds
def test_additive_mask_says_the_same(seed):
    example = Ragged(seed)
    dense = example.batch.dense_mask()
    for dtype in (torch.float32, torch.bfloat16):
        additive = example.batch.additive_mask(dtype)
        assert additive.dtype == dtype
        assert torch.equal(additive == 0, dense)
        assert (additive[~dense] == torch.finfo(dtype).min).all()


@pytest.mark.parametrize("seed", range(4))
def test_block_mask_says_the_same(seed):
    """Large enough for several blocks of FlexAttention."""
    example = Ragged(seed, size=2, longest=130, windows=6, branch=40)
    size, length = example.batch.input_ids.shape
    dense = example.batch.dense_mask()
    assert torch.equal(create_mask(example.batch.visible, size, 1, length, length, device="cpu"), dense)
    block = example.batch.block_mask()
    blocks = -(-length // 128)
    assert blocks > 1
    padded = F.pad(dense, (0, blocks * 128 - length, 0, blocks * 128 - length))
    tiles = padded.view(size, 1, blocks, 128, blocks, 128)
    assert torch.equal(block.to_dense().bool(), tiles.any(dim=5).any(dim=3))
    assert block.mask_mod is example.batch.visible


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@ragged
@seeds
def test_rows_hold_the_branches(reduction, seed):
    example = Ragged(seed, reduction=reduction)
    rows = example.rows
    assert rows.tokens == sum(len(b.ids) for row in example.branches for _, b in row)
    for i, row in enumerate(example.branches):
        real = rows.window[i] >= 0
        spans = [list(group) for _, group in groupby(rows.window[i][real].tolist())]
        assert [len(span) for span in spans] == [len(b.ids) for _, b in row]
        assert rows.ids[i][real].tolist() == [t for _, b in row for t in b.ids]
        assert rows.offset[i][real].tolist() == [k for _, b in row for k in b.offsets]
        assert rows.cut[i][real].tolist() == [cut for cut, b in row for _ in b.ids]
        assert rows.weight[i][~real].tolist() == [0.0] * int((~real).sum())
        expected = []
        for _, b in row:
            trained = max(sum(b.loss_mask), 1)
            share = example.weights[i] * (1.0 if reduction == "sum" else 1 / trained / len(row))
            expected += [share * m for m in b.loss_mask]
        assert rows.weight[i][real].tolist() == pytest.approx(expected, rel=1e-6)
        if reduction == "mean" and row and all(sum(b.loss_mask) for _, b in row):
            # However many windows and tokens a trajectory gives, together they weigh what it weighs.
            assert float(rows.weight[i].sum()) == pytest.approx(example.weights[i], rel=1e-5)


@ragged
@seeds
def test_a_trip_through_the_buffer_shuffles_and_trims(seed):
    """TRL permutes and splits every tensor by row; surplus padding goes, nothing else changes."""
    example = Ragged(seed, size=6)
    buffer = {name: value.clone() for name, value in example.rows.to_buffer().items()}
    assert {value.size(0) for value in buffer.values()} == {6}
    order = list(range(6))
    random.Random(seed).shuffle(order)
    for part in (order[:3], order[3:]):
        rows = ForecastRows.from_buffer({name: value[part] for name, value in buffer.items()})
        direct = pack_rows([example.branches[i] for i in part], [example.weights[i] for i in part], "mean")
        for name in ("ids", "window", "cut", "offset", "weight"):
            assert torch.equal(getattr(rows, name), getattr(direct, name)), name


def test_a_buffer_without_forecasts():
    assert ForecastRows.from_buffer({"prompt_ids": torch.zeros(2, 3)}) is None


def test_select_takes_rows():
    example = Ragged(3, size=4)
    chosen = torch.tensor([True, False, True, False])
    some = example.rows.select(chosen)
    for name in ("ids", "window", "cut", "offset", "weight"):
        assert torch.equal(getattr(some, name), getattr(example.rows, name)[[0, 2]])


@pytest.mark.parametrize("size", [1, 3])
def test_rows_without_a_branch(size):
    rows = pack_rows([[]] * size, [0.0] * size, "mean")
    assert rows.ids.shape == (size, 0)
    assert rows.tokens == 0
    again = ForecastRows.from_buffer(rows.to_buffer())
    assert again.ids.shape == (size, 0)
    ids = torch.arange(10, 10 + 4 * size).view(size, 4)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    batch = pack_shared_prefix(ids, mask, rows, 2)
    assert torch.equal(batch.input_ids, ids)
    assert batch.branch_slice(batch.input_ids).shape == (size, 0)
    assert torch.equal(batch.completion_slice(batch.shift_labels, 2), ids[:, 2:])
    expected = torch.ones(4, 4).tril().bool().repeat(size, 1, 1)
    expected[0, :, 0] = torch.tensor([True, False, False, False])
    assert torch.equal(batch.dense_mask()[:, 0], expected)
    alone = unpack_separate(ids, mask, rows, PAD)
    assert alone.input_ids.shape == (0, 0)
    assert alone[0:2].input_ids.shape == (0, 0)


def test_no_rows_at_all():
    rows = pack_rows([], [], "mean")
    assert rows.ids.shape == (0, 0)
    assert ForecastRows.from_buffer(rows.to_buffer()).ids.shape == (0, 0)


def test_padding_beyond_every_row_is_dropped():
    branch = Branch((1, 2), (0, 1), (-1, 0))
    rows = pack_rows([[(3, branch), (4, branch)], [(3, branch)]], [1.0, 1.0], "mean")
    one = ForecastRows.from_buffer({name: value[1:] for name, value in rows.to_buffer().items()})
    assert one.ids.tolist() == [[1, 2]]
    assert one.cut.tolist() == [[3, 3]]


# ---------------------------------------------------------------- one sequence a window


@ragged
@seeds
def test_separate_sequences_are_history_and_branch(seed):
    example = Ragged(seed)
    batch = unpack_separate(example.input_ids, example.attention_mask, example.rows, PAD)
    expected = []
    for row, branches in enumerate(example.branches):
        whole = example.prompts[row] + example.completions[row]
        for cut, branch in branches:
            trained = max(sum(branch.loss_mask), 1)
            share = example.weights[row] / trained / len(branches)
            expected.append((whole[:cut], branch, share))
    assert len(batch.input_ids) == len(expected)
    for i, (history, branch, share) in enumerate(expected):
        size = len(history) + len(branch.ids)
        assert batch.attention_mask[i].tolist() == [1] * size + [0] * (batch.input_ids.size(1) - size)
        assert batch.input_ids[i, :size].tolist() == [*history, *branch.ids]
        assert (batch.input_ids[i, size:] == PAD).all()
        labels = [IGNORE] * batch.input_ids.size(1)
        weights, offsets = [0.0] * len(labels), [-1] * len(labels)
        for j, token in enumerate(branch.ids):
            offsets[len(history) + j - 1] = branch.offsets[j]
            if branch.loss_mask[j]:
                labels[len(history) + j - 1] = token
                weights[len(history) + j - 1] = share
        assert batch.shift_labels[i].tolist() == labels
        assert batch.weight[i].tolist() == pytest.approx(weights, rel=1e-6)
        assert batch.offset[i].tolist() == offsets
    for first in range(len(expected)):  # a part is cut to its own longest sequence
        part = batch[first : first + 2]
        longest = max(len(h) + len(b.ids) for h, b, _ in expected[first : first + 2])
        assert part.input_ids.shape == (len(expected[first : first + 2]), longest)
        assert torch.equal(part.shift_labels, batch.shift_labels[first : first + 2, :longest])


@ragged
@seeds
def test_both_layouts_carry_the_same_weights(seed):
    example = Ragged(seed)
    alone = unpack_separate(example.input_ids, example.attention_mask, example.rows, PAD)
    shared = sorted(example.rows.weight[example.rows.weight > 0].tolist())
    assert sorted(alone.weight[alone.weight > 0].tolist()) == shared
