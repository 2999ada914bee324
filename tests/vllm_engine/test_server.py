"""vLLM's OpenAI server on CPU: episodes played through it, TRL's client for it, and chat as a customer would."""

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from support import make_config

pytest.importorskip("vllm")
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("these tests are for vLLM's CPU backend", allow_module_level=True)

import trl.generation.vllm_generation as seam
from transformers import AutoModelForCausalLM, AutoTokenizer

from cope_trl import engine_trainer
from cope_trl.chat import ChatFormat
from cope_trl.cli import main
from cope_trl.cope_trainer import CoPETrainer
from cope_trl.environments import EnvironmentTable
from cope_trl.errors import RolloutError
from cope_trl.evaluation.episodes import play_dataset
from cope_trl.rollout.endpoint import EndpointPolicy
from cope_trl.rollout.endpoint_engine import EndpointEngine
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import TransformersPolicy
from cope_trl.rollout.pool import EnvironmentPool

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

CONTEXT = 256
KEY = "a-key"


@pytest.fixture(scope="session")
def address(agent):
    """Address of a server for the agent, with a context of 256 tokens and a key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Not `vllm serve`: that command looks for a distribution named vllm, which the CPU build is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", agent, "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager", "--max-model-len", str(CONTEXT)]
    command += ["--logprobs-mode", "processed_logprobs", "--served-model-name", "agent", "--api-key", KEY]
    # What TRL's colocated engine has put into the environment is for that engine.
    own = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment = {name: value for name, value in os.environ.items() if name not in own}
    environment["VLLM_LOGGING_LEVEL"] = "INFO"  # it says when it is up
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment, text=True)
    lines, up = [], threading.Event()

    def read():
        for line in process.stdout:
            lines.append(line)
            if "Application startup complete" in line:
                up.set()
        up.set()  # the server has ended

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert up.wait(500), "".join(lines[-30:])
        assert process.poll() is None, "".join(lines[-30:])
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)
        reader.join(10)


@pytest.fixture(scope="session")
def parts(agent):
    """Model, tokenizer, chat format and stop tokens."""
    tokenizer = AutoTokenizer.from_pretrained(agent, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(agent, dtype="float32").eval()
    return model, tokenizer, ChatFormat(tokenizer), [tokenizer.eos_token_id]


@contextmanager
def player(parts, policy):
    _, _, chat, stops = parts
    pool = EnvironmentPool(EnvironmentTable().make)
    try:
        yield EpisodePlayer(pool, policy, chat, stops)
    finally:
        pool.close()


def limits(**changes):
    return EpisodeLimits({"": 30}, **{"max_tokens_per_turn": 24, "max_completion_length": 900, **changes})


def play(parts, policy, tasks):
    with player(parts, policy) as plays:
        return play_dataset(plays, tasks, limits(max_total_tokens=CONTEXT), "seed")


def test_episodes_played_through_the_server_are_those_of_the_model(address, parts, tasks):
    model, tokenizer, _, stops = parts
    served = EndpointPolicy(address, stops, temperature=0, api_key=KEY)
    assert (served.model, served.context) == ("agent", CONTEXT)
    local = TransformersPolicy(model, stops, tokenizer.pad_token_id, temperature=0)
    played = [play(parts, policy, tasks) for policy in (served, EndpointEngine(served), local)]
    theirs = played.pop()
    assert all(len(e.turns) > 1 for e in theirs)
    for mine in played:
        assert [e.ids for e in mine] == [e.ids for e in theirs]
        assert [e.success for e in mine] == [e.success for e in theirs]


def test_an_episode_is_the_same_whatever_the_server_plays_beside_it(address, parts, tasks):
    policy = EndpointPolicy(address, parts[3], temperature=0.7, api_key=KEY, connections=6)
    together = [e.ids for e in play(parts, EndpointEngine(policy), tasks.select([0, 1] * 3))]
    assert len(set(together)) == len(together)  # seeds differ, also those of one task
    alone = [e.ids for e in play(parts, EndpointEngine(policy), tasks.select([0, 1]))]
    assert alone == together[:2]


@torch.no_grad()
def test_sampled_log_probs_of_the_server(address, parts):
    model, _, chat, stops = parts
    prompts = [chat.prompt_ids([], text) for text in ("You see: a mug.", "Your task is to: put a mug on the desk.")]
    for generation, prompt in zip(
        EndpointPolicy(address, stops, temperature=0.7, api_key=KEY)(prompts, 12), prompts, strict=True
    ):
        ids = torch.tensor([[*prompt, *generation.ids]])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / 0.7
        own = torch.log_softmax(logits, -1).gather(-1, torch.tensor(generation.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(generation.logprobs), own, rtol=0, atol=1e-4)


def test_a_prompt_close_to_the_servers_context_does_not_cost_the_others_their_room(address, parts):
    _, _, _, stops = parts
    policy = EndpointPolicy(address, stops, api_key=KEY)
    short, long = [5, 6, 7], list(range(10, 10 + CONTEXT - 4))
    generations = policy([short, long, short, short], 40)
    lengths = [len(g.ids) for g in generations]
    assert lengths[1] <= 4
    assert max(lengths) > 4
    for row in (0, 2, 3):
        assert lengths[row] == 40 or generations[row].ids[-1] in stops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"api_key": "another"}, "answered 401"),
        ({"api_key": KEY, "model": "unknown"}, r"`model` is 'unknown', but .* serves \['agent'\]"),
    ],
)
def test_what_a_server_refuses_is_named(address, changes, message):
    with pytest.raises(RolloutError, match=message):
        EndpointPolicy(address, [2], **changes)


class Unsynchronised(seam.VLLMClient):
    """TRL's client without the transfer of weights, which needs NCCL and therefore GPUs."""

    def __init__(self, *args, **kwargs):
        self.session_headers = {"Authorization": f"Bearer {KEY}"}
        super().__init__(*args, **kwargs)

    def init_communicator(self, device):
        pass

    def update_named_params(self, metadata, named_params):
        for _ in named_params:
            pass

    def _post(self, url, **kwargs):
        return (
            {} if url.endswith("/reset_prefix_cache") else super()._post(url, headers=self.session_headers, **kwargs)
        )

    def _get(self, url, **kwargs):
        return super()._get(url, headers=self.session_headers, **kwargs)


@torch.no_grad()
def distance(model, episode):
    """How far the sampled log-probabilities of an episode are from the model's at temperature 0.7."""
    ids, cut = torch.tensor([episode.ids]), len(episode.prompt_ids)
    logits = model(input_ids=ids).logits[0, cut - 1 : -1] / 0.7
    own = torch.log_softmax(logits, -1).gather(-1, ids[0, cut:, None])[:, 0]
    mask = torch.tensor(episode.completion_mask, dtype=torch.bool)
    return float((torch.tensor(episode.logprobs)[mask] - own[mask]).abs().max())


@pytest.mark.parametrize("schedule", ["auto", "lock_step"])
def test_a_training_step_sampled_by_the_server(address, agent, tasks, tmp_path, monkeypatch, schedule):
    """Server mode but for the weights: sampling, limits and log-probabilities are the real ones."""
    monkeypatch.setattr(seam, "VLLMClient", Unsynchronised)
    monkeypatch.setattr(engine_trainer, "EndpointPolicy", partial(EndpointPolicy, api_key=KEY))
    config = make_config(
        tmp_path,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=address.removesuffix("/v1"),
        vllm_max_model_length=CONTEXT,
        rollout_schedule=schedule,
        max_turns=30,
        temperature=0.7,
    )
    trainer = CoPETrainer(
        model=agent,
        reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
        args=config,
        train_dataset=tasks,
    )
    assert (trainer.lock_step_reason is None) == (schedule == "auto")
    start = AutoModelForCausalLM.from_pretrained(agent, dtype="float32").eval()
    trainer.train()
    assert trainer.state.log_history[0]["grad_norm"] > 0
    # Each turn's limit had to fit into what was left of the server's context, or it would have refused the batch.
    assert CONTEXT - 30 < max(len(e.ids) for e in trainer.trajectories) <= CONTEXT
    assert max(distance(start, episode) for episode in trainer.trajectories) < 1e-4


WORKER = """
import json, os, sys
from functools import partial
import torch
from transformers import AutoModelForCausalLM
sys.path[:0] = [sys.argv[1], sys.argv[2]]
torch.set_num_threads(1)
import test_server as tests
from cope_trl.data.tasks import load_tasks
from support import make_config
agent, address, folder = sys.argv[3:6]
tests.seam.VLLMClient = tests.Unsynchronised
tests.engine_trainer.EndpointPolicy = partial(tests.EndpointPolicy, api_key=tests.KEY)
config = make_config(
    folder, use_vllm=True, vllm_mode="server", vllm_server_base_url=address.removesuffix("/v1"),
    vllm_max_model_length=tests.CONTEXT, max_turns=30, temperature=0.7,
)
trainer = tests.CoPETrainer(
    model=agent, args=config, train_dataset=load_tasks("household", "train", size="tiny", limit=2),
    reward_funcs=lambda completions, **_: [float(i % 2) for i in range(len(completions))],
)
start = AutoModelForCausalLM.from_pretrained(agent, dtype="float32").eval()
trainer.train()
rank = trainer.accelerator.process_index
far = max(tests.distance(start, episode) for episode in trainer.trajectories)
facts = {"reason": trainer.lock_step_reason, "far": far, "turns": [len(e.turns) for e in trainer.trajectories]}
open(f"{folder}/rank{rank}.json", "w").write(json.dumps(facts))
trainer.accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


def test_two_processes_ask_the_server_each_for_itself(address, agent, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    here = Path(__file__).parent
    # The root by name: `tests/` has a folder called `cope_trl` too.
    environment |= {"PYTHONPATH": str(here.parents[1]), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [str(here), str(here.parent), agent, address, str(tmp_path)]
    command = [*launch, str(tmp_path / "worker.py"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-9000:]
    for rank in range(2):
        facts = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert facts["reason"] is None
        assert facts["far"] < 1e-4
        assert max(facts["turns"]) > 1


def test_the_server_plays_a_customer(address):
    """Chat completions through the client that the simulated customers of benchmarks use."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=address, api_key=KEY)
    messages = [{"role": "system", "content": "You are a customer."}, {"role": "user", "content": "How can I help?"}]
    answer = client.chat.completions.create(model="agent", messages=messages, max_tokens=8, temperature=0.7)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert 0 < answer.usage.completion_tokens <= 8
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=address, api_key="another").models.list()


def test_the_command_line_evaluates_through_the_server(address, agent, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    common = ["eval", "--model", agent, "--environment", "household", "--environment_options", '{"size": "tiny"}']
    common += ["--split", "train", "--limit", "2", "--max_tokens_per_turn", "24", "--max_turns_eval", "4"]
    results = []
    for name, options in {"served": ["--base_url", address], "local": []}.items():
        main([*common, *options, "--output_dir", str(tmp_path / name)])
        results.append(json.loads((tmp_path / name / "results.json").read_text())["results"])
    assert results[0] == results[1]
