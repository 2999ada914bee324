"""Rows and masks against a definition written token by token."""

import dataclasses
import random
from itertools import groupby

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import Ragged
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from cope_trl.forecast.packing import BLOCK, IGNORE, ForecastRows, RowSpan, pack_rows, pack_shared_prefix, row_spans
from cope_trl.types import Branch

ragged = settings(derandomize=True, deadline=None, max_examples=60)
seeds = given(st.integers(0, 10**6))


@ragged
@seeds
def test_no_token_of_the_sequence_is_padding(seed):
    example = Ragged(seed)
    real = int(example.attention_mask.sum()) + example.rows.tokens
    assert example.batch.input_ids.shape == (1, real)
    assert ("filler",) not in example.tokens()


@ragged
@given(st.integers(0, 10**6), st.sampled_from([1, 8]))
def test_who_sees_whom(seed, multiple):
    example = Ragged(seed, multiple=multiple)
    assert example.batch.input_ids.size(1) % multiple == 0
    assert torch.equal(example.visible(), example.expected_mask())


@ragged
@seeds
def test_positions_and_ids(seed):
    example = Ragged(seed)
    for place, what in enumerate(example.tokens()):
        position, token = int(example.batch.position_ids[0, place]), int(example.batch.input_ids[0, place])
        row = what[1]
        if what[0] == "trajectory":
            assert position == example.left[row] + what[2]  # the column, as plain GRPO numbers it
            assert token == (example.prompts[row] + example.completions[row])[what[2]]
        else:
            cut, branch = example.branches[row][what[2]]
            assert position == example.left[row] + cut + what[3]
            assert token == branch.ids[what[3]]
        assert bool(example.batch.is_branch[0, place]) == (what[0] == "branch")


@ragged
@seeds
def test_labels_are_the_next_tokens_where_they_are_sampled_or_targets(seed):
    example = Ragged(seed)
    whole, branches = [], []
    for what in example.tokens():
        row, trained, target = what[1], False, False
        if what[0] == "trajectory":
            place = what[2] - len(example.prompts[row])
            trained = place >= 0 and bool(example.sampled[row][place])
        else:
            target = bool(example.branches[row][what[2]][1].loss_mask[what[3]])
        whole.append(trained or target)
        branches.append(target)
    only_branches = pack_shared_prefix(example.input_ids, example.attention_mask, example.rows)
    for batch, wanted in ((example.batch, whole), (only_branches, branches)):
        ids = batch.input_ids[0].tolist()
        expected = [token if scored else IGNORE for token, scored in zip(ids, wanted, strict=True)]
        assert batch.shift_labels[0].tolist() == [*expected[1:], IGNORE]


@ragged
@given(st.integers(0, 10**6), st.sampled_from([1, 8]))
def test_values_come_back_to_the_tokens_they_score(seed, multiple):
    """A value at position j is that of token j+1: undo the shift and every scored token gets its own id back."""
    example = Ragged(seed, multiple=multiple)
    scores = example.batch.shift_labels.masked_fill(example.batch.shift_labels == IGNORE, 0)
    targets = example.rows.weight > 0
    assert torch.equal(example.batch.branch_slice(scores), example.rows.ids * targets)
    completion = example.batch.completion_slice(scores, example.width)
    assert torch.equal(completion, example.input_ids[:, -example.width :] * example.completion)


def test_a_sequence_written_out_by_hand():
    ids = torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 0]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 0]])
    branch = Branch((91, 92, 93), (0, 0, 1), (-1, -1, 0))
    rows = pack_rows([[(1, branch), (2, branch)], []], [1.0, 0.0], "mean")
    batch = pack_shared_prefix(ids, mask, rows, torch.tensor([[1, 0], [1, 0]]))
    assert batch.spans == row_spans(mask, rows) == (RowSpan(3, (1, 2), (3, 3)), RowSpan(4, (), ()))
    assert batch.input_ids.tolist() == [[11, 12, 13, 91, 92, 93, 91, 92, 93, 21, 22, 23, 24]]
    assert batch.position_ids.tolist() == [[2, 3, 4, 3, 4, 5, 4, 5, 6, 0, 1, 2, 3]]
    none = [IGNORE]
    assert batch.shift_labels.tolist() == [[12, *none * 3, 93, *none * 2, 93, *none * 3, 24, *none]]


def test_the_first_token_of_a_trajectory_is_not_scored_by_the_trajectory_before():
    ids = torch.tensor([[11, 12], [21, 22]])
    rows = pack_rows([[], []], [0.0, 0.0], "mean")
    batch = pack_shared_prefix(ids, torch.ones_like(ids), rows, torch.ones_like(ids))
    assert batch.shift_labels.tolist() == [[12, IGNORE, 22, IGNORE]]
    assert batch.completion_slice(torch.tensor([[1, 2, 3, 4]]), 2).tolist()[0] == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_block_mask_says_the_same(seed):
    """Large enough for several blocks of FlexAttention; against PyTorch's own, which writes the whole mask."""
    example = Ragged(seed, size=2, longest=400, windows=6, branch=40, multiple=BLOCK)
    length = example.batch.input_ids.size(1)
    assert torch.equal(create_mask(example.batch.visible, 1, 1, length, length, device="cpu")[0, 0], example.visible())
    expected = create_block_mask(example.batch.visible, 1, None, length, length, device="cpu")
    assert expected.full_kv_num_blocks.any()
    block = example.batch.block_mask()
    assert block.seq_lengths == (length, length)
    assert block.BLOCK_SIZE == (BLOCK, BLOCK)
    assert block.mask_mod is example.batch.visible
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(block, name), getattr(expected, name)), name
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        for row, count in enumerate(getattr(block, counts)[0, 0].tolist()):
            ours, theirs = (getattr(mask, indices)[0, 0, row, :count].tolist() for mask in (block, expected))
            assert sorted(ours) == sorted(theirs)


def test_a_block_mask_is_built_a_row_of_blocks_at_a_time():
    example = Ragged(1, size=3, longest=400, windows=5, branch=60, multiple=BLOCK)
    length, asked, original = example.batch.input_ids.size(1), [], example.batch.visible

    def counted(b, head, q, k):
        asked.append(torch.broadcast_shapes(q.shape, k.shape).numel())
        return original(b, head, q, k)

    dataclasses.replace(example.batch, visible=counted).block_mask()
    assert length >= 8 * BLOCK
    assert asked == [BLOCK * length] * (length // BLOCK)


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
    batch = pack_shared_prefix(ids, mask, rows, torch.ones((size, 2)))
    assert torch.equal(batch.input_ids, ids[mask.bool()][None])
    assert batch.branch_slice(batch.input_ids).shape == (size, 0)
    assert torch.equal(batch.completion_slice(batch.shift_labels, 2), ids[:, 2:])


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
