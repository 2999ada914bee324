"""Two data-parallel processes on gloo: the update is the one-process update, and uneven episodes do not hang."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = """
import sys
import torch
sys.path.insert(0, sys.argv[3])
torch.set_num_threads(1)
from support import BACK, GO, MIXED_SCRIPTS, make_config, make_model, scripted_trainer

folder, kind = sys.argv[1], sys.argv[2]
world = int(__import__("os").environ.get("WORLD_SIZE", 1))
changes = dict(optim="sgd", max_grad_norm=1e9, weight_decay=0.0, learning_rate=0.05, gradient_accumulation_steps=2)
scripts, goals = MIXED_SCRIPTS, (2, 3)
if kind == "uneven":  # the first half plays 1 turn, the second 30
    scripts, goals = [[GO]] * 4 + [[BACK]] * 4, (1, 2)
    changes.update(max_turns=30)
elif kind != "shared_prefix":
    changes.update(forecast_engine="separate", forecast_batch_size=3)
if kind == "own_step":
    changes.update(forecast_update="separate", forecast_engine="auto")
changes.update(per_device_train_batch_size=4 // world, forecast_coef=0.5, forecast_grad_norm_steps=1)
trainer = scripted_trainer(make_model(), make_config(folder, **changes), goals, scripts)
trainer.train()
if trainer.accelerator.is_main_process:
    model = trainer.accelerator.unwrap_model(trainer.model)
    state = {name: p.detach() for name, p in model.named_parameters()}
    torch.save({"state": state, "log": trainer.state.log_history[0]}, folder + "/result.pt")
trainer.accelerator.wait_for_everyone()
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def run(folder: Path, processes: int, kind: str) -> dict:
    folder.mkdir()
    script = folder / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "torch.distributed.run", f"--nproc-per-node={processes}", f"--master-port={port}"]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "PYTHONPATH": str(root),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [*launch, str(script), str(folder), kind, str(root / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "result.pt", weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shared_prefix", "separate", "own_step"])
def test_two_processes_make_the_update_of_one(tmp_path, kind):
    from support import make_model

    start = dict(make_model().named_parameters())
    one, two = run(tmp_path / "one", 1, kind), run(tmp_path / "two", 2, kind)
    for name, value in one["state"].items():
        change, expected = two["state"][name] - start[name], value - start[name]
        assert float((change - expected).norm() / expected.norm()) < 5e-4, name
    for key in ("episode/success", "episode/turns", "forecast/windows", "tokens/forecast", "forecast/group_success"):
        assert two["log"][key] == pytest.approx(one["log"][key], rel=1e-6), key
    for key in ("forecast/loss", "forecast/nll_k0", "forecast/grad_ratio"):
        assert two["log"][key] == pytest.approx(one["log"][key], rel=2e-3), key


@pytest.mark.slow
def test_one_turn_against_thirty_does_not_hang(tmp_path):
    result = run(tmp_path / "uneven", 2, "uneven")
    assert result["log"]["episode/turns"] == pytest.approx((1 + 30) / 2)
