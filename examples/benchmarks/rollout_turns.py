"""
What a kept KV cache saves in rollouts: every turn's history prefilled anew against its new tokens only.

    python examples/benchmarks/rollout_turns.py

One group of eight rollouts of one task, 100-token observations and replies of 35 tokens, is played with a real model
by the same player: once by `TransformersPolicy`, which fills the cache anew at every turn, and once by
`CachedEngine`. The two take turns within one run. Prints for each number of turns both times, their ratio, and the
tokens prefilled for each unique one; saves `rollout_turns.json` and `.png`. About 3 minutes on 2 cores.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import EpisodeShape, long_env, make_reciting, qwen2_config, task_rows, word_tokenizer
from measuring import OUTPUT_DIR, exponent, markdown_table, save_json
from transformers import Qwen2ForCausalLM

from cope_trl.chat import ChatFormat
from cope_trl.rollout.cached import CachedEngine, TokenCounts
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import TransformersPolicy
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.sampling import RowSampler
from cope_trl.types import TaskRef, Trajectory


def diverging_env(shape: EpisodeShape) -> type:
    """The shape's environment, in which what follows the first observation differs from episode to episode."""
    number = itertools.count()

    class Diverging(long_env(shape)):
        def _begin(self, task_id: str | None, seed: int | None) -> str:
            first = super()._begin(task_id, seed)
            self.rng.seed(next(number))
            return first

    return Diverging


class Bench:
    """A model, its tokenizer and environments of one length after another."""

    def __init__(self, hidden: int, layers: int, episodes: int) -> None:
        self.tokenizer = word_tokenizer()
        self.chat = ChatFormat(self.tokenizer)
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(qwen2_config(hidden, layers, tied=False)).eval()
        make_reciting(self.model, self.tokenizer, EpisodeShape())
        self.episodes = episodes

    def play(self, engine: Any, turns: int) -> tuple[float, list[Trajectory]]:
        """Seconds of a rollout, and its episodes."""
        shape = EpisodeShape(turns=turns)
        row = task_rows(shape, 1)[0]
        env = diverging_env(shape)
        pool = EnvironmentPool(lambda name: env())
        player = EpisodePlayer(pool, engine, self.chat, [])
        limits = EpisodeLimits({"": turns}, 64, 30_000)
        tasks = [TaskRef("long", row["task_id"])] * self.episodes
        started = time.perf_counter()
        played = player.play(tasks, [row["prompt"]] * self.episodes, limits)
        seconds = time.perf_counter() - started
        pool.close()
        assert all(len(episode.turns) == turns and not episode.failed for episode in played)
        return seconds, played

    def anew(self) -> TransformersPolicy:
        return TransformersPolicy(self.model, [self.chat.end_of_turn_id], self.tokenizer.pad_token_id)

    def kept(self) -> CachedEngine:
        return CachedEngine(self.model, [self.chat.end_of_turn_id], RowSampler(), self.episodes)


def unique_tokens(played: list[Trajectory]) -> int:
    """Tokens that must be prefilled: all of the histories but the sampled ones, common prefixes counted once.

    The token that ends a turn is sampled too, but nothing is sampled after it, so it is prefilled.
    """
    nodes = set()
    for episode in played:
        decoded = {i for turn in episode.turns for i in range(turn.start, turn.end - 1)}
        key = 0
        for i, token in enumerate(episode.ids[: episode.turns[-1].start]):
            key = hash((key, token))
            if i not in decoded:
                nodes.add(key)
    return len(nodes)


def measure(bench: Bench, turns: int, rounds: int) -> dict[str, float]:
    """Both engines on episodes of that many turns."""
    anew, kept, counts = [], [], TokenCounts()
    for _ in range(rounds):
        anew.append(bench.play(bench.anew(), turns)[0])
        engine = bench.kept()
        seconds, played = bench.play(engine, turns)
        kept.append(seconds)
        counts = engine.tokens
    return {
        "turns": turns,
        "anew_seconds": statistics.median(anew),
        "kept_seconds": statistics.median(kept),
        "ratio": statistics.median(a / k for a, k in zip(anew, kept, strict=True)),
        "prefilled_tokens": counts.prefilled,
        "padding_tokens": counts.padding,
        "prefilled_per_unique": (counts.prefilled + counts.padding) / unique_tokens(played),
        "anew_prefilled_tokens": sum(turn.start for episode in played for turn in episode.turns),
    }


def plot(cells: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    turns = [cell["turns"] for cell in cells]
    axes.plot(turns, [cell["anew_seconds"] for cell in cells], "o-", label="filled anew at every turn")
    axes.plot(turns, [cell["kept_seconds"] for cell in cells], "s-", label="kept from turn to turn")
    axes.set(xlabel="turns", ylabel="seconds of a rollout", ylim=(0, None), title="KV cache in rollouts")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", default="5,10,15,20,40", help="numbers of turns")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of each")
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=192)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(OUTPUT_DIR))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args.hidden, args.layers, args.episodes)
    bench.play(bench.kept(), 1)  # warm-up
    cells = [measure(bench, int(turns), args.rounds) for turns in args.turns.split(",")]
    growth = {
        name: exponent([c["turns"] for c in cells], [c[f"{name}_seconds"] for c in cells]) for name in ("anew", "kept")
    }
    names = ("turns", "anew_seconds", "kept_seconds", "ratio", "prefilled_per_unique")
    print(markdown_table(names, [[cell[name] for name in names] for cell in cells]))
    print(f"seconds grow with turns to the power of {growth['anew']:.2f} (anew) and {growth['kept']:.2f} (kept)")
    parameters = sum(parameter.numel() for parameter in bench.model.parameters())
    setting = {"episodes": args.episodes, "parameters": parameters, "threads": args.threads}
    save_json(args.output_dir / "rollout_turns.json", {"setting": setting, "cells": cells, "exponents": growth})
    plot(cells, args.output_dir / "rollout_turns.png")
    print(f"Results and plot: {args.output_dir}")


if __name__ == "__main__":
    main()
