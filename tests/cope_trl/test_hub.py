"""Pushing to the Hub: a real client against a local server that speaks the endpoints it uses, and no other network."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import ModelCard

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
BY_LFS = (".safetensors", ".bin", ".pt", ".pth", ".png", ".parquet")


class Hub(ThreadingHTTPServer):
    """Repositories in memory: `files[repository][path]` is a file's content, `commits` (repository, message) pairs.

    A repository whose name ends in `refused` takes no upload.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files = defaultdict(dict)
        self.commits = []
        self.objects = {}
        self.unknown = []


class HubHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, value, status=200):
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def missing(self):
        self.server.unknown.append(f"{self.command} {self.path}")
        self.answer({"error": "unknown endpoint"}, 404)

    def do_PUT(self):
        content, oid = self.body(), self.path.rsplit("/", 1)[-1]
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self.answer({})

    def do_GET(self):
        self.missing()

    def do_POST(self):
        content, path = self.body(), unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(content)
            name = f"{asked['organization'] or 'somebody'}/{asked['name']}"
            self.answer({"url": f"{self.server.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self.answer(
                {"transfer": "basic", "objects": [self.upload(item) for item in json.loads(content)["objects"]]}
            )
        elif "/preupload/" in path:
            self.preupload(path, json.loads(content)["files"])
        elif "/commit/" in path:
            self.commit(path, [json.loads(line) for line in content.splitlines()])
        else:
            self.missing()

    def upload(self, item):
        if item["oid"] in self.server.objects:
            return item
        return {**item, "actions": {"upload": {"href": f"{self.server.url}/objects/{item['oid']}"}}}

    def repository(self, path):
        return "/".join(path.removeprefix("/api/models/").split("/")[:2])

    def preupload(self, path, files):
        if self.repository(path).endswith("refused"):
            return self.answer({"error": "storage is full"}, 403)
        modes = [(file["path"], "lfs" if file["path"].endswith(BY_LFS) else "regular") for file in files]
        return self.answer(
            {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes]}
        )

    def commit(self, path, operations):
        repository = self.repository(path)
        for operation in operations:
            key, value = operation["key"], operation["value"]
            if key == "header":
                self.server.commits.append((repository, value["summary"]))
            elif key == "lfsFile":
                self.server.files[repository][value["path"]] = self.server.objects[value["oid"]]
            else:
                assert (key, value["encoding"]) == ("file", "base64")
                self.server.files[repository][value["path"]] = base64.b64decode(value["content"])
        oid = f"{len(self.server.commits):040x}"
        self.answer({"commitUrl": f"{self.server.url}/{repository}/commit/{oid}", "commitOid": oid})


@pytest.fixture(scope="module")
def hub():
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


WORKER = """
import socket, sys
connect = socket.socket.connect
def connect_here(self, address):
    assert self.family == socket.AF_UNIX or address[0] == "127.0.0.1", address
    return connect(self, address)
socket.socket.connect = connect_here
sys.path.insert(1, sys.argv[1])
import torch
torch.set_num_threads(1)
from support import GO, make_config, make_model, make_tokenizer, scripted_trainer
from transformers import TrainerCallback

class Wait(TrainerCallback):  # a push reads files that the next one writes
    def on_save(self, *args, **kwargs):
        if getattr(self.trainer, "push_in_progress", None):
            self.trainer.push_in_progress.wait_until_done()

def trainer(name, peft_config=None, **changes):
    config = make_config(name, max_steps=2, save_strategy="steps", save_steps=1, hub_token="hf_secret", **changes)
    scripts = [[GO], ["Action: back"]]
    made = scripted_trainer(make_model(), config, (1,), scripts, make_tokenizer(), peft_config=peft_config)
    made.add_callback(Wait)
    next(c for c in made.callback_handler.callbacks if isinstance(c, Wait)).trainer = made
    return made

pushing = trainer("agent", push_to_hub=True, hub_model_id="user/agent", hub_strategy="checkpoint")
pushing.train()
print("PUSHED", pushing.push_to_hub(dataset_name="user/tasks").oid, flush=True)

refused = trainer("lost", push_to_hub=True, hub_model_id="user/refused")
refused.train()
try:
    refused.push_to_hub()
except Exception as error:
    print("RAISED", type(error).__name__, "storage is full" in str(error), flush=True)

try:
    import peft
except ImportError:
    print("NO PEFT")
else:
    lora = trainer("adapter", peft_config=peft.LoraConfig(r=2, target_modules=["q_proj"]))
    lora.train()
    lora.push_to_hub()
"""


@pytest.fixture(scope="module")
def worker(hub, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pushing")
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(ROOT / "tests")],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HOME": str(folder / "home"),
            "NO_PROXY": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


def test_what_is_pushed_is_the_model_its_card_and_the_picture(hub, worker):
    folder, done = worker
    assert "PUSHED" in done.stdout
    files = hub.files["user/agent"]
    wanted = {"README.md", "model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    wanted |= {"tokenizer_config.json", "chat_template.jinja", "training_args.bin", "assets/success_curve.png"}
    wanted |= {"trajectories/step-00000000-rank-00000.parquet", "trajectories/step-00000001-rank-00000.parquet"}
    assert wanted <= set(files)
    for name in wanted:
        assert files[name] == (folder / "agent" / name).read_bytes(), name
    card = ModelCard(files["README.md"].decode())
    assert {"trl", "grpo", "cope"} <= set(card.data.tags)
    assert card.data.datasets == "user/tasks"
    assert "cite" in card.text.lower()
    assert "2610.20597" in card.text
    assert "2402.03300" in card.text
    assert "](assets/success_curve.png)" in card.text
    assert files["assets/success_curve.png"].startswith(b"\x89PNG")
    assert not [name for name in files if name.startswith(("_", "checkpoint-"))]
    assert hub.unknown == []
    assert b"hf_secret" not in files["README.md"]


def test_checkpoints_are_pushed_while_training_goes_on(hub, worker):
    messages = [message for repository, message in hub.commits if repository == "user/agent"]
    assert messages[:2] == ["Training in progress, step 1", "Training in progress, step 1, checkpoint"]
    assert messages[-1] == "End of training"
    checkpoint = {name for name in hub.files["user/agent"] if name.startswith("last-checkpoint/")}
    last = {f"last-checkpoint/{name}" for name in ("trainer_state.json", "cope_settings.json", "cope_state_0.pt")}
    assert last <= checkpoint
    assert json.loads(hub.files["user/agent"]["last-checkpoint/trainer_state.json"])["global_step"] == 2


def test_a_refused_push_does_not_end_the_run(hub, worker):
    folder, done = worker
    assert "user/refused" not in hub.files
    assert done.stderr.count("A push to the Hub failed; training goes on and everything is in 'lost'") == 2
    assert "storage is full" in done.stderr
    state = json.loads((folder / "lost/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert (folder / "lost/model.safetensors").exists()
    assert len(list((folder / "lost/trajectories").glob("*.parquet"))) == 2
    assert "RAISED HfHubHTTPError True" in done.stdout  # what the user asks for by hand is answered for


def test_an_adapter_is_pushed_as_an_adapter(hub, worker):
    _, done = worker
    if "NO PEFT" in done.stdout:
        pytest.skip("peft is not installed")
    files = hub.files["somebody/adapter"]
    assert {"README.md", "adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= set(files)
    assert "model.safetensors" not in files
    assert "](assets/success_curve.png)" in files["README.md"].decode()
