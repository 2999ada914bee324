"""QLoRA as the page on engines writes it: the command line is read into a 4-bit configuration and an adapter."""

import importlib.metadata
import re
import shlex
from pathlib import Path

import pytest
import torch
from trl import get_peft_config, get_quantization_config

from cope_trl.scripts.train import parse

ROOT = Path(__file__).parents[3]

pytest.importorskip("peft")


def test_the_command_of_the_page_asks_for_four_bits_and_an_adapter(monkeypatch, tmp_path):
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    section = page[page.index("## QLoRA") :]
    command = re.search(r"```bash\n(accelerate launch .*?)```", section, re.DOTALL)[1].replace("\\\n", " ")
    arguments = shlex.split(command.split("cope_trl.cli train", 1)[1])
    # Transformers asks for the version of bitsandbytes, which this machine has no use for.
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.48.0" if name == "bitsandbytes" else version(name)
    )
    monkeypatch.chdir(ROOT)
    # bfloat16 is refused without a GPU.
    arguments += ["--use_cpu", "true", "--output_dir", str(tmp_path), "--gradient_accumulation_steps", "64"]
    _, _, args, model = parse(arguments)
    quantization, adapter = get_quantization_config(model), get_peft_config(model)
    assert quantization.load_in_4bit
    assert quantization.bnb_4bit_quant_type == "nf4"
    assert quantization.bnb_4bit_compute_dtype == torch.bfloat16
    assert adapter.r == 16
    assert adapter.lora_alpha == 32
    assert adapter.target_modules == "all-linear"
    assert args.forecast_coef == 0.01
    assert args.learning_rate == 1e-5
