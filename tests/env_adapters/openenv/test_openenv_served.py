"""A served environment is the environment: same episodes, same words about itself, however many play it at a time."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cope_trl import load_tasks
from cope_trl.rollout.pool import Call, EnvironmentPool
from env_adapters import (
    EnvAdapterError,
    EpisodeStateError,
    UnknownSplitError,
    UnknownTaskError,
    check_env,
    make,
    resolve,
)
from env_adapters.checker import HOSTILE_REPLIES
from env_adapters.household import HouseholdEnv, expert_actions

pytest.importorskip("openenv")

TASKS = ("train-00000", "train-00003", "tiny-test-00001", "small-train-00004")
REPLIES = st.one_of(
    st.sampled_from(["Action: look", "Action: inventory", "go to fridge 1", "", "<think>", *HOSTILE_REPLIES.values()]),
    st.text(max_size=40),
)


def transcript(env, task_id, replies, **options):
    """Everything the environment returns in one episode; `None` as reply asks the expert."""
    seen = [env.reset(seed=3, options={"task_id": task_id, **options})]
    for reply in replies:
        seen.append(env.step(f"Thought: on. Action: {env.expert_action()}" if reply is None else reply))
        if seen[-1][2]:
            break
    return seen


@pytest.fixture
def odd_here(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from served_worlds import Odd

    return Odd


@pytest.fixture(scope="module")
def odd(launch):
    return launch("odd")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    task_id=st.sampled_from(TASKS),
    replies=st.lists(st.one_of(st.none(), st.none(), REPLIES), max_size=8),
    admissible=st.booleans(),
)
def test_whole_episodes_are_the_same(household, task_id, replies, admissible):
    here, there = HouseholdEnv(), make(household.name)
    replies += [None] * 30  # the expert brings every episode to its end
    try:
        expected = transcript(here, task_id, replies, admissible_actions=admissible)
        assert transcript(there, task_id, replies, admissible_actions=admissible) == expected
        assert expected[-1][1:3] == (1.0, True)
    finally:
        there.close()


def test_what_json_cannot_say_arrives_as_it_is(odd, odd_here, made):
    here, there = odd_here(), made(odd)
    replies = ['<tool_call>{"name": "\ud800"}</tool_call>', "nan \udfff ü", "nan"]
    expected, found = (transcript(env, "first 1 ü", replies) for env in (here, there))
    assert json.dumps(found, default=float) == json.dumps(expected, default=float)  # nan is not equal to itself
    assert found[1][4]["call"] is True
    assert found[-1][1:4] == (1.0, True, False)


def test_the_class_says_what_the_original_says(odd, odd_here, household):
    for name, original in ((odd.name, odd_here), (household.name, HouseholdEnv)):
        cls = resolve(name)
        assert cls.name == name
        for attribute in ("instruction", "acknowledgement", "score_range", "splits", "max_turns", "max_turns_eval"):
            assert getattr(cls, attribute) == getattr(original, attribute)
        assert cls.mean_over_families == original.mean_over_families
        assert type(cls.protocol) is type(original.protocol)
        assert resolve(name) is cls
        cls.check_requirements()
        for split in original.splits:
            ours = [(task.task_id, task.family, task.split) for task in cls.tasks(split)]
            assert ours == [(task.task_id, task.family, task.split) for task in original.tasks(split)]
            assert {task.environment for task in cls.tasks(split)} == {name}
        for task in original.tasks(original.splits[0])[:2]:
            assert cls.standing_messages(task.task_id) == original.standing_messages(task.task_id)
            assert cls.tools(task.task_id) == original.tools(task.task_id)


def test_load_tasks_lists_what_is_there(household, odd):
    served = load_tasks(household.name, split="test", size="tiny", limit=5, shuffle_seed=1)
    local = load_tasks("household", split="test", size="tiny", limit=5, shuffle_seed=1)
    for column in ("prompt", "task_id", "family"):
        assert served[column] == local[column]
    assert set(served["environment"]) == {household.name}
    assert load_tasks(odd.name, split="second", count=3)["task_id"][2] == "second 2 ü"
    assert load_tasks(household.name, ids=["train-00007"])["task_id"] == ["train-00007"]


def test_it_keeps_the_contract(household):
    env = HouseholdEnv()
    env.reset(options={"task_id": "tiny-train-00002"})
    replies = [f"Action: {action}" for action in expert_actions(env)]
    check_env(make(household.name), task_id="tiny-train-00002", replies=replies)


def test_errors_arrive_as_what_they_are(household, moody, odd, made):
    cls = resolve(household.name)
    with pytest.raises(UnknownTaskError, match=rf"'nowhere'.*{household.url}"):
        made(household).reset(options={"task_id": "nowhere"})
    with pytest.raises(UnknownTaskError, match="'nowhere'"):
        cls.check_task_id("nowhere")
    with pytest.raises(UnknownTaskError, match="no text"):
        cls.check_task_id("\ud800")
    cls.check_task_id("train-00001")
    cls.check_task_id("tiny-train-00001")  # not in the list, and yet a task
    with pytest.raises(UnknownSplitError, match="Did you mean 'train'"):
        cls.tasks("trian")
    with pytest.raises(EnvAdapterError, match="TypeError.*flavour"):
        cls.tasks("train", flavour="sweet")
    with pytest.raises(EnvAdapterError, match="raised LookupError: nothing to list"):
        resolve(odd.name).tasks("first", count=-1)
    env = made(moody)
    env.reset()
    with pytest.raises(EnvAdapterError, match=r"raised LookupError: what did you say\? \\ud800"):
        env.step("Action: raise")
    with pytest.raises(EpisodeStateError):  # the state of the world is not known any more
        env.step("Action: wave")
    env.reset()
    assert env.step("Action: wave")[0] == "You wave."
    with pytest.raises(TypeError, match="`reply` must be a str, got int: 7"):
        env.step(7)


def test_many_sessions_at_a_time_do_not_mix(household):
    """Twenty-four episodes in lock step in one server are what they are alone."""
    count, turns = 24, 6
    tasks = [f"train-{n:05d}" for n in range(count)]
    replies = {}
    for number, task_id in enumerate(tasks):
        env = HouseholdEnv()
        env.reset(options={"task_id": task_id})
        replies[task_id] = [f"Action: {action}" for action in expert_actions(env)][number % 3 :]
    pool = EnvironmentPool(make)
    handles = [pool.acquire(household.name) for _ in tasks]
    resets = [
        Call(handle, "reset", kwargs={"options": {"task_id": task_id}})
        for handle, task_id in zip(handles, tasks, strict=True)
    ]
    seen = [[result] for result in pool.run(resets)]
    for turn in range(turns):
        playing = [n for n in range(count) if turn < len(replies[tasks[n]]) and not (turn and seen[n][-1][2])]
        calls = [Call(handles[n], "step", (replies[tasks[n]][turn],)) for n in playing]
        for n, result in zip(playing, pool.run(calls), strict=True):
            seen[n].append(result)
    for handle in handles:
        pool.release(handle)
    pool.close()
    for task_id, found in zip(tasks, seen, strict=True):
        assert found == transcript(HouseholdEnv(), task_id, replies[task_id][:turns])


def test_options_are_the_servers(launch, made):
    server = launch("household", "--options", '{"size": "tiny"}')
    assert made(server).reset(seed=5) == HouseholdEnv(size="tiny").reset(seed=5)


def test_sixty_four_sessions_on_three_hosts(launch):
    servers = [launch("moody", "--max-sessions", "32") for _ in range(3)]
    name = "openenv:" + ",".join(server.url for server in servers)
    pool = EnvironmentPool(make)
    handles = [pool.acquire(name) for _ in range(64)]

    def hosts():
        return Counter(result[0] for result in pool.run([Call(handle, "reset") for handle in handles]))

    first, second, third = (f"Hello from {server.pid}." for server in servers)
    assert hosts() == {first: 22, second: 21, third: 21}
    servers[1].end()
    # Those who were there go on elsewhere at their next reset; nothing is to be done.
    assert hosts() == {first: 32, third: 32}
    pool.close()


def test_any_openenv_client_can_play_a_served_environment(household):
    """What the engine's own client sees, without this package's."""
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=household.url).sync() as client:
        first = client.reset(task_id="tiny-train-00001", episode_id="mine")
        here = HouseholdEnv()
        assert first.observation["text"] == here.reset(options={"task_id": "tiny-train-00001"})[0]
        answer = client.step({"reply": "Action: dance"})
        assert (answer.observation["text"], answer.observation["invalid"]) == ("Nothing happens.", True)
        assert (answer.reward, answer.done) == (0.0, False)
        assert client.state() == {"episode_id": "mine", "step_count": 1}
