"""
What forecasting costs in the update: policy only, shared prefix, separate sequences, on the same trajectories.

    python examples/benchmarks/forecast_overhead.py

Five trajectories of 15 turns and about 2,400 tokens, three of them successful, go through forward and
backward of a real `CoPETrainer` with a 12-million-parameter model, one trajectory a micro-batch (the paper's
setting). The modes take turns within one run, so that a change of the machine's speed hits all alike, and are
compared by the median of the ratios within a round. Peak memory is that of a process of its own for each mode.
Prints a table and one JSON line. Takes about a quarter of an hour on 2 cores, most of it for separate sequences.
"""

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from datasets import Dataset

from cope_trl import CoPEConfig, CoPETrainer
from cope_trl.forecast.prompts import plan_ahead
from cope_trl.local_agent.model import build_tokenizer
from cope_trl.rollout.generation import Generation
from env_adapters import Action, Outcome, ReActText, TextEnv

TURNS, EPISODES, WON = 15, 5, 3
WORDS = [
    a + b
    for a in ("ba", "ki", "lo", "mu", "re", "sa", "ti", "vo")
    for b in ("dan", "fer", "gol", "hin", "jut", "kap", "lem", "nor")
]
MODES = {
    "policy only": {"forecast_coef": 0.0},
    "shared prefix": {"forecast_engine": "shared_prefix"},
    "separate": {"forecast_engine": "separate", "forecast_batch_size": 4},
}


def words(count: int, rng: random.Random) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


class LongEnv(TextEnv):
    """Fifteen turns of long observations; the episode is won if its last reply says so."""

    name, protocol, acknowledgement = "long", ReActText(), "OK."
    instruction = words(60, random.Random(0))

    @classmethod
    def tasks(cls, split: str):
        return []

    def _begin(self, task_id, seed):
        self.turn, self.rng = 0, random.Random(f"{task_id}")
        return words(100, self.rng)

    def _act(self, action: Action) -> Outcome:
        self.turn += 1
        last = self.turn == TURNS
        return Outcome(words(100, self.rng), success=last and action.text.startswith("win"), done=last)


class Scripted(CoPETrainer):
    """Replies of about 40 tokens; the first three episodes win."""

    def _sample_turn(self, prompts, max_new_tokens):
        rng = random.Random(len(prompts[0]))
        replies = [
            f"Thought: {words(24, rng)}. Action: {'win' if i < WON else 'wait'} {words(8, rng)}"
            for i in range(len(prompts))
        ]
        end = self.chat.end_of_turn_id
        return [Generation([*self.chat.tokenizer(r, add_special_tokens=False)["input_ids"], end]) for r in replies]


def build(mode: str, folder: str) -> Scripted:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    # The request for a plan is English, which any instruct model's tokenizer writes in about a token a word.
    texts = [f"{' '.join(WORDS)} Thought: Action: win wait {plan_ahead(k, 'list')}" for k in range(1, 10)]
    tokenizer = build_tokenizer(texts * 6, vocab_size=1024)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    args = CoPEConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=1,
        gradient_accumulation_steps=EPISODES,
        num_generations=EPISODES,
        max_turns=TURNS,
        beta=0.0,
        save_trajectories=False,
        forecast_grad_norm_steps=0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **MODES[mode],
    )
    row = {"prompt": LongEnv.standing_messages(), "environment": "long", "task_id": "0", "family": ""}
    trainer = Scripted(
        model=Qwen2ForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_list([row]),
        processing_class=tokenizer,
        environments={"long": LongEnv},
    )
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = EPISODES
    return trainer


def rollouts(trainer: Scripted) -> list[dict]:
    """The micro-batches of one optimizer step."""
    buffer = trainer._generate_and_score_completions([dict(trainer.train_dataset[0]) for _ in range(EPISODES)])
    per_row = {k: v for k, v in buffer.items() if isinstance(v, torch.Tensor) and v.dim()}
    shared = {k: v for k, v in buffer.items() if k not in per_row}
    return [{**shared, **{k: v[i : i + 1] for k, v in per_row.items()}} for i in range(EPISODES)]


def update(trainer: Scripted, batches: list[dict]) -> float:
    """Seconds of forward and backward over all micro-batches."""
    trainer.model.zero_grad()
    started = time.perf_counter()
    for batch in batches:
        trainer._compute_loss(trainer.model, batch).backward()
    return time.perf_counter() - started


def measure_memory(mode: str) -> float:
    """Peak resident memory in MiB of a process that makes one update."""
    command = [sys.executable, __file__, "--memory", mode, "--threads", str(torch.get_num_threads())]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--separate-repeats", type=int, default=2, help="rounds that include separate sequences")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--memory", choices=list(MODES), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        if args.memory:
            trainer = build(args.memory, folder)
            update(trainer, rollouts(trainer))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
            return
        # Before this process grows: a child's peak starts from its parent's.
        memory = {mode: measure_memory(mode) for mode in MODES}
        trainers = {mode: build(mode, folder) for mode in MODES}
        batches = {mode: rollouts(trainer) for mode, trainer in trainers.items()}
        seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
        for mode, trainer in trainers.items():
            update(trainer, batches[mode][-1:])  # a failed episode of each mode warms up
        for repeat in range(args.repeats):
            for mode, trainer in trainers.items():
                if mode == "separate" and repeat >= args.separate_repeats:
                    continue
                seconds[mode].append(update(trainer, batches[mode]))
                print(f"round {repeat + 1}, {mode}: {seconds[mode][-1]:.2f} s", file=sys.stderr)
        means = {mode: trainer._means["train"].flush() for mode, trainer in trainers.items()}
        episodes = trainers["policy only"].trajectories
        sizes = [len(e.ids) for e in episodes]
        parameters = sum(p.numel() for p in trainers["policy only"].model.parameters())
    report(
        seconds,
        means,
        sizes,
        parameters,
        memory,
        sum(e.success for e in episodes),
    )


def report(seconds: dict, means: dict, sizes: list[int], parameters: int, memory: dict, won: int) -> None:
    median = {mode: statistics.median(times) for mode, times in seconds.items()}
    policy = sum(sizes)
    tokens = {mode: policy + means[mode].get("tokens/forecast", 0) for mode in MODES}
    base = seconds["policy only"]
    # The ratio of each round, then their median; a mode may have sat out the later rounds.
    ratio = {mode: statistics.median(t / b for t, b in zip(seconds[mode], base, strict=False)) for mode in MODES}
    print(
        f"{parameters / 1e6:.1f} M parameters; {len(sizes)} trajectories of {TURNS} turns, "
        f"{policy / len(sizes):.0f} tokens on average; {won} successful"
    )
    print(f"{'':14}{'tokens':>9}{'seconds':>9}{'min–max':>15}{'update ×':>10}{'peak MiB':>10}")
    for mode in MODES:
        spread = f"{min(seconds[mode]):.2f}–{max(seconds[mode]):.2f}"
        print(f"{mode:14}{tokens[mode]:9.0f}{median[mode]:9.2f}{spread:>15}{ratio[mode]:10.2f}{memory[mode]:10.0f}")
    result = {
        "forecast_tokens_separate_over_shared": (tokens["separate"] - policy) / (tokens["shared prefix"] - policy),
        "update_overhead_shared": ratio["shared prefix"] - 1,
        "update_overhead_separate": ratio["separate"] - 1,
        "update_time_separate_over_shared": ratio["separate"] / ratio["shared prefix"],
        "peak_memory_shared_over_policy": memory["shared prefix"] / memory["policy only"],
        "peak_memory_separate_over_policy": memory["separate"] / memory["policy only"],
    }
    print(json.dumps({name: round(value, 3) for name, value in result.items()}))


if __name__ == "__main__":
    main()
