"""One training step on a real environment's task that half of the rollouts solve, and what must hold after it."""

import math

import torch
from support import half_expert_trainer, make_config, make_model

from cope_trl.forecast.windows import forecast_windows


def train_half_expert(tmp_path, tasks, replies, idle, score=1.0):
    """Train one step; the winning and the losing trajectory, and what was logged."""
    config = make_config(
        tmp_path,
        per_device_train_batch_size=2,
        num_generations=2,
        max_turns=len(replies),
        max_completion_length=60_000,
        max_tokens_per_turn=2_000,
    )
    model = make_model(max_position_embeddings=65_536)
    trainer = half_expert_trainer(model, config, tasks, replies, idle)
    trainer.train()
    trainer.close()
    assert all(torch.isfinite(p).all() for p in model.parameters())
    won, lost = trainer.trajectories
    assert (won.success, won.score, won.failed) == (True, score, False)
    assert (lost.success, lost.truncated) == (False, True)
    logged = trainer.state.log_history[0]
    assert len(won.turns) == len(replies)
    assert logged["forecast/windows"] == len(forecast_windows(won, 2, skip_no_call=won.skip_no_call)) > 0
    assert math.isfinite(logged["loss"])
    assert logged["grad_norm"] > 0
    return won, lost, logged
