"""Launched runs that the tests of this folder share: each engine starts once, by the configuration that is shipped."""

import functools
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import make_model

ROOT = Path(__file__).parents[3]
WORKER = Path(__file__).with_name("worker.py")
# Engine → its configuration. The launch differs from its header in what a machine of two cores lacks.
CONFIGS = {
    "ddp": "ddp_8gpu.yaml",
    "zero2": "zero2_8gpu.yaml",
    "zero3": "zero3_8gpu.yaml",
    "fsdp2": "fsdp2_8gpu.yaml",
}
ALL = ("shared_prefix", "separate", "sampled", "from_disk", "lora", "rslora", "reference")
CASES = {
    "one": ALL,
    "ddp": ALL,
    "zero2": (*ALL, "resumed"),
    "zero3": (*ALL, "resumed", "sampled_in_shards"),
    "fsdp2": (*ALL, "resumed"),
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(engine: str, folder: Path) -> None:
    """Train every case of an engine in one launch of two processes ("one": in one, without a launcher)."""
    make_model().save_pretrained(folder / "model")
    command = [sys.executable]
    if engine != "one":
        config = ROOT / "configs" / "accelerate" / CONFIGS[engine]
        command += ["-m", "accelerate.commands.launch", "--config_file", str(config), "--num_processes", "2"]
        command += ["--mixed_precision", "no", "--main_process_port", str(free_port())]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if engine == "fsdp2":
        environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
    command += [str(WORKER), str(folder), engine, *CASES[engine]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[done.stderr.find("Traceback") :][:12000]


@pytest.fixture(scope="session")
def outcome(tmp_path_factory):
    """What a case left: `outcome(engine, case)`. The engine is launched when first asked for."""

    @functools.cache
    def folder_of(engine: str) -> Path:
        pytest.importorskip("peft")
        if engine.startswith("zero"):
            pytest.importorskip("deepspeed")
        folder = tmp_path_factory.mktemp(engine)
        launch(engine, folder)
        return folder

    @functools.cache
    def read(engine: str, case: str) -> dict:
        folder = folder_of(engine)
        return torch.load(folder / f"{case}.pt", weights_only=False) | {"folder": folder / case}

    return read


@pytest.fixture(scope="session")
def start():
    """The weights that every run starts from."""
    return {name: parameter.detach() for name, parameter in make_model().named_parameters()}
