"""The launch configurations that are shipped: accelerate reads them, and the commands in their headers are its own."""

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "configs" / "accelerate"
# Name → engine, processes, machines.
EXPECTED = {
    "single_gpu": (DistributedType.NO, 1, 1),
    "ddp_8gpu": (DistributedType.MULTI_GPU, 8, 1),
    "zero2_8gpu": (DistributedType.DEEPSPEED, 8, 1),
    "zero3_8gpu": (DistributedType.DEEPSPEED, 8, 1),
    "zero3_2nodes": (DistributedType.DEEPSPEED, 16, 2),
    "zero3_vllm_server": (DistributedType.DEEPSPEED, 4, 1),
    "fsdp2_8gpu": (DistributedType.FSDP, 8, 1),
}


def header(name: str) -> str:
    """The comment at the top, as one text."""
    lines = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    return "\n".join(
        line.removeprefix("#").strip() for line in lines[: lines.index("compute_environment: LOCAL_MACHINE")]
    )


def test_every_configuration_is_listed():
    names = {path.stem for path in FOLDER.iterdir()}
    assert names == set(EXPECTED)
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    assert not [name for name in names if f"configs/accelerate/{name}.yaml" not in page]


@pytest.mark.parametrize("name", EXPECTED)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml"))
    engine, processes, machines = EXPECTED[name]
    assert (config.distributed_type, config.num_processes, config.num_machines) == (engine, processes, machines)
    assert config.mixed_precision == "bf16"
    assert config.use_cpu is False


@pytest.mark.parametrize(("name", "stage"), [("zero2_8gpu", 2), ("zero3_8gpu", 3), ("zero3_2nodes", 3)])
def test_the_stage_of_zero(name, stage):
    config = load_config_from_file(str(FOLDER / f"{name}.yaml")).deepspeed_config
    assert config["zero_stage"] == stage
    assert config["zero3_init_flag"] is (stage == 3)  # no rank holds the whole model while it is loaded
    assert config.get("zero3_save_16bit_model", True)  # else a save writes no weights


def test_fsdp_is_the_second_version():
    config = load_config_from_file(str(FOLDER / "fsdp2_8gpu.yaml")).fsdp_config
    assert config["fsdp_version"] == 2
    assert config["fsdp_state_dict_type"] == "FULL_STATE_DICT"


@pytest.mark.parametrize("name", EXPECTED)
def test_the_header_says_how_to_launch_and_on_what(name):
    text = header(name)
    assert "Hardware:" in text
    command = re.search(r"accelerate launch (.*?)\n\n", text.replace("\\\n", " "), re.DOTALL)
    parsed = launch_command_parser().parse_args(shlex.split(command[1]))
    assert parsed.config_file == f"configs/accelerate/{name}.yaml"
    assert parsed.module is True
    assert parsed.training_script == "cope_trl.cli"
    assert parsed.training_script_args[:3] == ["train", "--config", "CONFIG"]
