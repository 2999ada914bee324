"""`cope-trl eval`: Score, Succ. and turns of a model over a split."""

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from cope_trl.chat import ChatFormat
from cope_trl.data.recorder import TrajectoryRecorder
from cope_trl.data.tasks import load_tasks
from cope_trl.environments import EnvironmentTable
from cope_trl.evaluation.episodes import play_dataset
from cope_trl.evaluation.metrics import results_table, summarize
from cope_trl.rollout.cache_support import cache_obstacle
from cope_trl.rollout.cached import CachedEngine
from cope_trl.rollout.endpoint import EndpointPolicy
from cope_trl.rollout.endpoint_engine import EndpointEngine
from cope_trl.rollout.episodes import EpisodePlayer
from cope_trl.rollout.generation import Policy, TransformersPolicy, TurnEngine
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.sampling import RowSampler
from cope_trl.scripts.progress import evaluation_bar
from cope_trl.scripts.results import write_results

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Play a split once and print the table."""
    args = _parser().parse_args(argv)
    table = EnvironmentTable()
    options = json.loads(args.environment_options or "{}")
    dataset = load_tasks(args.environment, args.split, limit=args.limit, ids=args.ids, **options)
    table.check(dataset)
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    chat = ChatFormat(tokenizer)
    stops = sorted({tokenizer.eos_token_id, chat.end_of_turn_id})
    policy, context = _policy(args, tokenizer, stops, min(args.batch_size, len(dataset)))
    pool = EnvironmentPool(table.make, args.environment_timeout)
    bar, advance = evaluation_bar(len(dataset), f"Evaluating {args.model}", enabled=True)
    with bar:
        limits = table.limits(args, evaluation=True, context=context)
        player = EpisodePlayer(pool, policy, chat, stops, max_concurrent=args.batch_size)
        played = play_dataset(player, dataset, limits, str(args.seed), on_finished=advance)
    pool.close()
    results = summarize(played)
    Console().print(results_table(results, title=f"{args.environment}, {args.split}"))
    if args.output_dir:
        folder = Path(args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # "train" names the folder itself; "eval" would be a folder below it.
        TrajectoryRecorder(str(folder / "trajectories"), rank=0).record("train", 0, played)
        write_results(folder, {"arguments": vars(args), "results": results})
        print(f"Results and episodes: {folder}")


def _policy(
    args: argparse.Namespace, tokenizer: Any, stops: list[int], episodes: int
) -> tuple[Policy | TurnEngine, int | None]:
    """What samples for so many episodes at a time, and the longest sequence it takes in tokens."""
    if args.base_url:
        key = os.environ.get("OPENAI_API_KEY")
        served = EndpointPolicy(args.base_url, stops, temperature=args.temperature, api_key=key, connections=episodes)
        return EndpointEngine(served), served.context
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=args.dtype).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    obstacle = cache_obstacle(model, context)
    if obstacle is None:
        return CachedEngine(model, stops, RowSampler(args.temperature), episodes), context
    logger.info("All episodes advance in lock step, because %s.", obstacle)
    torch.manual_seed(args.seed)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return TransformersPolicy(model, stops, pad, args.temperature), context


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cope-trl eval", description="Score and success of a model over a split.")
    parser.add_argument("--model", required=True, help="path or Hub id (with --base_url only its tokenizer is loaded)")
    parser.add_argument("--base_url", help="sample from a vLLM server instead, for example http://localhost:8000/v1")
    parser.add_argument("--environment", required=True, help="registry name")
    parser.add_argument("--environment_options", help="options of the task list, as JSON")
    parser.add_argument("--split", default="test", help="split to play (default: test)")
    parser.add_argument("--ids", help="id file of the tasks to play")
    parser.add_argument("--limit", type=int, help="play this many tasks")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--batch_size", type=int, default=32, help="episodes at the same time")
    parser.add_argument("--max_turns_eval", type=int, help="turn limit (default: the environment's)")
    parser.add_argument("--max_tokens_per_turn", type=int, default=512, help="tokens a turn")
    parser.add_argument("--max_completion_length", type=int, default=8192, help="tokens an episode")
    parser.add_argument("--max_prompt_length", type=int, help="tokens of the prompt")
    parser.add_argument("--environment_timeout", type=float, default=120.0, help="seconds an environment call")
    parser.add_argument("--dtype", default="auto", help="dtype of the model (default: as saved)")
    parser.add_argument("--seed", type=int, default=42, help="seed of the sampling")
    parser.add_argument("--output_dir", help="where to keep results and episodes")
    return parser
