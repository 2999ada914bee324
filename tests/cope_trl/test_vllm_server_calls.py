"""Ranks that share one vLLM engine, in two gloo processes: who sends what, and every answer reaches its own episode.

vLLM itself is replaced, everything else is real. The stand-in says, in each turn, a number that only the prompt it was
given determines, so that an answer that reached another episode shows.

Three kinds: a server only TRL's client on the first rank reaches, a colocated engine spread over both ranks (in both
all turns are sampled in lock step), and a server every rank asks for itself.
"""

import json
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

TURNS = 30
LIMIT = 24

WORKER = """
import json, os, sys, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import torch
import trl.generation.vllm_generation as seam
sys.path.insert(0, sys.argv[3])
torch.set_num_threads(1)
from datasets import Dataset
from support import CountEnv, count_rows, make_config, make_model, make_tokenizer
from test_vllm_server_calls import number, reply

folder, kind, port = sys.argv[1], sys.argv[2], int(sys.argv[4])
rank = int(os.environ["RANK"])
tokenizer, calls = make_tokenizer(), []
END = tokenizer.eos_token_id

def answer(prompts, limit):
    ids = [tokenizer(reply(tokenizer.decode(p), p), add_special_tokens=False)["input_ids"] + [END] for p in prompts]
    assert all(len(row) <= 24 for row in ids)
    ids = [row[:limit] for row in ids]
    return ids, [[[-number(p) / 1e6 - i] for i in range(len(row))] for p, row in zip(prompts, ids)]

class Client:
    model = "stand-in"
    def __init__(self, **kwargs):
        calls.append(["connect"])
    def init_communicator(self, device):
        calls.append(["communicator"])
    def update_named_params(self, metadata, named):
        if kind == "own_pace":  # the other rank has nothing to do here; does it wait nevertheless?
            early.clear()
            calls.append(["early", early.wait(1.0)])
        calls.append(["weights", [name for name, _ in named] == [name for name, _, _ in metadata]])
    def reset_prefix_cache(self):
        calls.append(["reset"])
    def generate(self, prompts, features, n, max_tokens, generation_kwargs, **_):
        calls.append(["generate", [number(p) for p in prompts], n, max_tokens, generation_kwargs])
        ids, logprobs = answer(prompts, max_tokens)
        return {"prompt_ids": prompts, "completion_ids": ids, "logprobs": logprobs}

early = threading.Event()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply({"data": [{"id": "stand-in", "max_model_len": 4096}]})
    def do_POST(self):
        early.set()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        stops = {"stop_token_ids": body["stop_token_ids"]}
        calls.append(["generate", [number(p) for p in body["prompt"]], body["n"], body["max_tokens"], stops])
        ids, logprobs = answer(body["prompt"], body["max_tokens"])
        self.reply({"choices": [
            {"index": i, "token_ids": row, "logprobs": {"token_logprobs": [value for value, in values]}}
            for i, (row, values) in enumerate(zip(ids, logprobs))
        ]})
    def reply(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def log_message(self, *args):
        pass

if kind == "own_pace" and rank == 0:
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

class Engine:
    def __init__(self, **kwargs):
        model = SimpleNamespace(load_weights=lambda weights: None)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=worker), model_config=SimpleNamespace(max_model_len=4096)
        )
    def reset_prefix_cache(self):
        calls.append(["reset"])
    def generate(self, prompts, sampling_params, use_tqdm):
        prompts, limit = [p["prompt_token_ids"] for p in prompts], sampling_params.max_tokens
        calls.append(["generate", [number(p) for p in prompts], sampling_params.n, limit])
        chosen = lambda token, value: {token: SimpleNamespace(rank=1, logprob=value[0])}
        return [
            SimpleNamespace(
                prompt_token_ids=p,
                outputs=[SimpleNamespace(token_ids=ids, logprobs=[chosen(*pair) for pair in zip(ids, values)])],
            )
            for p, ids, values in zip(prompts, *answer(prompts, limit))
        ]

seam.is_vllm_available = lambda *_, **__: True
seam.VLLMClient, seam.LLM, seam.SamplingParams = Client, Engine, SimpleNamespace

from cope_trl.cope_trainer import CoPETrainer

played = []
class Kept(CoPETrainer):
    def _rollout(self, prompts, trainer):
        output = super()._rollout(prompts, trainer)
        played.append(self.trajectories)
        return output

vllm = {"vllm_mode": "server", "vllm_server_base_url": f"http://127.0.0.1:{port}"}
if kind == "tensor_parallel":
    vllm = {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2}
changes = dict(use_vllm=True, max_steps=2, max_turns=30, num_generations=2, max_completion_length=4000)
trainer = Kept(
    model=make_model(), args=make_config(folder, **changes, **vllm), processing_class=tokenizer,
    environments={"count": CountEnv}, train_dataset=Dataset.from_list(count_rows(1, 3, 2, 4, 1, 3, 4, 4)),
)
trainer.train()
def turn(episode, t):
    # Number of the prompt, reply, and log-probabilities.
    first = t.start - len(episode.prompt_ids)
    return number(episode.ids[: t.start]), t.reply, list(episode.logprobs[first : first + t.end - t.start])

episodes = [
    {"goal": int(e.task.task_id[-1]), "success": e.success, "turns": [turn(e, t) for t in e.turns]}
    for batch in played
    for e in batch
]
log = {"calls": calls, "episodes": episodes, "lock_step_reason": trainer.lock_step_reason}
open(f"{folder}/rank{rank}.json", "w").write(json.dumps(log))
trainer.accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


def number(ids) -> int:
    """A number that tells one prompt from another."""
    return zlib.crc32(",".join(map(str, ids)).encode()) % 100_000


def reply(text: str, ids) -> str:
    """What the stand-in says: goal 4 is never reached, all others at once."""
    action = "back" if "Go to room 4." in text else "go"
    return f"{number(ids)}\nAction: {action}"


@pytest.fixture(scope="module", params=["server", "tensor_parallel", "own_pace"])
def ranks(request, tmp_path_factory):
    """What each of two ranks called and played, over two steps of four episodes a rank."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "worker.py").write_text(WORKER)
    with socket.socket() as probe, socket.socket() as another:
        probe.bind(("127.0.0.1", 0))
        another.bind(("127.0.0.1", 0))
        port, server_port = probe.getsockname()[1], another.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), str(Path(__file__).parent)]),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command = [*launch, str(folder / "worker.py"), str(folder), request.param, str(root / "tests")]
    command.append(str(server_port))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    return request.param, logs


def generations(log):
    return [call for call in log["calls"] if call[0] == "generate"]


@pytest.mark.slow
def test_every_answer_reaches_the_episode_that_asked(ranks):
    _, logs = ranks
    episodes = [episode for log in logs for episode in log["episodes"]]
    assert len(episodes) == 16
    for episode in episodes:
        expected = {4: TURNS}.get(episode["goal"], episode["goal"])
        assert len(episode["turns"]) == expected
        assert episode["success"] == (episode["goal"] != 4)
        for asked, said, logprobs in episode["turns"]:
            assert said.split("\n")[0] == str(asked)
            assert logprobs == pytest.approx([-asked / 1e6 - i for i in range(len(logprobs))])


def asked_by_episodes(logs):
    return sorted(n for log in logs for e in log["episodes"] for n, _, _ in e["turns"])


@pytest.mark.slow
def test_one_call_a_turn_with_every_active_prompt_and_the_whole_limit(ranks):
    kind, (first, second) = ranks
    assert any(e["goal"] == 4 for log in (first, second) for e in log["episodes"])
    calls = generations(first)
    if kind == "own_pace":  # a call for each turn of each episode
        assert {len(call[1]) for call in calls} == {1}
    else:
        assert len(calls) == 2 * TURNS  # both steps hold an episode of 30 turns, and no turn asks twice
    assert sorted(n for call in calls for n in call[1]) == asked_by_episodes((first, second))  # no placeholder either
    assert {call[2] for call in calls} == {1}
    assert {call[3] for call in calls} == {LIMIT}


@pytest.mark.slow
def test_who_talks_to_the_engine(ranks):
    kind, (first, second) = ranks
    reasons = {"server": "main process only", "tensor_parallel": "`vllm_tensor_parallel_size` is 2"}
    for log in (first, second):
        assert kind not in reasons or reasons[kind] in log["lock_step_reason"]
        assert kind in reasons or log["lock_step_reason"] is None
    if kind == "tensor_parallel":  # both hold a part of the engine and must ask it the same
        assert generations(first) == generations(second)
        return
    assert second["calls"] == []
    kinds = [call[0] for call in first["calls"]]
    steps = [["weights", "reset", *["generate"] * TURNS]] * 2
    if kind == "own_pace":
        # Nobody samples while weights are under way, and all have done so before the next ones come.
        assert [call for call in first["calls"] if call[0] == "early"] == [["early", False]] * 2
        batches = [[e for log in (first, second) for e in log["episodes"][part]] for part in (slice(4), slice(4, 8))]
        turns = [sum(len(e["turns"]) for e in batch) for batch in batches]
        steps = [["early", "weights", "reset", *["generate"] * count] for count in turns]
    assert kinds == ["connect", "communicator", *steps[0], *steps[1]]
    assert all(call[1] for call in first["calls"] if call[0] == "weights")
    assert all(call[4]["stop_token_ids"] for call in generations(first))
