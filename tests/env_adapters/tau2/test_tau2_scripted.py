"""The scripted customer and the expert: together they reach reward 1 on every task, and neither does it alone."""

import pytest

from env_adapters.tau2 import Tau2Env
from env_adapters.tau2.plan import DO_THIS, Plan

pytest.importorskip("tau2")

ALONE = "telecom_[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]"
BOTH = "telecom_[mobile_data_issue]data_usage_exceeded|user_abroad_roaming_enabled_off[PERSONA:Easy]"
TRANSFER = "telecom_[service_issue]airplane_mode_on|lock_sim_card_pin[PERSONA:Easy]"


def solve(env, task_id, limit=50):
    env.reset(options={"task_id": task_id})
    for turn in range(1, limit + 1):
        observation, reward, done, _, info = env.step(env.expert_action())
        if done:
            return reward, turn, observation, info
    raise AssertionError(f"{task_id} was not over after {limit} turns")


@pytest.fixture(scope="module")
def env():
    env = Tau2Env("scripted")
    yield env
    env.close()


def every(domain, step):
    return [task.task_id for split in ("train", "test") for task in Tau2Env.tasks(split, domain=domain)][::step]


@pytest.mark.parametrize(("domain", "step"), [("retail", 29), ("airline", 17), ("telecom", 12)])
def test_the_expert_solves_a_sample(env, domain, step):
    for task_id in every(domain, step):
        reward, _, _, info = solve(env, task_id)
        assert reward == 1.0, task_id
        assert info["score"] == 1.0
        assert all(value == 1.0 for value in info["reward_breakdown"].values())


@pytest.mark.slow
@pytest.mark.parametrize(("domain", "number"), [("retail", 114), ("airline", 50), ("telecom", 114)])
def test_the_expert_solves_every_task(env, domain, number):
    ids = every(domain, 1)
    assert len(ids) == number
    assert [task_id for task_id in ids if solve(env, task_id)[0] < 1.0] == []


@pytest.mark.slow
def test_doing_nothing_is_right_for_refusals_only(env):
    """The easy successes of airline that the paper's negative result comes from (§8)."""
    rewarded = {}
    for domain in ("retail", "airline", "telecom"):
        for split in ("train", "test"):
            count = 0
            for task in Tau2Env.tasks(split, domain=domain):
                env.reset(options={"task_id": task.task_id})
                for _ in range(8):
                    _, reward, done, _, _ = env.step("I am sorry, I cannot help with that.")
                assert done
                count += reward == 1.0
            rewarded[domain, split] = count
    assert rewarded == {
        ("retail", "train"): 5,
        ("retail", "test"): 2,
        ("airline", "train"): 13,
        ("airline", "test"): 6,
        ("telecom", "train"): 0,
        ("telecom", "test"): 0,
    }


def test_an_episode_is_deterministic(env):
    transcripts = []
    for _ in range(2):
        observations = [env.reset(options={"task_id": BOTH})[0]]
        done = False
        while not done:
            observation, _, done, _, _ = env.step(env.expert_action())
            observations.append(observation)
        transcripts.append(observations)
    assert transcripts[0] == transcripts[1]


@pytest.mark.parametrize("words", ["toggle_airplane_mode", "Please TOGGLE  Airplane-mode now!"])
def test_customers_do_what_they_are_told_by_name(env, words):
    env.reset(options={"task_id": ALONE})
    assert env.expert_action() == f"{DO_THIS}toggle_airplane_mode"
    assert env.step("Have you tried turning it off and on again?")[0] == "I still need your help with this."
    observation, _, _, _, info = env.step(words)
    assert observation == "I have done that. What next?"
    assert env.expert_action() == f"{DO_THIS}toggle_roaming"
    assert info["writes"] == 0
    assert not env._conversation._orchestrator.environment.user_tools.db.device.airplane_mode


def test_customers_do_nothing_they_are_not_expected_to(env):
    env.reset(options={"task_id": ALONE})
    assert env.step("Please reboot_device.")[0] == "I still need your help with this."


def test_patience_begins_anew_with_every_success(env):
    env.reset(options={"task_id": BOTH})
    for _ in range(7):
        assert not env.step("One moment.")[2]
    env.step(env.expert_action())  # a call that was expected
    assert not env.step("One moment.")[2]
    for _ in range(7):
        assert not env.step("One moment.")[2]
    observation, reward, done, _, _ = env.step("One moment.")
    assert (observation, reward, done) == ("Then I will leave it at that. ###STOP###", 0.0, True)


def test_a_transferred_customer_leaves_at_the_next_message(env):
    env.reset(options={"task_id": TRANSFER})
    call = '<tool_call>{"name": "transfer_to_human_agents", "arguments": {"summary": "SIM locked"}}</tool_call>'
    assert not env.step(call)[2]
    observation, _, done, _, info = env.step("You are being transferred. Please hold on.")
    assert (observation, done, info["ended_by"]) == ("###TRANSFER###", True, "transfer")
    assert set(info["reward_basis"]) == {"ENV_ASSERTION", "ACTION"}


class Action:
    def __init__(self, maker, name):
        self.name, self.arguments = name, {"x": "é"}
        self.requestor = maker  # codespell:ignore requestor

    def compare_with_tool_call(self, call):
        return call.name == self.name


class Criteria:
    actions = (Action("assistant", "look"), Action("user", "press"), Action("assistant", "look"))
    communicate_info = ("1200", "Done")


class FakeTask:
    evaluation_criteria = Criteria()


def test_the_plan_strikes_out_one_thing_at_a_time():
    plan = Plan(FakeTask())
    assert plan.left == 5
    assert plan.expert_reply() == '<tool_call>\n{"name": "look", "arguments": {"x": "é"}}\n</tool_call>'
    plan.note_call(Action("user", "look"))  # not the customer's to do
    assert plan.left == 5
    plan.note_call(Action("assistant", "look"))
    assert plan.left == 4
    assert plan.expert_reply() == f"{DO_THIS}press"
    plan.note_call(Action("user", "press"))
    plan.note_call(Action("assistant", "look"))
    plan.note_call(Action("assistant", "look"))
    assert plan.pending == []
    plan.note_message("It costs $1,200.")
    assert plan.expert_reply() == "That is all I can do for you. Done"
    plan.note_message(plan.expert_reply())
    assert plan.left == 0
    assert not plan.empty
