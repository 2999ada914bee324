"""One sequence a window against a definition written token by token."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged import PAD, Ragged

from cope_trl.forecast.packing import IGNORE, pack_rows
from cope_trl.forecast.separate import unpack_separate

ragged = settings(derandomize=True, deadline=None, max_examples=60)
seeds = given(st.integers(0, 10**6))


@ragged
@seeds
def test_separate_sequences_are_history_and_branch(seed):
    example = Ragged(seed)
    batch = unpack_separate(example.input_ids, example.attention_mask, example.rows, PAD)
    expected = []  # the shorter ones first
    for row, branches in enumerate(example.branches):
        whole = example.prompts[row] + example.completions[row]
        for cut, branch in branches:
            trained = max(sum(branch.loss_mask), 1)
            share = example.weights[row] / trained / len(branches)
            expected.append((whole[:cut], branch, share))
    expected.sort(key=lambda window: len(window[0]) + len(window[1].ids))
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


@pytest.mark.parametrize("size", [1, 3])
def test_no_windows(size):
    rows = pack_rows([[]] * size, [0.0] * size, "mean")
    ids = torch.arange(10, 10 + 4 * size).view(size, 4)
    alone = unpack_separate(ids, torch.ones_like(ids), rows, PAD)
    assert alone.input_ids.shape == (0, 0)
    assert alone[0:2].input_ids.shape == (0, 0)
