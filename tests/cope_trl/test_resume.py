"""A run that was killed and resumed is the run that never was: weights, episodes and logs, wherever it stood."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from support import GO, CountEnv, count_rows, make_config, make_model, make_tokenizer

from cope_trl.checkpoints import is_whole, last_whole
from cope_trl.cope_trainer import CoPETrainer
from cope_trl.data.trajectories import TrajectoryWriter, read_trajectories
from cope_trl.local_agent.warm_start import WarmStartArguments
from cope_trl.rollout.generation import Generation
from cope_trl.scripts import train

ROOT = Path(__file__).parents[2]

# One batch of rollouts is used in 4 optimizer steps (2 iterations × 4 micro-batches, 2 a step) and is one epoch.
STEPS = 10
EVERY = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "steps_per_generation": 4,
    "num_iterations": 2,
    "num_generations": 4,
    "max_steps": STEPS,
    "save_strategy": "steps",
    "save_steps": 1,
    "logging_steps": 4,
    "shuffle_dataset": True,
    "max_turns": 3,
    "max_tokens_per_turn": 6,
    "forecast_coef": 0.5,
    "forecast_max_windows": 2,
    "forecast_grad_norm_steps": 2,
}


class Sampling(CoPETrainer):
    """Samples from the model; by the flip of a coin a turn says the right thing instead, so that some succeed."""

    def _sample_turn(self, prompts, max_new_tokens):
        sampled = super()._sample_turn(prompts, max_new_tokens)
        tokenizer = self.processing_class
        right = [*tokenizer(GO.split(". ")[1], add_special_tokens=False)["input_ids"], self.chat.end_of_turn_id]
        return [Generation(right[:max_new_tokens]) if torch.rand(()) < 0.7 else turn for turn in sampled]


def make_trainer(folder, **changes):
    settings = {**EVERY, **changes}
    return Sampling(
        model=make_model(),
        args=make_config(folder, **settings),
        train_dataset=Dataset.from_list(count_rows(1, 2, 1, 2)),
        processing_class=make_tokenizer(),
        environments={"count": CountEnv},
    )


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def logs(trainer):
    """What was logged, without anything that a clock says or that the Trainer itself forgets between two logs."""
    return [
        {key: value for key, value in entry.items() if "time" not in key and "second" not in key and key != "loss"}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]


def episodes(folder):
    return [(e.task.task_id, e.completion_ids, e.success) for e in read_trajectories(folder / "trajectories")]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    torch.set_num_threads(1)
    trainer = make_trainer(folder)
    trainer.train()
    trainer.close()
    assert 0 < sum(episode[2] for episode in episodes(folder)) < len(episodes(folder))
    return folder, weights(trainer), logs(trainer)


@pytest.mark.parametrize("step", [1, 3, 4, 6, 9])
def test_resume_in_the_middle_equals_the_unbroken_run(step, unbroken, tmp_path):
    folder, expected, logged = unbroken
    trainer = make_trainer(tmp_path)
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    trainer.close()
    for name, value in weights(trainer).items():
        assert torch.equal(value, expected[name]), name
    assert logs(trainer) == logged


def test_resume_plays_again_what_came_after_the_checkpoint_and_keeps_no_episode_twice(unbroken, tmp_path):
    folder, _, _ = unbroken
    expected = episodes(folder)
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    marked = TrajectoryWriter(copy / "trajectories")
    marked.write(read_trajectories(folder / "trajectories")[:1], step=4, rank=1)  # of a second process, gone since
    marked.write(read_trajectories(folder / "trajectories")[:1], step=40)
    TrajectoryWriter(copy / "trajectories/eval").write(read_trajectories(folder / "trajectories")[:1], step=4)
    trainer = make_trainer(copy)
    trainer.train(resume_from_checkpoint=str(copy / "checkpoint-4"))
    trainer.close()
    assert episodes(copy) == expected
    superseded = [path.name for path in sorted((copy / "_superseded_trajectories").rglob("*.parquet"))]
    steps = [(4, 0), (4, 1), (8, 0), (40, 0)]
    assert superseded == [f"step-{step:08d}-rank-{rank:05d}.parquet" for step, rank in steps]
    assert len(read_trajectories(copy / "trajectories/eval")) == 1  # evaluated before the checkpoint was written


def test_a_folder_used_again_without_a_resume_keeps_the_earlier_episodes_apart(unbroken, tmp_path, caplog):
    folder, _, _ = unbroken
    shutil.copytree(folder / "trajectories", tmp_path / "trajectories")
    trainer = make_trainer(tmp_path, max_steps=1, save_strategy="no")
    trainer.train()
    trainer.close()
    assert "an earlier run left episodes; 3 files of them were moved" in caplog.text
    assert len(episodes(tmp_path)) == 16
    assert len(list((tmp_path / "_superseded_trajectories").glob("*.parquet"))) == 3


def test_training_twice_with_one_trainer_begins_with_a_rollout_of_its_own(unbroken, tmp_path):
    folder, expected, _ = unbroken
    trainer = make_trainer(tmp_path, max_steps=3)
    trainer.train()
    assert trainer._buffered_inputs is not None  # half used
    trainer.train()
    assert len(episodes(tmp_path)) == 16
    trainer.args.max_steps = STEPS
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-6"))
    trainer.close()
    for name, value in weights(trainer).items():
        assert torch.equal(value, expected[name]), name


def test_other_settings_are_listed_and_the_old_rollouts_dropped(unbroken, tmp_path, caplog):
    folder, _, _ = unbroken
    trainer = make_trainer(tmp_path, forecast_coef=0.25, forecast_horizon=1, max_steps=4, learning_rate=1e-3)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3"))
    trainer.close()
    (text,) = [record.getMessage() for record in caplog.records if "other settings" in record.getMessage()]
    assert "`forecast_coef` was 0.5 and is now 0.25" in text
    assert "`forecast_horizon` was 2 and is now 1" in text
    assert text.count("\n- ") == 2  # another learning rate is the user's own business
    assert trainer._step == 8  # as if nothing had been lost, so that the next batch comes when its prompts do
    assert len(episodes(tmp_path)) == 16  # rolled out anew, for the fourth step alone


def test_true_passes_over_a_checkpoint_that_was_not_written_to_its_end(unbroken, tmp_path, caplog):
    folder, expected, _ = unbroken
    shutil.copytree(folder, tmp_path / "run")
    state = tmp_path / "run/checkpoint-10/trainer_state.json"
    state.write_text(state.read_text()[:-40])
    (tmp_path / "run/checkpoint-9/trainer_state.json").unlink()
    trainer = make_trainer(tmp_path / "run")
    trainer.train(resume_from_checkpoint=True)
    trainer.close()
    assert caplog.text.count("was not written to its end") == 2
    assert trainer._initial_global_step == 8
    assert all(torch.equal(value, expected[name]) for name, value in weights(trainer).items())
    assert is_whole(tmp_path / "run/checkpoint-10")


def test_a_checkpoint_written_over_is_not_whole_in_between(unbroken, tmp_path, monkeypatch):
    folder, _, _ = unbroken
    shutil.copytree(folder / "checkpoint-1", tmp_path / "checkpoint-1")
    seen = []

    def look(self, output_dir):
        seen.append(is_whole(output_dir))
        original(self, output_dir)

    original = CoPETrainer._save_rng_state
    monkeypatch.setattr(CoPETrainer, "_save_rng_state", look)
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.close()
    assert seen == [False]
    assert is_whole(tmp_path / "checkpoint-1")


TWO_PROCESSES = """
import sys
sys.path[1:1] = [sys.argv[1] + "/tests", sys.argv[1] + "/tests/cope_trl"]
import torch
torch.set_num_threads(1)
from pathlib import Path
from test_resume import episodes, make_trainer, weights

def run(folder, checkpoint=None):
    trainer = make_trainer(folder, per_device_train_batch_size=2, max_steps=6)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.close()
    trainer.accelerator.wait_for_everyone()
    return weights(trainer), episodes(folder)

expected, played = run(Path("whole"))
for step in (3, 5):
    found, again = run(Path("whole"), f"whole/checkpoint-{step}")
    assert all(torch.equal(value, expected[name]) for name, value in found.items()), step
    assert again == played, step
assert len(list(Path("whole/trajectories").glob("*rank-00001.parquet"))) == 2
print("equal", flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_every_process_resumes_its_own_part(tmp_path):
    (tmp_path / "worker.py").write_text(TWO_PROCESSES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    done = subprocess.run(
        [*launch, "worker.py", str(ROOT)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("equal") == 2


@pytest.mark.parametrize("files", [["config.json"], ["config.json", "training_args.bin"]])
def test_an_agent_that_was_not_saved_to_its_end_is_built_again(files, tmp_path, monkeypatch):
    (tmp_path / "warm_start").mkdir()
    for name in files:
        (tmp_path / "warm_start" / name).touch()
    built = []
    monkeypatch.setattr(train, "warm_start", lambda _, folder, **__: built.append(folder) or folder)
    arguments = WarmStartArguments(warm_start=True)
    found = train._local_agent("household", [], arguments, make_config(tmp_path), Console(quiet=True))
    assert found == str(tmp_path / "warm_start")
    assert bool(built) == ("training_args.bin" not in files)


# ---------------------------------------------------------------- killed for real

# Imports once, then forks a process a stage; each leaves a copy of its folder, its output and its exit code.
DRIVER = """
import json, os, shutil, signal, sys
import torch
torch.set_num_threads(1)
from cope_trl.cli import main
from cope_trl.cope_trainer import CoPETrainer
from cope_trl.rollout.episode import Episode
from cope_trl.scripts import train
from transformers import TrainerState
import pyarrow.parquet as pq


def die():
    os.kill(os.getpid(), signal.SIGKILL)

def before(holder, name, act):
    original = getattr(holder, name)
    def patched(*args, **kwargs):
        act(*args)
        return original(*args, **kwargs)
    setattr(holder, name, patched)

def arrange(kind, step):
    now, turns = [-1], []
    before(train, "_evaluate", lambda trainer, tasks, label: print("EVALUATED", label, flush=True))
    before(CoPETrainer, "_rollout", lambda self, *_: now.__setitem__(0, self.state.global_step))
    if kind == "rollout":  # with a turn sampled that has not reached its environment
        before(Episode, "record", lambda *_: turns.append(now[0]) or turns.count(step) == 2 and die())
    elif kind == "update":  # with the gradients there and the weights as they were
        before(CoPETrainer, "_clip_grad_norm", lambda self, _: self.state.global_step == step and die())
    elif kind == "checkpoint":  # with half of the last file on disk
        def half(self, path):
            if self.global_step == step:
                with open(path, "w") as file:
                    file.write('{"global_step": ')
                die()
        before(TrainerState, "save_to_json", half)
    elif kind == "shard":  # with half of the episodes on disk
        def half(table, file, **_):
            if now[0] == step:
                file.write(b"PAR1 half of it")
                file.flush()
                die()
        before(pq, "write_table", half)

def child(kind, step, log, arguments):
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    arrange(kind, step)
    code = main(["train", *arguments])
    sys.stdout.flush()
    os._exit(code)

for kind, step, folder, log, copy, arguments in json.loads(sys.argv[1]):
    pid = os.fork()
    if not pid:
        try:
            child(kind, step, log, arguments)
        finally:
            os._exit(70)
    print(kind, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    shutil.copytree(folder, copy)
"""
RUN = {
    "environment_options": '{"size": "tiny"}',
    "num_tasks": 4,
    "demonstrations": 40,
    "warm_start_steps": 3,
    "hidden_size": 32,
    "layers": 1,
    "max_steps": 8,
    "eval_tasks": 2,
    "eval_repeats": 1,
    "per_device_eval_batch_size": 2,
    "num_generations": 2,
    "num_iterations": 2,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "max_turns": 3,
    "max_turns_eval": 2,
    "save_strategy": "steps",
    "save_steps": 3,
    "logging_steps": 1,
    "disable_tqdm": True,
}


def play(stages, tmp_path):
    """Run `cope-trl train` once a stage, one after another; the exit code, the output and the folder each left.

    Args:
        stages: (kind, optimizer step, folder): when each is killed, and in which run.
    """
    rows = []
    for position, (kind, step, folder) in enumerate(stages):
        options = {**RUN, "output_dir": folder, "resume_from_checkpoint": True}
        pairs = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        arguments = ["--config", str(ROOT / "configs/quickstart.yaml"), *pairs]
        rows.append([kind, step, str(folder), f"{tmp_path}/{position}.log", f"{tmp_path}/{position}", arguments])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, json.dumps(rows)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    codes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    outputs = [Path(row[3]).read_text().replace("\n", "") for row in rows]  # long paths are broken over lines
    return list(zip(codes, outputs, [Path(row[4]) for row in rows], strict=True))


def results_of(folder):
    state = json.loads((folder / "trainer_state.json").read_text())
    logged = [entry for entry in state["log_history"] if "train_runtime" not in entry]
    untimed = [{k: v for k, v in entry.items() if "time" not in k and "seconds" not in k} for entry in logged]
    return {
        "weights": (folder / "model.safetensors").read_bytes(),
        "episodes": [e.completion_ids for e in read_trajectories(folder / "trajectories")],
        "results": (folder / "results.json").read_text(),
        "log": untimed,
    }


@pytest.mark.slow
def test_nothing_is_lost_on_a_crash(tmp_path):
    """Killed (SIGKILL) in a rollout, in an update, while a checkpoint and while episodes are written."""
    killed = tmp_path / "killed"
    stages = [("never", 0, tmp_path / "whole")]
    kills = {"rollout": 4, "update": 5, "checkpoint": 6, "shard": 6}
    stages += [(kind, step, killed) for kind, step in kills.items()] + [("never", 0, killed)]
    whole, *crashes, last = play(stages, tmp_path)
    assert whole[0] == 0, whole[1]
    assert "No checkpoint yet" in whole[1]
    # Rollouts are at steps 0, 2, 4 and 6; the checkpoint after 3 steps holds half a batch, the one after 6 none.
    shards = {"rollout": 2, "update": 3, "checkpoint": 3, "shard": 3}
    started_from = {"rollout": "No checkpoint yet", "update": "-3.", "checkpoint": "-3.", "shard": "-3."}
    for kind, (code, output, folder) in zip(kills, crashes, strict=True):
        assert code == -signal.SIGKILL, output
        assert ("EVALUATED before" in output) == (kind == "rollout")  # measured once
        assert started_from[kind] in output
        rows = datasets.load_dataset(
            "parquet", data_files=f"{folder}/trajectories/*.parquet", split="train", cache_dir=f"{folder}-cache"
        )
        assert len(rows) == 4 * shards[kind]
        assert last_whole(folder).name == ("checkpoint-6" if kind == "shard" else "checkpoint-3")
    assert last[0] == 0, last[1]
    assert "checkpoint-6." in last[1]
    expected = results_of(tmp_path / "whole")
    for name, value in results_of(killed).items():
        assert value == expected[name], name
    assert not list((killed / "trajectories").glob(".*"))
