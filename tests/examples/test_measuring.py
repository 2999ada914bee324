"""Fits, tables and files of the benchmarks, by hand; steps of a real training."""

import json
import math

import common
import measuring
import pytest
import torch
from transformers import Qwen2ForCausalLM


def test_the_exponent_of_a_power_law_is_found():
    x = [1.0, 2.0, 4.0, 8.0]
    assert measuring.exponent(x, [3 * value**1.5 for value in x]) == pytest.approx(1.5)


def test_the_exponent_is_the_least_squares_slope():
    x, y = [1.0, 2.0, 4.0], [1.0, 4.0, 4.0]
    # In units of log 2: x = 0, 1, 2 and y = 0, 2, 2; slope = Σ(x−1)(y−4/3) / Σ(x−1)² = 2/2.
    assert measuring.exponent(x, y) == pytest.approx(1.0)


@pytest.mark.filterwarnings("error")  # no logarithm of 0 is taken
def test_what_did_not_grow_from_something_has_no_exponent():
    assert math.isnan(measuring.exponent([1.0, 2.0], [0.0, 1.0]))


def test_a_table():
    rows = [["a", 1234.56, 2], ["b", 0.123456, True]]
    assert measuring.markdown_table(["name", "x", "y"], rows) == (
        "| name | x | y |\n| --- | --- | --- |\n| a | 1,235 | 2 |\n| b | 0.123 | True |"
    )


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "file.json"
    measuring.save_json(path, {"first": 1})
    endless: list = []
    endless.append(endless)
    with pytest.raises(ValueError, match="Circular"):
        measuring.save_json(path, endless)
    assert json.loads(path.read_text()) == {"first": 1}
    measuring.save_json(path, {"path": path})
    assert json.loads(path.read_text()) == {"path": str(path)}
    assert [file.name for file in path.parent.iterdir()] == ["file.json"]


def train(folder, steps, **arguments):
    shape = common.EpisodeShape(turns=2, observation=4, thought=2, action=2, instruction=4)
    torch.manual_seed(0)
    model, script = Qwen2ForCausalLM(common.qwen2_config(64, 1)), common.half_winning_script(shape, 1)
    changes = {"max_steps": steps, "use_cpu": True, "bf16": False}
    trainer = common.build_trainer(model, shape, str(folder), 2, script, **changes)
    measured = measuring.timed_training(trainer, **arguments)
    trainer.close()
    return trainer, measured


def test_every_step_is_timed_and_reported_at_once(tmp_path):
    seen = []
    trainer, steps = train(tmp_path, 2, on_step=lambda step: seen.append(step["step"]))
    assert seen == [1, 2]
    assert len(steps) == 2
    for step, logged in zip(steps, trainer.state.log_history, strict=False):
        assert logged.items() <= step.items()
        assert step["step/seconds"] >= step["time/rollout"] + step["time/policy"] + step["time/forecast"] > 0
        assert step["step/cpu_seconds"] > 0
        assert step["tokens/forecast"] > 0


def test_no_step_is_begun_when_the_time_is_over(tmp_path):
    _, steps = train(tmp_path, 5, seconds=0.0)
    assert len(steps) == 1
