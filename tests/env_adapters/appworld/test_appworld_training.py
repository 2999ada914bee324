"""AppWorld through the trainer: one step of a tiny model on a task that every second rollout solves."""

import pytest
from half_expert import train_half_expert

from cope_trl import load_tasks

pytestmark = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:AppWorld's split")
def test_the_oracle_is_played_scored_and_forecast(warm, appworld_root, reply, solution, tmp_path, monkeypatch):
    monkeypatch.setenv("APPWORLD_ROOT", str(appworld_root))
    tasks = load_tasks("appworld", split="train", limit=1)
    replies = [reply(code) for code in solution[tasks[0]["task_id"]]]
    won, lost, logged = train_half_expert(tmp_path, tasks, replies, reply("print(1)"))
    assert won.layout == "list"
    assert not lost.failed
    assert "1" in lost.turns[0].observation
    assert logged["forecast/windows"] == len(replies)
