"""The trainer on an environment that is played elsewhere."""

import pytest
from half_expert import train_half_expert

from cope_trl import load_tasks, summarize
from env_adapters.household import HouseholdEnv, expert_actions

pytest.importorskip("openenv")


def test_a_training_step_on_a_served_household(household, tmp_path):
    """The same episodes, and the same numbers logged, as on the household of this process."""
    runs = []
    for name in (household.name, "household"):
        tasks = load_tasks(name, split="test", limit=1)
        env = HouseholdEnv()
        env.reset(options={"task_id": tasks[0]["task_id"]})
        replies = [f"Thought: on.\nAction: {action}" for action in expert_actions(env)]
        won, lost, logged = train_half_expert(tmp_path / str(len(runs)), tasks, replies, "Action: dance")
        assert won.task.environment == lost.task.environment == name
        runs.append((won.turns, lost.turns, won.completion_ids, won.layout, logged["loss"], logged["grad_norm"]))
        assert summarize([won, lost])["success"] == 0.5
    assert runs[0] == runs[1]


def test_episodes_of_a_server_that_dies_are_failed_ones(launch, tmp_path):
    """A server that ends during a run stops it with its address, for then every rollout of the step has failed."""
    from support import half_expert_trainer, make_config, make_model

    from cope_trl.errors import RolloutError

    server = launch("household", "--max-sessions", "4")
    tasks = load_tasks(server.name, split="train", size="tiny", limit=1)
    config = make_config(tmp_path, per_device_train_batch_size=2, num_generations=2, max_completion_length=8_000)
    model = make_model(max_position_embeddings=16_384)
    trainer = half_expert_trainer(model, config, tasks, ["Action: look"], "Action: look")
    server.end()
    with pytest.raises(RolloutError, match="All 2 rollouts of step 0 failed") as caught:
        trainer.train()
    trainer.close()
    assert server.url in str(caught.value)
    assert "Is it running?" in str(caught.value)
