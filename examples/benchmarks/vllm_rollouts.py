"""
Rollouts with vLLM: every episode at its own pace, against all in lock step as TRL asks vLLM, in one process.

    python examples/benchmarks/vllm_rollouts.py [--output_dir out/benchmarks]

Needs vLLM; on a CPU use the environment of `make test-vllm`:

    .venv-vllm/bin/python examples/benchmarks/vllm_rollouts.py

A small model with random weights plays the same episodes under three schedules:

- engine: a request a turn, made when its episode is ready for it (`VLLMEngine`);
- lock step: one call a turn with the prompts of all episodes, after the slowest environment has answered;
- engine, nothing kept: as the first, but every turn computes its whole prompt anew.

Once with environments that answer after a random delay, once with environments that answer at once. Replies end at
random, as those of a trained model do, so their lengths differ. Every turn is seeded, so each schedule samples the
same replies as far as vLLM computes the same logits; how many episodes came out equal is printed.

Prints wall time against lock step, and the prompt tokens computed and found in the cache; writes vllm_rollouts.json
and vllm_rollouts.png. Takes two to three minutes on 2 cores, half of it to start vLLM.
"""

import argparse
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# As TRL has it: vLLM in this process.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import measuring
import torch
import vllm
from common import EpisodeShape, long_env, qwen2_config, task_rows, word_tokenizer
from matplotlib.figure import Figure
from transformers import Qwen2ForCausalLM
from vllm import LLM, SamplingParams

from cope_trl.chat import ChatFormat
from cope_trl.evaluation.episodes import play_dataset
from cope_trl.rollout.endpoint import turn_seed
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.vllm_engine import VLLMEngine
from cope_trl.types import Trajectory
from env_adapters import Action, Outcome, TextEnv

SCHEDULES = ("engine", "lock step", "engine, nothing kept")
REPLY = 16  # tokens of a reply, on average
LIMIT = 256  # tokens of a reply, at most


def delayed_env(shape: EpisodeShape, longest: float) -> type[TextEnv]:
    """An environment that takes between 1 ms and `longest` seconds to answer, the same in every run."""

    class DelayedEnv(long_env(shape)):  # type: ignore[misc]
        def _begin(self, task_id: str | None, seed: int | None) -> str:
            self.delays = random.Random(f"delays of {task_id}")
            return super()._begin(task_id, seed)

        def _act(self, action: Action) -> Outcome:
            if longest:
                time.sleep(self.delays.uniform(0.001, longest))
            return super()._act(action)

    return DelayedEnv


class LockStep:
    """A policy that asks vLLM once a turn for all episodes, as TRL does, with the seeds of [`VLLMEngine`].

    Args:
        seeds: of the episodes, by their first prompt.
    """

    def __init__(self, llm: LLM, sampling: dict[str, Any], seeds: Sequence[str]) -> None:
        self.llm, self.sampling, self.seeds = llm, sampling, seeds
        self.counts: Counter[str] = Counter()
        self._first: list[tuple[int, ...]] = []
        self._turns: Counter[int] = Counter()

    def __call__(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Generation]:
        if not self._first:
            self._first = [tuple(prompt) for prompt in prompts]
        parameters = [SamplingParams(**self._own(prompt), max_tokens=max_new_tokens) for prompt in prompts]
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        generations = []
        for output in self.llm.generate(asked, parameters, use_tqdm=False):
            ids = list(output.outputs[0].token_ids)
            self.counts["prompt"] += len(output.prompt_token_ids)
            self.counts["cached"] += output.num_cached_tokens or 0
            self.counts["sampled"] += len(ids)
            generations.append(Generation(ids))
        return generations

    def _own(self, prompt: Sequence[int]) -> dict[str, Any]:
        episode = next(i for i, first in enumerate(self._first) if tuple(prompt[: len(first)]) == first)
        turn = self._turns[episode]
        self._turns[episode] += 1
        return {**self.sampling, "detokenize": False, "seed": turn_seed(self.seeds[episode], turn)}


def start_vllm(folder: str, args: argparse.Namespace, chat: ChatFormat) -> LLM:
    """vLLM with a model of random weights, set up as TRL would."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(qwen2_config(args.hidden, args.layers)).save_pretrained(folder)
    chat.tokenizer.save_pretrained(folder)
    on_cpu = not torch.cuda.is_available()
    return LLM(
        model=folder,
        max_model_len=args.turns * (args.observation + LIMIT) + 1024,
        max_num_seqs=args.episodes,
        max_num_batched_tokens=4096,
        logprobs_mode="processed_logprobs",
        gpu_memory_utilization=0.3,
        # A CPU has no fast bfloat16, and compiling takes it a minute.
        **({"dtype": "float32", "enforce_eager": True} if on_cpu else {}),
    )


def play(
    llm: LLM, schedule: str, args: argparse.Namespace, longest: float, chat: ChatFormat
) -> tuple[dict[str, Any], list[Trajectory]]:
    """Play all episodes once on an empty cache; what it took, and the episodes."""
    shape = EpisodeShape(args.turns, args.observation)
    env, dataset = delayed_env(shape, longest), task_rows(shape, args.episodes)
    stop = chat.end_of_turn_id
    vocabulary = len(chat.tokenizer)
    # All tokens are about equally likely; this makes the end of a turn likely enough for the mean length.
    bias = torch.tensor((vocabulary - 1) / (REPLY - 1)).log().item()
    sampling: dict[str, Any] = {"stop_token_ids": [stop], "logprobs": 0, "logit_bias": {stop: bias}}
    policy: LockStep | VLLMEngine
    if schedule == "lock step":
        policy = LockStep(llm, sampling, [f"0-{index}" for index in range(args.episodes)])
    else:
        kept = {} if schedule == "engine" else {"skip_reading_prefix_cache": True}
        policy = VLLMEngine(llm, sampling | kept)
    pool = EnvironmentPool(lambda name: env())
    player = EpisodePlayer(pool, policy, chat, [stop])
    limits = EpisodeLimits({"": args.turns}, LIMIT, args.turns * (args.observation + LIMIT))
    llm.reset_prefix_cache()
    started, cpu = time.perf_counter(), time.process_time()
    played = play_dataset(player, dataset, limits, "0")
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    pool.close()
    tokens = policy.tokens if isinstance(policy, VLLMEngine) else argparse.Namespace(**policy.counts)
    measured = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
        "sampled_tokens": tokens.sampled,
        "turns": sum(len(episode.turns) for episode in played),
    }
    return measured, played


def measure(llm: LLM, args: argparse.Namespace, chat: ChatFormat) -> list[dict[str, Any]]:
    """A row for each delay and schedule: the fastest of its runs, which take turns with those of the others."""
    rows = []
    for longest in args.delays:
        runs: dict[str, list[dict[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
        episodes: dict[str, list[Any]] = {}
        for _ in range(args.runs):
            for schedule in SCHEDULES:
                measured, played = play(llm, schedule, args, longest, chat)
                runs[schedule].append(measured)
                episodes[schedule] = [episode.ids for episode in played]
        reference = min(run["seconds"] for run in runs["lock step"])
        for schedule in SCHEDULES:
            best = min(runs[schedule], key=lambda run: run["seconds"])
            same = sum(a == b for a, b in zip(episodes[schedule], episodes["lock step"], strict=True))
            row = {"delay": longest, "schedule": schedule, "ratio": best["seconds"] / reference, **best}
            rows.append(row | {"same_episodes": same, "all_seconds": [run["seconds"] for run in runs[schedule]]})
    return rows


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Wall time against lock step, and prompt tokens by what became of them."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    times, tokens = figure.subplots(1, 2)
    labels = [f"{row['schedule']}\ndelays: {delay_text(row['delay'])}" for row in rows]
    times.barh(labels, [row["ratio"] for row in rows])
    times.axvline(1.0, color="black", linewidth=0.8)
    times.set_xlabel("wall time of a rollout, lock step = 1")
    computed = [row["prompt_tokens"] - row["cached_tokens"] for row in rows]
    tokens.barh(labels, computed, label="computed")
    tokens.barh(labels, [row["cached_tokens"] for row in rows], left=computed, label="found in the cache", alpha=0.5)
    tokens.set_xlabel("prompt tokens")
    tokens.set_yticks([])
    tokens.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
    for axes in (times, tokens):
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def delay_text(longest: float) -> str:
    return f"1 to {1000 * longest:.0f} ms" if longest else "none"


def table(rows: Sequence[dict[str, Any]], episodes: int) -> str:
    head = ["delay", "schedule", "time / lock step", "seconds", "prompt tokens computed", "cached", "sampled", "equal"]
    return measuring.markdown_table(
        head,
        [
            (
                delay_text(row["delay"]),
                row["schedule"],
                row["ratio"],
                row["seconds"],
                row["prompt_tokens"] - row["cached_tokens"],
                row["cached_tokens"],
                row["sampled_tokens"],
                f"{row['same_episodes']} of {episodes}",
            )
            for row in rows
        ],
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(measuring.OUTPUT_DIR))
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--observation", type=int, default=64, help="tokens of an observation")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.5, 0.0], help="longest ones, in seconds")
    parser.add_argument("--runs", type=int, default=2, help="of each schedule; the fastest counts")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args(arguments)
    chat = ChatFormat(word_tokenizer())
    with tempfile.TemporaryDirectory() as folder:
        llm = start_vllm(folder, args, chat)
        play(llm, "engine", args, 0.0, chat)  # the first run sets everything up
        rows = measure(llm, args, chat)
    cache = llm.llm_engine.vllm_config.cache_config
    settings = {name: value for name, value in vars(args).items() if name != "output_dir"}
    result = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "prefix_caching": cache.enable_prefix_caching,
        "block_size": cache.block_size,
        "settings": settings,
        "rows": rows,
    }
    print(table(rows, args.episodes))
    print(f"The cache keeps whole blocks of {cache.block_size} tokens.")
    measuring.save_json(args.output_dir / "vllm_rollouts.json", result)
    draw(rows, args.output_dir / "vllm_rollouts.png")
    return result


if __name__ == "__main__":
    main()
