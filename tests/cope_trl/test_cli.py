"""The command line as a new user meets it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cope_trl.cli import main

ROOT = Path(__file__).parents[2]
# The quick start, cut down to seconds.
SMALL = {
    "--demonstrations": "40",
    "--warm_start_steps": "3",
    "--hidden_size": "32",
    "--layers": "1",
    "--max_steps": "2",
    "--eval_tasks": "2",
    "--eval_repeats": "2",
    "--per_device_eval_batch_size": "4",
    "--num_generations": "2",
    "--per_device_train_batch_size": "4",
    "--gradient_accumulation_steps": "1",
    "--max_turns": "3",
    "--max_turns_eval": "3",
    "--logging_steps": "1",
}


def quickstart(folder, **changes):
    options = {**SMALL, "--output_dir": str(folder), **{f"--{name}": str(value) for name, value in changes.items()}}
    return ["train", "--config", str(ROOT / "configs/quickstart.yaml"), *[x for pair in options.items() for x in pair]]


@pytest.mark.slow
def test_quickstart_trains_and_leaves_everything_it_names(tmp_path, capsys):
    assert main(quickstart(tmp_path / "run")) == 0
    run = tmp_path / "run"
    out = capsys.readouterr().out
    assert "before → after" in out
    assert "Succ. %" in out
    results = json.loads((run / "results.json").read_text())
    assert results["before"]["episodes"] == results["after"]["episodes"] == 4
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "trainer_state.json"):
        assert (run / name).exists(), name
    from datasets import load_dataset

    episodes = load_dataset("parquet", data_files=str(run / "trajectories/*.parquet"), cache_dir=str(tmp_path / "c"))
    assert len(episodes["train"]) == 2 * 4
    # A second run starts from the agent that was built, and the saved model can be evaluated.
    assert main(quickstart(run, max_steps=1)) == 0
    assert "Starting from the agent" in capsys.readouterr().out
    arguments = [
        "eval",
        "--model",
        str(run),
        "--environment",
        "household",
        "--environment_options",
        '{"size": "tiny"}',
    ]
    limits = [
        "--limit",
        "3",
        "--max_turns_eval",
        "2",
        "--max_tokens_per_turn",
        "8",
        "--output_dir",
        str(tmp_path / "e"),
    ]
    assert main([*arguments, *limits]) == 0
    assert json.loads((tmp_path / "e/results.json").read_text())["results"]["episodes"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--environment", "houshold"], "Did you mean 'household'"),
        (["train", "--split", "tset"], "Did you mean 'test'"),
        (["train", "--forecast_horizon", "-1"], "`forecast_horizon` is -1"),
        (["train", "--environment_options", "{size: tiny}"], "no JSON object"),
        (["train", "--bogus", "1"], "--bogus"),
        (["train"], "`model_name_or_path` is None"),
        (["eval", "--model", "x", "--environment", "houshold"], "Did you mean 'household'"),
    ],
)
def test_a_mistake_is_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.splitlines()[-1].startswith(f"cope-trl {arguments[0]}: ")
    assert "Traceback" not in error


def test_environments_are_listed(capsys):
    assert main(["envs"]) == 0
    out = capsys.readouterr().out
    assert "household" in out
    assert "scienceworld" in out


def test_an_environment_is_checked(capsys):
    assert main(["envs", "check", "household", "--task-id", "tiny-train-00003"]) == 0
    assert "keeps the contract" in capsys.readouterr().out


def test_data_files_are_written_by_the_environment_that_plays_from_them(capsys, tmp_path):
    pytest.importorskip("nltk")
    with pytest.raises(SystemExit) as end:
        main(["envs", "make-data", "webshop", "--help"])
    assert end.value.code == 0
    assert "usage: cope-trl envs make-data webshop" in capsys.readouterr().out
    assert main(["envs", "make-data", "webshop", "--source", str(tmp_path), "--root", str(tmp_path / "out")]) == 2
    assert str(tmp_path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"), [("make-data", "plays from no data files"), ("install", "lives in this interpreter")]
)
def test_an_environment_without_the_command_says_so(command, message, capsys):
    assert main(["envs", command, "household"]) == 2
    assert f"'household', an environment that {message}" in capsys.readouterr().err


def test_version_needs_no_torch():
    code = "import sys; from cope_trl.cli import main\ntry: main(['--version'])\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
