"""Weights by brute force over whole groups, the loss on hand-computed numbers and on what must not be read."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_trl.forecast.loss import OffsetStats, forecast_loss, task_scale, token_share, trajectory_weights


def expected_weights(success, failed, group, gate, norm):
    """Member by member, in Python's own numbers."""
    weights = []
    for first in range(0, len(success), group):
        members = range(first, first + group)
        alive = [i for i in members if not failed[i]]
        won = [i for i in alive if success[i]]
        taken = {"success": won, "mixed": won if len(won) < len(alive) else [], "all": alive}[gate]
        weights += [(1 / len(taken) if norm else 1.0) if i in taken else 0.0 for i in members]
    return weights


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.integers(1, 5).flatmap(
        lambda group: st.tuples(
            st.just(group),
            st.lists(st.tuples(st.booleans(), st.booleans()), min_size=group, max_size=4 * group).map(
                lambda rows: rows[: len(rows) // group * group]
            ),
        )
    ),
    st.sampled_from(["success", "mixed", "all"]),
    st.booleans(),
)
def test_weights(groups, gate, norm):
    group, rows = groups
    success, failed = [s for s, _ in rows], [f for _, f in rows]
    weights = trajectory_weights(torch.tensor(success), torch.tensor(failed), group, gate, norm)
    assert weights.dtype == torch.float32
    assert weights.tolist() == pytest.approx(expected_weights(success, failed, group, gate, norm), abs=1e-7)


@pytest.mark.parametrize(
    ("gate", "norm", "expected"),
    [
        # Groups of four: two successes of four, all four, none, one success of three (one broke).
        ("success", True, [0.5, 0.5, 0, 0] + [0.25] * 4 + [0] * 4 + [1, 0, 0, 0]),
        ("success", False, [1, 1, 0, 0] + [1] * 4 + [0] * 4 + [1, 0, 0, 0]),
        ("mixed", True, [0.5, 0.5, 0, 0] + [0] * 4 + [0] * 4 + [1, 0, 0, 0]),
        ("mixed", False, [1, 1, 0, 0] + [0] * 4 + [0] * 4 + [1, 0, 0, 0]),
        ("all", True, [0.25] * 12 + [1 / 3, 1 / 3, 0, 1 / 3]),
        ("all", False, [1] * 12 + [1, 1, 0, 1]),
    ],
)
def test_weights_on_paper(gate, norm, expected):
    success = torch.tensor([1, 1, 0, 0] + [1] * 4 + [0] * 4 + [1, 0, 1, 0]).bool()
    failed = torch.tensor([0] * 14 + [1, 0]).bool()
    assert trajectory_weights(success, failed, 4, gate, norm).tolist() == pytest.approx(expected)


def test_a_failed_rollout_is_no_failure_of_its_group():
    """Three successes and a broken environment: nothing lost, so the group is not mixed."""
    success, failed = torch.tensor([1, 1, 1, 0]).bool(), torch.tensor([0, 0, 0, 1]).bool()
    assert trajectory_weights(success, failed, 4, "mixed").tolist() == [0, 0, 0, 0]
    assert trajectory_weights(success, failed, 4).tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        # Times the share without success: 2 of 4, 0 of 4, 4 of 4, and 1 of the 2 rollouts that did not break.
        ("success", [0.25, 0.25, 0, 0] + [0] * 4 + [0] * 4 + [0.5, 0, 0, 0]),
        ("all", [0.125] * 4 + [0] * 4 + [0.25] * 4 + [0.25, 0, 0.25, 0]),
    ],
)
def test_tasks_weighed_by_failure_rate_on_paper(gate, expected):
    success = torch.tensor([1, 1, 0, 0] + [1] * 4 + [0] * 4 + [1, 0, 0, 1]).bool()
    failed = torch.tensor([0] * 13 + [1, 0, 1]).bool()
    weights = trajectory_weights(success, failed, 4, gate, True, "failure_rate")
    assert weights.tolist() == pytest.approx(expected)


def test_easy_refusals_lose_their_share_of_the_forecasts():
    """Sixteen tasks of a customer service: half are refusals that nearly every rollout gets right."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.tensor([0.9] * 8 + [0.25] * 8).repeat_interleave(8)
    success = torch.rand(rates.shape, generator=generator) < rates
    failed, refusal = torch.zeros_like(success), rates > 0.5

    def share(gate, task_weight):
        weights = trajectory_weights(success, failed, 8, gate, True, task_weight)
        return float(weights[refusal].sum() / weights.sum())

    uniform = share("success", "uniform")
    assert uniform > 0.45
    assert share("mixed", "uniform") < uniform
    assert share("success", "failure_rate") < 0.5 * uniform


def test_rows_that_are_no_whole_groups_are_refused():
    with pytest.raises(RuntimeError):
        trajectory_weights(torch.ones(5).bool(), torch.zeros(5).bool(), 4)


def test_token_share():
    """Shares of a trajectory's tokens add up to 1 under "mean", to their number under "sum"."""
    windows = [3, 1, 7]
    shares = [token_share(tokens, len(windows), "mean") for tokens in windows for _ in range(tokens)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] == pytest.approx(1 / 9)
    assert [token_share(tokens, 3, "sum") for tokens in windows] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("group", "processes", "local", "accumulation"), [(4, 1, 8, 1), (4, 2, 2, 3), (8, 4, 1, 16)])
def test_task_scale_makes_a_mean_over_tasks(group, processes, local, accumulation):
    """Sum over micro-batches, mean over processes: each row's value counts by 1 over the step's tasks."""
    generator = random.Random(0)
    rows = processes * local * accumulation
    values = [generator.random() for _ in range(rows)]
    scale = task_scale(group, local, accumulation)
    per_process = [sum(values[p * local * accumulation : (p + 1) * local * accumulation]) for p in range(processes)]
    assert scale * sum(per_process) / processes == pytest.approx(sum(values) / (rows / group))


def test_loss_on_paper():
    log_probs = torch.tensor([[-1.0, -2.0, -4.0], [-8.0, -16.0, -32.0]], requires_grad=True)
    weights = torch.tensor([[0.5, 0.0, 0.25], [0.0, 1.0, 0.0]])
    loss = forecast_loss(log_probs, weights, 3.0)
    assert float(loss.detach()) == pytest.approx(3 * (0.5 + 1.0 + 16.0))
    loss.backward()
    assert torch.equal(log_probs.grad, -3 * weights)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_what_has_no_weight_is_not_read(junk):
    log_probs = torch.tensor([-1.0, junk, -2.0], requires_grad=True)
    loss = forecast_loss(log_probs, torch.tensor([1.0, 0.0, 0.5]), 2.0)
    assert float(loss.detach()) == 4.0
    loss.backward()
    assert log_probs.grad.tolist() == [-2.0, 0.0, -1.0]


def test_without_a_weight_the_loss_is_zero_with_a_zero_gradient():
    log_probs = torch.tensor([-1.0, math.nan], requires_grad=True)
    loss = forecast_loss(log_probs, torch.zeros(2), 2.0)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert log_probs.grad.tolist() == [0.0, 0.0]
    empty = torch.zeros(3, 0, requires_grad=True)
    assert float(forecast_loss(empty, torch.zeros(3, 0), 1.0).detach()) == 0.0


def test_a_loss_is_the_sum_of_its_parts():
    torch.manual_seed(0)
    log_probs, weights = -torch.rand(6, 5), torch.rand(6, 5) * (torch.rand(6, 5) > 0.5)
    parts = [forecast_loss(log_probs[i : i + 2], weights[i : i + 2], 0.7) for i in (0, 2, 4)]
    assert float(sum(parts)) == pytest.approx(float(forecast_loss(log_probs, weights, 0.7)), rel=1e-6)


def stats_example():
    log_probs = torch.tensor([[-1.0, -2.0, -4.0, math.nan], [-0.5, -8.0, -16.0, -32.0]], requires_grad=True)
    is_top1 = torch.tensor([[True, False, True, True], [True, True, False, True]])
    weights = torch.tensor([[0.1, 0.1, 0.1, 0.0], [1.0, 1.0, 0.0, 1.0]])
    offsets = torch.tensor([[0, 1, -1, 0], [0, 2, 1, 2]])
    return log_probs, is_top1, weights, offsets


def test_stats_by_offset_on_paper():
    stats = OffsetStats.of(*stats_example(), horizon=3)
    assert stats.nll.tolist() == [1.5, 2.0, 40.0, 0.0]
    assert stats.hits.tolist() == [2.0, 0.0, 2.0, 0.0]
    assert stats.tokens.tolist() == [2.0, 1.0, 2.0, 0.0]
    assert torch.equal(stats.stacked(), torch.stack([stats.nll, stats.hits, stats.tokens]))
    assert not stats.nll.requires_grad


def test_stats_add_up_over_micro_batches():
    whole = OffsetStats.of(*stats_example(), horizon=2).stacked()
    parts = [OffsetStats.of(*(t[i : i + 1] for t in stats_example()), horizon=2).stacked() for i in (0, 1)]
    assert torch.equal(whole, parts[0] + parts[1])
    nothing = OffsetStats.of(*(t[:, :0] for t in stats_example()), horizon=2).stacked()
    assert torch.equal(nothing, torch.zeros(3, 3))
