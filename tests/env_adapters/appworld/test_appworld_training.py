"""AppWorld through the trainer: one step of a tiny model on a task that every second rollout solves."""

import math

import pytest
from support import half_expert_trainer, make_config, make_model

from cope_trl import load_tasks

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:AppWorld's split")
def test_the_oracle_is_played_scored_and_forecast(warm, appworld_root, reply, solution, tmp_path, monkeypatch):
    monkeypatch.setenv("APPWORLD_ROOT", str(appworld_root))
    tasks = load_tasks("appworld", split="train", limit=1)
    replies = [reply(code) for code in solution[tasks[0]["task_id"]]]
    config = make_config(
        tmp_path,
        per_device_train_batch_size=2,
        num_generations=2,
        max_turns=len(replies),
        max_tokens_per_turn=2_000,
        max_completion_length=60_000,
    )
    model = make_model(max_position_embeddings=65_536)
    trainer = half_expert_trainer(model, config, tasks, replies, reply("print(1)"))
    trainer.train()
    trainer.close()
    won, lost = trainer.trajectories
    assert (won.success, won.score, won.failed, won.layout) == (True, 1.0, False, "list")
    assert (lost.success, lost.truncated, lost.failed) == (False, True, False)
    assert "1" in lost.turns[0].observation
    logged = trainer.state.log_history[0]
    assert logged["forecast/windows"] == len(replies)
    assert math.isfinite(logged["loss"])
    assert logged["grad_norm"] > 0
