"""Metrics of a step: sums that are reduced over ranks once, when the trainer logs.

Every name is known beforehand, so that all ranks reduce the same vector even when one of them had no episode to count.
"""

from collections.abc import Callable, Iterable, Sequence

import torch

from cope_trl.forecast.loss import OffsetStats
from cope_trl.types import Branch, Trajectory, Turn

EPISODE = ("success", "score", "turns", "invalid_action_rate", "truncated", "failed", "environment_seconds")
# Only where the protocol is tool calls: share of turns that are calls; share of calls from a reply that held several;
# share of calls that could not be read.
CALLS = ("tool_call_rate", "multi_call_rate", "malformed_call_rate")
FORECAST = ("loss", "windows", "group_success", "grad_ratio", "refusal_groups", "tool_call_rate")
TOKENS = ("policy", "forecast", "saved")
# Share of sampled tokens that an importance correction leaves in, of the shorter and of the longer half of a batch.
SAMPLING = ("kept_share_short", "kept_share_long")
# Of a rollout: its parts, as far as the engine tells them apart. Of an update: `update` is split when it is logged.
ROLLOUT_TIMES = ("prefill", "decode", "generate", "environment", "idle")
TIMES = ("rollout", *ROLLOUT_TIMES, "reference", "update", "forecast_step", "optimizer")


class RunningMeans:
    """Means over a logging period, each kept as a numerator and a denominator.

    Args:
        horizon: K, largest forecast offset.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.names = (
            *(f"episode/{name}" for name in (*EPISODE, *CALLS)),
            *(f"forecast/{name}" for name in FORECAST),
            *(f"forecast/nll_k{k}" for k in range(horizon + 1)),
            *(f"forecast/accuracy_k{k}" for k in range(horizon + 1)),
            *(f"tokens/{name}" for name in TOKENS),
            *(f"sampling/{name}" for name in SAMPLING),
            *(f"time/{name}" for name in TIMES),
        )
        self._index = {name: i for i, name in enumerate(self.names)}
        self._sums = torch.zeros(2, len(self.names), dtype=torch.float64)

    def add(self, name: str, total: float, count: float = 1.0) -> None:
        """Add to a metric's numerator and denominator."""
        self._sums[0, self._index[name]] += total
        self._sums[1, self._index[name]] += count

    def add_offsets(self, stats: OffsetStats) -> None:
        """Add forecast statistics by offset."""
        nll, hits, tokens = stats.stacked().double().cpu().tolist()
        for k in range(self.horizon + 1):
            self.add(f"forecast/nll_k{k}", nll[k], tokens[k])
            self.add(f"forecast/accuracy_k{k}", hits[k], tokens[k])

    def flush(self, reduce_sum: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> dict[str, float]:
        """Means since the last call; a metric nothing was added to is left out.

        Args:
            reduce_sum: adds a tensor up over ranks.
        """
        totals, counts = reduce_sum(self._sums).double().cpu().tolist()
        self._sums = torch.zeros_like(self._sums)
        means = {
            name: total / count for name, total, count in zip(self.names, totals, counts, strict=True) if count > 0
        }
        return _split_update_time(means)

    def add_episodes(self, trajectories: Sequence[Trajectory]) -> None:
        """Count finished episodes. Failed ones are counted as failed and left out of every other mean."""
        for trajectory in trajectories:
            self.add("episode/failed", float(trajectory.failed))
            if trajectory.failed:
                continue
            executed = [turn for turn in trajectory.turns if turn.observation or turn.action]
            self.add("episode/success", float(trajectory.success))
            self.add("episode/score", trajectory.score)
            self.add("episode/turns", len(trajectory.turns))
            self.add("episode/invalid_action_rate", sum(turn.invalid for turn in executed), len(executed))
            self.add("episode/truncated", float(trajectory.truncated))
            self.add("episode/environment_seconds", trajectory.environment_seconds)
            if trajectory.layout == "turns":
                self._add_calls(executed)

    def _add_calls(self, turns: Sequence[Turn]) -> None:
        calls = [turn for turn in turns if turn.is_call]
        self.add("episode/tool_call_rate", len(calls), len(turns))
        several = sum(turn.details.get("num_calls", 1) > 1 for turn in calls)
        self.add("episode/multi_call_rate", several, len(calls))
        self.add("episode/malformed_call_rate", sum(bool(t.details.get("malformed")) for t in calls), len(calls))

    def add_groups(self, success: torch.Tensor, refusal: torch.Tensor, group_size: int) -> None:
        """Count groups that hold a success, and among them those whose every success is a refusal.

        Args:
            success: (N,) bool, whole groups in a row, those of all ranks together.
            refusal: (N,) bool, see [`~cope_trl.Trajectory.refusal`].
            group_size: G.
        """
        won = success.view(-1, group_size)
        with_success = won.any(dim=1)
        self.add("forecast/group_success", float(with_success.float().mean()))
        refused = with_success & (refusal.view_as(won) == won).all(dim=1)
        self.add("forecast/refusal_groups", float(refused.sum()), float(with_success.sum()))

    def add_kept(self, kept: torch.Tensor, sampled: torch.Tensor, median: float) -> None:
        """Count the tokens that an importance correction leaves in the loss.

        Args:
            kept, sampled: (B,) tokens of each episode with a positive importance ratio, and all sampled ones.
            median: of the sampled tokens of an episode, over all ranks.
        """
        long = sampled > median
        for name, rows in (("short", ~long), ("long", long)):
            self.add(f"sampling/kept_share_{name}", float(kept[rows].sum()), float(sampled[rows].sum()))

    def add_branches(self, branches: Iterable[Branch]) -> None:
        """Count the forecast targets that are tool calls."""
        calls = [call for branch in branches for call in branch.calls]
        self.add("forecast/tool_call_rate", sum(calls), len(calls))


def _split_update_time(means: dict[str, float]) -> dict[str, float]:
    """Replace the update's time by the policy's and the forecast's.

    A step of its own is timed. In a joint update both share one forward and backward, which cannot be timed apart;
    there the time is divided in proportion to the tokens forwarded.
    """
    update = means.pop("time/update", None)
    own_step = means.pop("time/forecast_step", None)
    if update is None:
        return means
    if own_step is not None:
        return {**means, "time/policy": update, "time/forecast": own_step}
    forecast, policy = means.get("tokens/forecast", 0.0), means.get("tokens/policy", 0.0)
    share = forecast / (forecast + policy) if forecast else 0.0
    return {**means, "time/policy": update * (1 - share), "time/forecast": update * share}
