"""Real ScienceWorld through the trainer: two steps of a tiny model, LoRA on."""

import math
import shutil

import pytest
import torch
from support import half_expert_trainer, make_config, make_model

from cope_trl import load_tasks


@pytest.mark.jvm
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_a_gold_path_is_played_scored_and_forecast(tmp_path):
    pytest.importorskip("scienceworld")
    from env_adapters.scienceworld.env import gold_actions

    tasks = load_tasks("scienceworld", families=["find-living-thing"], limit=1)
    gold = gold_actions(tasks[0]["task_id"])
    config = make_config(
        tmp_path,
        per_device_train_batch_size=2,
        num_generations=2,
        max_turns=len(gold),
        max_completion_length=60_000,
        max_tokens_per_turn=300,
        environment_timeout=120.0,
    )
    model = make_model(max_position_embeddings=65_536)
    replies = [f"Action: {action}" for action in gold]
    trainer = half_expert_trainer(model, config, tasks, replies, "Action: wait1")
    trainer.train()
    trainer.close()
    won, lost = trainer.trajectories
    assert (won.success, won.score, won.failed) == (True, 100.0, False)
    assert (lost.success, lost.truncated) == (False, True)
    assert [turn.action for turn in won.turns] == gold
    logged = trainer.state.log_history[0]
    assert logged["forecast/windows"] == len(gold)
    assert math.isfinite(logged["loss"])
    assert all(torch.isfinite(p).all() for p in model.parameters())
