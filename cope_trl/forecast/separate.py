"""One padded sequence a window, `[history | branch]`: what is scored where a model cannot share the prefix."""

from dataclasses import dataclass

import torch

from cope_trl.forecast.packing import IGNORE, ForecastRows


@dataclass(frozen=True, slots=True)
class SeparateBatch:
    """W windows of at most S tokens, the shorter ones first, so that those scored together need little padding.

    Attributes:
        input_ids: (W, S) int64, right-padded.
        attention_mask: (W, S) int64.
        shift_labels: (W, S) int64; entry j is the id scored at position j, or -100.
        weight, offset: (W, S) weight and offset of the token scored at position j.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    shift_labels: torch.Tensor
    weight: torch.Tensor
    offset: torch.Tensor

    def __getitem__(self, rows: slice) -> "SeparateBatch":
        """Some of the windows, cut to the longest of them."""
        used = int(self.attention_mask[rows].sum(1).max()) if self.attention_mask[rows].numel() else 0
        names = ("input_ids", "attention_mask", "shift_labels", "weight", "offset")
        return SeparateBatch(*(getattr(self, name)[rows, :used] for name in names))


def unpack_separate(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, rows: ForecastRows, pad_token_id: int
) -> SeparateBatch:
    """Write each window as a sequence of its own, `[history | branch]`, without padding before or between.

    Args:
        input_ids, attention_mask: (B, L) as in [`~cope_trl.forecast.packing.pack_shared_prefix`].
        rows: branches of the same B trajectories.
        pad_token_id: id for the padding on the right.
    """
    device = input_ids.device
    sequences = []
    for row in range(input_ids.size(0)):
        left = int(attention_mask[row].int().argmax())
        for index in range(int(rows.window[row].max()) + 1 if rows.window.size(1) else 0):
            here = rows.window[row] == index
            cut = int(rows.cut[row, here][0])
            history = input_ids[row, left : left + cut]
            none = torch.zeros(cut, device=device)
            sequences.append(
                (
                    torch.cat([history, rows.ids[row, here]]),
                    torch.cat([none, rows.weight[row, here]]),
                    torch.cat([none.long() - 1, rows.offset[row, here]]),
                )
            )
    sequences.sort(key=lambda sequence: len(sequence[0]))
    length = max((len(ids) for ids, _, _ in sequences), default=0)
    shape = (len(sequences), length)
    ids = torch.full(shape, pad_token_id, dtype=torch.int64, device=device)
    mask = torch.zeros(shape, dtype=torch.int64, device=device)
    labels = torch.full(shape, IGNORE, dtype=torch.int64, device=device)
    weight = torch.zeros(shape, device=device)
    offset = torch.full(shape, -1, dtype=torch.int64, device=device)
    for row, (sequence, weights, offsets) in enumerate(sequences):
        size = len(sequence)
        ids[row, :size], mask[row, :size] = sequence, 1
        labels[row, : size - 1] = sequence[1:].masked_fill(weights[1:] <= 0, IGNORE)
        weight[row, : size - 1], offset[row, : size - 1] = weights[1:], offsets[1:]
    return SeparateBatch(ids, mask, labels, weight, offset)
