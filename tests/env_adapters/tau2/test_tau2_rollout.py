"""τ²-bench through the dataset and the turn loop: what a policy is given, and what its replies become."""

import json

import pytest
from support import make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.data.tasks import load_tasks
from cope_trl.forecast.windows import forecast_windows
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.types import TaskRef
from env_adapters.tau2 import Tau2Env

pytest.importorskip("tau2")

TASKS = ["retail_0", "airline_1", "telecom_[service_issue]airplane_mode_on|lock_sim_card_pin[PERSONA:Easy]"]


@pytest.mark.parametrize("task_id", TASKS, ids=["retail", "airline", "telecom"])
def test_the_expert_through_the_turn_loop(task_id):
    (row,) = load_tasks("tau2", ids=[task_id])
    tokenizer = make_tokenizer("qwen2_5")
    chat, env = ChatFormat(tokenizer), Tau2Env("scripted")
    pool = EnvironmentPool(lambda name: env)

    def expert(prompts, max_new_tokens):
        text = env.expert_action()
        return [Generation([*tokenizer(text, add_special_tokens=False)["input_ids"], chat.end_of_turn_id])]

    limits = EpisodeLimits({"": 50}, max_tokens_per_turn=4096, max_completion_length=500_000)
    player = EpisodePlayer(pool, expert, chat, ())
    (played,) = player.play([TaskRef("tau2", task_id)], [row["prompt"]], limits)
    pool.close()
    assert (played.success, played.score, played.failed, played.truncated) == (True, 1.0, False, False)
    # What was sampled from is the template's own rendering of the domain's policy and tools.
    messages = [*Tau2Env.standing_messages(task_id), {"role": "user", "content": played.first_observation}]
    text = tokenizer.apply_chat_template(
        messages, tools=Tau2Env.tools(task_id), tokenize=False, add_generation_prompt=True
    )
    assert list(played.prompt_ids) == tokenizer(text, add_special_tokens=False)["input_ids"]
    calls = [turn for turn in played.turns if turn.is_call]
    assert all(turn.observation.startswith("<tool_response>\n") for turn in calls)
    windows = forecast_windows(played, 2, skip_no_call=played.skip_no_call)
    assert played.layout == "turns"
    assert [turn.details["tool"] for turn in calls] == [json.loads(turn.action[11:-12])["name"] for turn in calls]
    assert played.turns[-1].details["ended_by"] in ("stop", "transfer")
    assert played.refusal == (task_id != TASKS[0])
    # A window is kept where at least one of its targets is a call.
    kept = {window.turn for window in windows}
    assert kept == {t for t in range(len(played.turns)) if any(turn.is_call for turn in played.turns[t : t + 3])}
