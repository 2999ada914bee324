"""Where the time of a step goes: parts that add up, a table and a trace at the end, whatever the end is."""

import json

import pytest
import torch
from datasets import Dataset
from driven import CLIMB, DONE, Stairs, driven_trainer
from support import (
    MIXED_SCRIPTS,
    CountEnv,
    count_rows,
    make_config,
    make_model,
    make_talker,
    make_tokenizer,
    scripted_trainer,
)

from cope_trl import CoPETrainer

PARTS = ("prefill", "decode", "generate", "environment", "idle")


def trainer_of(folder, **changes):
    defaults = {"max_tokens_per_turn": 20, "max_turns": 2, "max_steps": 2, "logging_steps": 1, "profile": True}
    return CoPETrainer(
        model=make_talker(),
        args=make_config(folder, **{**defaults, **changes}),
        train_dataset=Dataset.from_list(count_rows(2, 3)),
        processing_class=make_tokenizer(),
        environments={"count": CountEnv},
    )


def logged(trainer):
    return [entry for entry in trainer.state.log_history if "time/rollout" in entry]


def test_the_parts_of_a_rollout_add_up_to_it(tmp_path):
    trainer = trainer_of(tmp_path)
    trainer.train()
    entries = logged(trainer)
    assert len(entries) == 2
    for entry in entries:
        assert sum(entry[f"time/{part}"] for part in PARTS) == pytest.approx(entry["time/rollout"])
        assert entry["time/prefill"] > 0
        assert entry["time/decode"] > 0
        assert entry["time/generate"] == 0
        assert entry["time/optimizer"] > 0
        assert entry["time/reference"] == 0  # beta is 0 and no second pass over the batch is made


def test_the_parts_of_a_step_written_out(tmp_path):
    trainer = trainer_of(tmp_path, forecast_coef=0.0)
    trainer.current_gradient_accumulation_steps = 2
    trainer._note_times({"rollout": 4.0, "prefill": 1.0, "decode": 2.5, "reference": 3.0}, 10.0)
    trainer._note_times({}, 1.0)  # the second micro-batch of the step, without a rollout
    times = {name: value for name, value in trainer._means["train"].flush().items() if name.startswith("time/")}
    expected = {"rollout": 4.0, "prefill": 1.0, "decode": 2.5, "generate": 0.0, "environment": 0.0, "idle": 0.5}
    expected |= {"reference": 3.0, "policy": 4.0, "forecast": 0.0}
    assert times == pytest.approx({f"time/{name}": value for name, value in expected.items()})


def test_lock_step_cannot_tell_prefilling_from_decoding(tmp_path):
    trainer = trainer_of(tmp_path, rollout_schedule="lock_step")
    trainer.train()
    for entry in logged(trainer):
        assert entry["time/generate"] > 0
        assert entry["time/prefill"] == entry["time/decode"] == 0


def test_the_reference_model_is_timed_apart(tmp_path):
    folder = tmp_path / "model"
    make_model().save_pretrained(folder)
    trainer = CoPETrainer(
        model=str(folder),
        args=make_config(tmp_path, beta=0.1, max_tokens_per_turn=6, max_turns=2, max_steps=1, logging_steps=1),
        train_dataset=Dataset.from_list(count_rows(2, 3)),
        processing_class=make_tokenizer(),
        environments={"count": CountEnv},
    )
    trainer.train()
    (entry,) = logged(trainer)
    assert 0 < entry["time/reference"] < entry["time/policy"] + entry["time/forecast"] + entry["time/rollout"]


def test_a_rollout_of_trls_has_no_parts(tmp_path):
    trainer = driven_trainer(tmp_path, [[CLIMB, DONE]], max_steps=1, logging_steps=1, environment_factory=Stairs)
    trainer.train()
    (entry,) = logged(trainer)
    assert entry["time/rollout"] > 0
    assert not any(f"time/{part}" in entry for part in PARTS)


def test_an_evaluation_between_steps_is_no_part_of_them(tmp_path):
    trainer = scripted_trainer(
        make_model(), make_config(tmp_path, max_steps=2, logging_steps=1), (2, 3), MIXED_SCRIPTS
    )
    trainer.spans.add("rollout", 0.0, 1000.0)
    trainer.train()
    assert logged(trainer)[0]["time/rollout"] < 1000


def test_profile_prints_a_table_and_writes_a_trace(tmp_path, capsys):
    trainer = trainer_of(tmp_path)
    trainer.train()
    said = capsys.readouterr().out
    assert "Where a step's time goes (mean of 2 steps" in said
    shown = [line.split()[0] for line in said[said.index("Where") :].splitlines() if line.strip()]
    named = ("rollout", "prefill", "decode", "update", "policy", "optimizer", "other")
    assert [name for name in shown if name in named] == list(named)
    path = tmp_path / "profile" / "trace-rank0.json"
    assert str(path) in said.replace("\n", "")
    events = [row for row in json.loads(path.read_text())["traceEvents"] if row["ph"] == "X"]
    names = {row["name"] for row in events}
    assert names >= {"rollout", "prefill", "decode", "micro-batch", "optimizer", "reset", "step"}
    rollouts = [row for row in events if row["name"] == "rollout"]
    inside = [row for row in events if row["name"] in ("prefill", "decode")]
    assert all(
        any(r["ts"] <= row["ts"] and row["ts"] + row["dur"] <= r["ts"] + r["dur"] + 1 for r in rollouts)
        for row in inside
    )


def test_without_it_nothing_is_printed_or_written(tmp_path, capsys):
    trainer = trainer_of(tmp_path, profile=False, max_steps=1)
    trainer.train()
    assert "Where a step" not in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()


def test_a_run_that_breaks_still_tells_what_it_timed(tmp_path, capsys):
    trainer = trainer_of(tmp_path, max_steps=3)
    compute, calls = trainer._compute_loss, []

    def breaks(*args):
        calls.append(1)
        if trainer.state.global_step == 1:
            raise torch.OutOfMemoryError("full")
        return compute(*args)

    trainer._compute_loss = breaks
    with pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    assert "(mean of 1 steps" in capsys.readouterr().out
    assert (tmp_path / "profile" / "trace-rank0.json").exists()
