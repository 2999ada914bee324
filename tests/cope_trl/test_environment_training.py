"""Real environments through the trainer: one step of a tiny model on a task that half of the rollouts solve."""

import shutil
import socket

import pytest
from half_expert import train_half_expert
from support import half_expert_trainer, make_config, make_model

from cope_trl import load_tasks
from cope_trl.errors import RolloutError
from env_adapters import registry


def expert_replies(name, task_id, reply="Thought: on.\nAction: {}"):
    """What the environment's own expert does, one reply a turn."""
    env = registry.make(name)
    env.reset(options={"task_id": task_id})
    replies, done = [], False
    while not done:
        replies.append(reply.format(env.expert_action()))
        done = env.step(replies[-1])[2]
    env.close()
    return replies


def test_household(tmp_path):
    tasks = load_tasks("household", split="test", limit=1)
    replies = expert_replies("household", tasks[0]["task_id"])
    _, _, logged = train_half_expert(tmp_path, tasks, replies, "Action: dance")
    assert logged["episode/invalid_action_rate"] == pytest.approx(1 / 2)


def test_webshop(tmp_path):
    pytest.importorskip("nltk")
    pytest.importorskip("rapidfuzz")
    tasks = load_tasks("webshop", split="train", data="synthetic", limit=1)
    replies = expert_replies("webshop", tasks[0]["task_id"])
    won, lost, logged = train_half_expert(tmp_path, tasks, replies, "Action: click[nothing]")
    assert won.turns[-1].action == "click[buy now]"
    assert all(turn.invalid for turn in lost.turns)
    assert logged["episode/invalid_action_rate"] == pytest.approx(1 / 2)


@pytest.mark.jvm
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_scienceworld(tmp_path):
    pytest.importorskip("scienceworld")
    from env_adapters.scienceworld.env import gold_actions

    tasks = load_tasks("scienceworld", families=["find-living-thing"], limit=1)
    gold = gold_actions(tasks[0]["task_id"])
    replies = [f"Action: {action}" for action in gold]
    won, _, _ = train_half_expert(tmp_path, tasks, replies, "Action: wait1", score=100.0)
    assert [turn.action for turn in won.turns] == gold


@pytest.mark.slow
def test_alfworld(tmp_path, monkeypatch):
    pytest.importorskip("alfworld")
    from env_adapters.alfworld.make_data import main as make_data

    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "games"))
    make_data(["--root", str(tmp_path / "games"), "--per-family", "1", "--seed", "3"])
    tasks = load_tasks("alfworld", split="train", limit=1)
    replies = expert_replies("alfworld", tasks[0]["task_id"])
    won, lost, logged = train_half_expert(tmp_path / "out", tasks, replies, "Action: dance")
    assert "AVAILABLE ACTIONS" in won.first_observation
    assert all(turn.invalid for turn in lost.turns)
    assert logged["episode/invalid_action_rate"] == pytest.approx(1 / 2)


@pytest.mark.slow
def test_tau2(tmp_path, monkeypatch):
    pytest.importorskip("tau2")
    monkeypatch.setenv("TAU2_CUSTOMER", "scripted")
    tasks = load_tasks("tau2", ids=["retail_0"])
    replies = expert_replies("tau2", "retail_0", reply="{}")
    won, lost, logged = train_half_expert(tmp_path, tasks, replies, "<tool_call>\n{oops\n</tool_call>")
    assert won.turns[-1].details["reward_breakdown"]
    assert not won.refusal
    assert all(turn.details["malformed"] for turn in lost.turns)
    assert logged["episode/malformed_call_rate"] == pytest.approx(
        1 / (1 + sum(t.is_call for t in won.turns) / len(lost.turns))
    )
    assert logged["forecast/refusal_groups"] == 0.0
    assert 0 < logged["forecast/tool_call_rate"] <= 1


def test_a_customer_that_cannot_be_reached_stops_the_run_with_its_address(tmp_path):
    """One episode with a dead endpoint is a failed rollout; when all are, the first cause is shown."""
    pytest.importorskip("tau2")
    from env_adapters.tau2 import Tau2Env

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"

    def customer():
        return Tau2Env("openai/nobody", api_base=address, api_key="none", timeout=5.0, attempts=1)

    tasks = load_tasks("tau2", ids=["retail_0"])
    config = make_config(tmp_path, per_device_train_batch_size=2, num_generations=2, max_completion_length=60_000)
    model = make_model(max_position_embeddings=65_536)
    trainer = half_expert_trainer(model, config, tasks, ["Hello."], "Hello.", environments={"tau2": customer})
    with pytest.raises(RolloutError, match="All 2 rollouts of step 0 failed") as caught:
        trainer.train()
    trainer.close()
    assert address in str(caught.value)
