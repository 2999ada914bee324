"""`isolate`: a registered environment played in another process gives the same episodes, and survives its process."""

import sys
import threading
import time
from pathlib import Path

import pytest

from env_adapters import (
    EnvAdapterError,
    EpisodeStateError,
    UnknownEnvironmentError,
    UnknownSplitError,
    UnknownTaskError,
)
from env_adapters.checker import HOSTILE_REPLIES, check_env
from env_adapters.household import HouseholdEnv, expert_actions
from env_adapters.isolated import Limits, RemoteError, WorkerEndedError, WorkerTimeoutError, isolate

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def household():
    return isolate("household", limits=Limits(memory_mb=1024))


@pytest.fixture
def made():
    """Makes environments that are closed after the test."""
    environments = []

    def make(cls, **options):
        environments.append(cls(**options))
        return environments[-1]

    yield make
    for environment in environments:
        environment.close()


@pytest.fixture(scope="module")
def moody():
    return isolate("worlds:Moody", path=[HERE], deadline=1.0)


def transcript(env, task_id, actions):
    seen = [env.reset(seed=3, options={"task_id": task_id, "admissible_actions": True})]
    for action in actions:
        seen.append(env.step(f"Thought: Go on. Action: {action}"))
    return seen


def test_the_same_episodes_as_in_this_process(household, made):
    here, there = HouseholdEnv(), made(household)
    for task_id in ("train-00000", "train-00003", "tiny-test-00001", "small-train-00004"):
        here.reset(options={"task_id": task_id})
        actions = ["dance", "", *expert_actions(here)]
        assert transcript(there, task_id, actions) == transcript(here, task_id, actions)
    assert there.worker_pid is not None


def test_hostile_replies_and_the_expert_cross_the_pipe(household, made):
    here, there = HouseholdEnv(), made(household)
    for env in (here, there):
        env.reset(options={"task_id": "tiny-train-00001"})
    for reply in HOSTILE_REPLIES.values():
        assert there.step(reply) == here.step(reply)
    assert there.expert_action() == here.expert_action()
    assert there.admissible_actions() == here.admissible_actions()


def test_the_class_says_what_the_original_says(household):
    for attribute in (
        "name",
        "instruction",
        "acknowledgement",
        "score_range",
        "splits",
        "max_turns",
        "max_turns_eval",
    ):
        assert getattr(household, attribute) == getattr(HouseholdEnv, attribute)
    assert type(household.protocol) is type(HouseholdEnv.protocol)
    assert household.tasks("test") == HouseholdEnv.tasks("test")
    assert household.tasks("test", size="tiny") == HouseholdEnv.tasks("test", size="tiny")
    assert household.standing_messages() == HouseholdEnv.standing_messages()
    household.check_requirements()


def test_it_keeps_the_contract(household):
    env = HouseholdEnv()
    env.reset(options={"task_id": "tiny-train-00002"})
    replies = [f"Action: {action}" for action in expert_actions(env)]
    check_env(household(), task_id="tiny-train-00002", replies=replies)


def test_options_reach_the_constructor(household, made):
    there, here = made(household, size="tiny"), HouseholdEnv(size="tiny")
    assert there.reset(seed=5) == here.reset(seed=5)


def test_errors_arrive_as_what_they_are(household, moody, made):
    with pytest.raises(UnknownTaskError, match="'nowhere'"):
        made(household).reset(options={"task_id": "nowhere"})
    with pytest.raises(UnknownTaskError):
        household.check_task_id("nowhere")
    with pytest.raises(UnknownSplitError):
        household.tasks("nowhere")
    with pytest.raises(UnknownEnvironmentError, match="Did you mean 'household'"):
        isolate("houshold")
    with pytest.raises(EnvAdapterError, match="protocol 'own' is none of"):
        isolate("worlds:Foreign", path=[HERE])
    with pytest.raises(EnvAdapterError, match="which is no TextEnv"):
        isolate("gymnasium:Wrapper")
    for wrong in ({"deadline": 0}, {"recycle_after": 0}):
        with pytest.raises(EnvAdapterError, match=f"`{next(iter(wrong))}` is 0"):
            isolate("household", **wrong)
    env = made(moody)
    env.reset()
    with pytest.raises(RemoteError, match="LookupError: what did you say"):
        env.step("Action: raise")
    with pytest.raises(EpisodeStateError):  # the state of the world is not known any more
        env.step("Action: wave")


def test_a_new_process_takes_over_after_the_old_one_ended(moody, made, assert_ends):
    env = made(moody, mood="bold")
    assert env.reset()[0].startswith("bold, 1 so far")
    pid = env.worker_pid
    assert env.step("Action: wave")[0] == "You wave."
    with pytest.raises(WorkerEndedError, match="exit code 4"):
        env.step("Action: die")
    assert env.reset()[0].startswith("bold, 1 so far")
    assert env.worker_pid not in (None, pid)
    pid = env.worker_pid
    with pytest.raises(WorkerTimeoutError, match="within 1 s"):
        env.step("Action: sleep")
    assert_ends(pid)
    with pytest.raises(EpisodeStateError):
        env.step("Action: wave")
    assert env.reset()[0].startswith("bold, 1 so far")


def test_the_process_is_replaced_after_so_many_resets(made, assert_ends):
    env = made(isolate("worlds:Moody", path=[HERE], recycle_after=3))
    pids = []
    for expected in (1, 2, 3, 1, 2, 3, 1):
        assert env.reset()[0] == f"fair, {expected} so far in {env.worker_pid}"
        pids.append(env.worker_pid)
    assert len(set(pids)) == 3
    assert_ends(pids[0])
    assert_ends(pids[3])


def test_kill_wakes_a_step_that_hangs(made, assert_ends):
    env = made(isolate("worlds:Moody", path=[HERE], deadline=60))
    env.reset()
    pid = env.worker_pid
    threading.Timer(0.3, env.kill).start()
    began = time.monotonic()
    with pytest.raises(WorkerEndedError, match="was stopped"):
        env.step("Action: sleep")
    assert time.monotonic() - began < 10
    assert_ends(pid)
    with pytest.raises(EpisodeStateError, match="closed"):
        env.reset()


def test_no_process_before_the_first_reset_and_after_close(household, assert_ends):
    env = household()
    assert env.worker_pid is None
    env.reset()
    pid = env.worker_pid
    env.close()
    env.close()
    assert env.worker_pid is None
    assert_ends(pid)
