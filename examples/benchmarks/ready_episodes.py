"""
What waiting for the slowest environment costs: episodes in lock step against each at its own pace.

    python examples/benchmarks/ready_episodes.py

Sixteen episodes of ten turns with a real model, in environments whose answers take 1 to 500 ms. Either schedule keeps
its KV cache (`CachedEngine`) and samples the same tokens. Wall time is set against what no schedule can beat: the
larger of the generation's own time (all environments instant, full batches) and the critical path (the slowest
episode alone). Saves `ready_episodes.json` and `.png`. About 2 minutes on 2 cores.
"""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import EpisodeShape, long_env, make_reciting, qwen2_config, task_rows, word_tokenizer
from measuring import OUTPUT_DIR, markdown_table, save_json
from transformers import Qwen2ForCausalLM

from cope_trl.chat import ChatFormat
from cope_trl.rollout.cached import CachedEngine
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.sampling import RowSampler
from cope_trl.spans import Spans
from cope_trl.types import TaskRef, Trajectory

# Seconds an environment takes for its answer, by episode and turn.
Delay = Callable[[int, int], float]


def spread(episode: int, turn: int) -> float:
    """1 to 500 ms, every factor as likely as any other."""
    return math.exp(random.Random(f"{episode}-{turn}").uniform(math.log(0.001), math.log(0.5)))


DELAYS: dict[str, Delay] = {
    "1 ms": lambda episode, turn: 0.001,
    "1–500 ms": spread,
    "one of 16 at 500 ms": lambda episode, turn: 0.5 if episode == 0 else 0.001,
    "500 ms": lambda episode, turn: 0.5,
}


class InStep:
    """A `Policy` over the kept cache: the same work, and everybody waits for everybody."""

    def __init__(self, engine: CachedEngine) -> None:
        self.engine = engine
        self._keys: list[tuple[list[int], int]] = []

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        answers: dict[int, Generation] = {}
        following, left = [], list(self._keys)
        for row, prompt in enumerate(prompts):
            ids = list(prompt)
            known = next((entry for entry in left if ids[: len(entry[0])] == entry[0]), None)
            if known is None:
                known = ([], self.engine.open(str(len(self._keys) + row)))
            else:
                left.remove(known)
            following.append((ids, known[1]))
            self.engine.sample(known[1], ids, max_new_tokens, lambda turn, row=row: answers.__setitem__(row, turn))
        while self.engine.advance():
            pass
        self._keys = following
        return [answers[row] for row in range(len(prompts))]


class Bench:
    """A model that recites, and environments that take their time."""

    def __init__(self, episodes: int, turns: int, hidden: int, layers: int) -> None:
        self.episodes, self.shape = episodes, EpisodeShape(turns=turns, observation=40)
        self.tokenizer = word_tokenizer()
        self.chat = ChatFormat(self.tokenizer)
        torch.manual_seed(0)
        self.model = Qwen2ForCausalLM(qwen2_config(hidden, layers, tied=False)).eval()
        make_reciting(self.model, self.tokenizer, self.shape)

    def play(self, delay: Delay, in_step: bool, numbers: Sequence[int]) -> tuple[float, list[Trajectory], Spans]:
        """Wall seconds, the episodes, and where the time went."""

        class Slow(long_env(self.shape)):
            def _act(self, action: Any) -> Any:
                time.sleep(delay(self.number, self.turn))
                return super()._act(action)

            def _begin(self, task_id: str | None, seed: int | None) -> str:
                self.number = seed or 0
                return super()._begin(task_id, seed)

        spans = Spans()
        engine = CachedEngine(self.model, [self.chat.end_of_turn_id], RowSampler(), len(numbers), spans=spans)
        pool = EnvironmentPool(lambda name: Slow())
        player = EpisodePlayer(pool, InStep(engine) if in_step else engine, self.chat, [], spans=spans)
        limits = EpisodeLimits({"": self.shape.turns}, 64, 30_000)
        rows = task_rows(self.shape, max(numbers) + 1)
        tasks = [TaskRef("long", rows[number]["task_id"]) for number in numbers]
        started = time.perf_counter()
        played = player.play(tasks, [rows[0]["prompt"]] * len(tasks), limits, list(numbers))
        seconds = time.perf_counter() - started
        pool.close()
        return seconds, played, spans


def measure(bench: Bench, delay: Delay, rounds: int) -> dict[str, float]:
    """Both schedules under one kind of delay, and the bound."""
    everybody = range(bench.episodes)
    waits = [sum(delay(episode, turn) for turn in range(bench.shape.turns)) for episode in everybody]
    slowest = max(everybody, key=lambda episode: waits[episode])
    cells: dict[str, list[float]] = {"generation": [], "alone": [], "lock_step": [], "own_pace": []}
    for _ in range(rounds):
        cells["generation"].append(bench.play(lambda episode, turn: 0.0, True, everybody)[0])
        cells["alone"].append(bench.play(delay, False, [slowest])[0])
        cells["lock_step"].append(bench.play(delay, True, everybody)[0])
        cells["own_pace"].append(bench.play(delay, False, everybody)[0])
    seconds = {name: statistics.median(values) for name, values in cells.items()}
    bound = max(seconds["generation"], seconds["alone"])
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "bound_seconds": bound,
        "lock_step_over_bound": seconds["lock_step"] / bound,
        "own_pace_over_bound": seconds["own_pace"] / bound,
        "lock_step_over_own_pace": seconds["lock_step"] / seconds["own_pace"],
    }


def plot(cells: dict[str, dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [("lock_step", "lock step"), ("own_pace", "each at its own pace"), ("bound", "no schedule can beat")]
    for offset, (name, label) in enumerate(names):
        places = [i + (offset - 1) * 0.27 for i in range(len(cells))]
        axes.bar(places, [cell[f"{name}_seconds"] for cell in cells.values()], width=0.25, label=label)
    axes.set_xticks(range(len(cells)), list(cells))
    axes.set(xlabel="an environment's answer takes", ylabel="seconds of a rollout")
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_dir", type=Path, default=Path(OUTPUT_DIR))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    bench = Bench(args.episodes, args.turns, args.hidden, args.layers)
    bench.play(DELAYS["1 ms"], False, [0])  # warm-up
    cells = {name: measure(bench, delay, args.rounds) for name, delay in DELAYS.items()}
    columns = (
        "lock_step_seconds",
        "own_pace_seconds",
        "bound_seconds",
        "own_pace_over_bound",
        "lock_step_over_own_pace",
    )
    print(markdown_table(("delay", *columns), [[name, *(cell[c] for c in columns)] for name, cell in cells.items()]))
    setting = {name: value for name, value in vars(args).items() if name != "output_dir"}
    save_json(args.output_dir / "ready_episodes.json", {"setting": setting, "delays": cells})
    plot(cells, args.output_dir / "ready_episodes.png")
    print(f"Results and plot: {args.output_dir}")


if __name__ == "__main__":
    main()
