"""TRL's tool loop on two processes whose episodes differ in length: every rank samples equally often."""

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
sys.path.insert(0, sys.argv[2])
torch.set_num_threads(1)
from driven import CLIMB, DONE, Driven, Stairs, driven_trainer
from support import make_model
from trl import GRPOTrainer

asked = []

def collective(self, prompt_ids, *args, **kwargs):
    # Sampling is collective under ZeRO-3, FSDP and with a vLLM server: this hangs unless both ranks come.
    self.accelerator.gather(torch.tensor([len(prompt_ids)]))
    asked.append(len(prompt_ids))
    if prompt_ids == [[self.eos_token_ids[0]]]:
        return [[self.eos_token_ids[0]]], None
    return [reply.ids for reply in self.script(prompt_ids, self.max_completion_length)], None

del Driven._generate_single_turn  # what stands between the tool loop and TRL's sampling is under test
GRPOTrainer._generate_single_turn = collective

# The first process has episodes of 1 turn, the second of 30.
scripts = [[DONE]] * 2 + [[CLIMB] * 29 + [DONE]] * 2
changes = dict(per_device_train_batch_size=2, max_completion_length=8000, forecast_coef=0.0)
model = make_model(max_position_embeddings=16384)
trainer = driven_trainer(sys.argv[1], scripts, model=model, environment_factory=Stairs, **changes)
trainer.train()
rank = trainer.accelerator.process_index
turns = [len(trajectory.turns) for trajectory in trainer.trajectories]
torch.save({"asked": asked, "turns": turns, "in_loop": trainer._in_tool_loop}, sys.argv[1] + f"/rank{rank}.pt")
trainer.accelerator.wait_for_everyone()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_one_turn_against_thirty_does_not_hang(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += [str(script), str(tmp_path), str(root / "tests")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in (0, 1))
    assert (first["turns"], second["turns"]) == ([1, 1], [30, 30])
    assert second["asked"] == [2] * 30
    assert first["asked"] == [2] + [1] * 29  # its own turn, then placeholders
    assert not first["in_loop"]
