"""The adapter through the contract: observations, endings, both catalogues, hostile replies, many threads."""

import importlib.util
import json
import random
import re
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("nltk")
pytest.importorskip("rapidfuzz")

from env_adapters import registry
from env_adapters.checker import check_env
from env_adapters.errors import (
    EnvAdapterError,
    EnvDataError,
    EpisodeStateError,
    MissingDependencyError,
    UnknownSplitError,
    UnknownTaskError,
)
from env_adapters.webshop import WebShopEnv
from env_adapters.webshop import shop as shop_module
from env_adapters.webshop.env import INSTRUCTION, SEARCH
from env_adapters.webshop.files import ROOT_VARIABLE
from env_adapters.webshop.synthetic import generate_files

ROOT = Path(__file__).parents[3]
UPSTREAM_STEP_MS = 62


def play(env: WebShopEnv, task_id: str, actions: list[str] | None = None) -> list[tuple]:
    """Transcript of an episode by the expert, or by the actions given."""
    env.reset(options={"task_id": task_id})
    turns = []
    while True:
        action = env.expert_action() if actions is None else actions[len(turns)]
        turns.append(env.step(f"Thought: I think so. Action: {action}"))
        if turns[-1][2] or (actions is not None and len(turns) == len(actions)):
            return turns


@pytest.fixture
def env():
    return WebShopEnv()


# ------------------------------------------------------------------------------------------------------- the contract


def test_the_contract(folder, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(folder))
    env = registry.make("webshop")
    ending = [f"Action: {action}" for action in ("search[dress]", "click[< prev]", "search[hoodie]")]
    first = registry.make("webshop")
    first.reset(options={"task_id": "webshop_0"})
    asin = first.browser.shop.index.search("hoodie", 1)[0][0]
    check_env(env, "webshop_0", replies=[*ending, f"Action: click[{asin}]", "Action: click[Buy Now]"])


def test_class_attributes():
    assert (WebShopEnv.max_turns, WebShopEnv.max_turns_eval, WebShopEnv.score_range) == (15, 15, (0.0, 1.0))
    assert WebShopEnv.standing_messages() == [
        {"role": "user", "content": INSTRUCTION},
        {"role": "assistant", "content": "Ok."},
    ]
    assert INSTRUCTION.startswith("You are web shopping. I will give you instructions about what to do. ")
    assert INSTRUCTION.endswith("following format: Thought: I think … Action: click[something]")
    assert INSTRUCTION.count("…") == 1
    assert INSTRUCTION.replace("…", "").isascii()
    module, _, function = WebShopEnv.data_maker.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_an_episode(env):
    observation, info = env.reset(options={"task_id": "synthetic_17", "admissible_actions": True})
    text, _, actions = observation.partition("\nAvailable actions: ")
    assert text == f"WebShop [SEP] Instruction: [SEP] {env.browser.goal.text} [SEP] Search"
    assert json.loads(actions) == {"has_search_bar": True, "clickables": []}
    assert info["admissible_actions"] == [SEARCH] == ["search[<keywords>]"]
    observation, reward, terminated, truncated, info = env.step("Action: search[jumpsuit]")
    assert (reward, terminated, truncated, info["invalid"], info["score"]) == (0.0, False, False, False, 0.0)
    listed = json.loads(observation.partition("\nAvailable actions: ")[2])
    assert listed == {"has_search_bar": False, "clickables": list(env.browser.clickables)}
    assert info["admissible_actions"] == [f"click[{word}]" for word in listed["clickables"]]
    # What the shop ignores shows the page again.
    for action in ("click[nothing]", "go north", "click[search]"):
        again, reward, terminated, _, info = env.step(f"Action: {action}")
        assert (again, reward, terminated, info["invalid"]) == (observation, 0.0, False, True)
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(f"Action: {env.expert_action()}")
    assert (reward, truncated, info["success"], info["score"]) == (1.0, False, True, 1.0)
    assert observation.endswith("[SEP] 1.0 [SEP] Reward Details [SEP] None")
    assert env.expert_action() is None
    with pytest.raises(EpisodeStateError):
        env.step("Action: search[x]")


def test_a_poor_purchase_ends_the_episode_without_success(env):
    env.reset(options={"task_id": "synthetic_17"})
    env.step("Action: search[jumpsuit]")
    env.step(f"Action: click[{env.browser.goal.product.asin}]")
    _, reward, terminated, _, info = env.step("Action: click[buy now]")
    assert (reward, terminated, info["success"], info["invalid"]) == (0.0, True, False, False)
    assert 0 < info["score"] < 1


def test_admissible_actions_have_an_effect(env):
    """All of them, on every page that the expert comes by."""
    env.reset(options={"task_id": "synthetic_5"})
    done, path = False, []
    while not done:
        for action in env.admissible_actions():
            other = WebShopEnv()
            other.reset(options={"task_id": "synthetic_5"})
            for step in path:
                other.step(f"Action: {step}")
            assert other.step(f"Action: {action}")[4]["invalid"] is False
        path.append(env.expert_action())
        done = env.step(f"Action: {path[-1]}")[2]


def test_a_value_with_brackets_is_no_admissible_action(tmp_path, write_folder):
    """Upstream lists it, and never lets one click it."""
    rows, annotations = generate_files()
    for row in rows:
        row["customization_options"] = {"Color": [{"value": "red [dark]"}, {"value": "teal"}]}
    env = WebShopEnv(root=write_folder(tmp_path, rows, annotations))
    env.reset(options={"task_id": "webshop_0"})
    for _ in range(2):
        observation = env.step(f"Action: {env.expert_action()}")[0]
    assert '"red [dark]", "teal"]' in observation
    assert [action for action in env.admissible_actions() if "red" in action or "teal" in action] == ["click[teal]"]
    assert env.step("Action: click[red [dark]]")[4]["invalid"]


def test_switches():
    plain = WebShopEnv(available_actions=False)
    observation, _ = plain.reset(options={"task_id": "synthetic_17"})
    assert observation == plain.browser.observation()
    rich = WebShopEnv(available_actions=False, observation_mode="text_rich")
    assert rich.reset(options={"task_id": "synthetic_17"})[0].endswith("[button] Search [button_]\n")
    marked = WebShopEnv(observation_mode="text_rich")
    marked.reset(options={"task_id": "synthetic_17"})
    observations = [turn[0] for turn in play(marked, "synthetic_17")]
    assert observations[2].startswith("You have clicked burgundy.\nInstruction:\n")
    assert "Buy Now [button_]\nAvailable actions: {" in observations[2]


def test_strict_options():
    """A value that upstream takes for a colour it contains, though it is none."""
    rewards = {}
    for strict in (True, False):
        env = WebShopEnv(strict_options=strict)
        env.reset(options={"task_id": "synthetic_17"})
        goal = env.browser.goal
        options = {"style": "standard"}
        rewards[strict] = env.browser.shop.score(
            goal.product, type(goal)(0, goal.product, "", options, goal.price_upper), options, strict_options=strict
        ).total
        assert env.browser.strict_options is strict
    assert rewards[True] < rewards[False] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": "synthetik"}, r"`data` is 'synthetik'.*\['real', 'synthetic'\].*Did you mean 'synthetic'"),
        ({"data": 3}, "`data` is 3"),
        ({"observation_mode": "rich"}, "`observation_mode` is 'rich'.*'text_rich'"),
    ],
)
def test_unknown_arguments(arguments, message):
    with pytest.raises(EnvAdapterError, match=message):
        WebShopEnv(**arguments)
    if "data" in arguments:
        with pytest.raises(EnvAdapterError, match=message):
            WebShopEnv.tasks("train", **arguments)


def test_the_example_of_the_documentation(capsys):
    page = (ROOT / "docs/environments/webshop.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(from env_adapters import make.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    exec(compile(block, "webshop.md", "exec"), {})
    (promised,) = re.findall(r"print\(env\.expert_action\(\)\)  # (.*)", block)
    assert capsys.readouterr().out.strip() == promised


# ---------------------------------------------------------------------------------------------------- tasks and data


def test_the_expert_solves_every_generated_goal(env, shop):
    for goal in shop.goals:
        turns = play(env, f"synthetic_{goal.index}")
        _, reward, _, _, info = turns[-1]
        assert (reward, info["score"]) == (1.0, 1.0), goal
        assert len(turns) <= 5
        assert not any(turn[4]["invalid"] for turn in turns)


def test_the_expert_continues_from_anywhere(env, shop):
    """Random play first: whatever page it leads to, the expert still gets to 1 within the turn limit."""
    rng = random.Random(5)
    for index in rng.sample(range(len(shop.goals)), 60):
        env.reset(options={"task_id": f"synthetic_{index}"})
        for _ in range(rng.randrange(1, 9)):
            action = rng.choice([a for a in env.admissible_actions() if a != "click[buy now]"])
            env.step(f"Action: {action.replace('<keywords>', rng.choice(['lamp', 'red', 'zzz']))}")
        for _ in range(env.max_turns):
            _, _, done, _, info = env.step(f"Action: {env.expert_action()}")
            if done:
                break
        assert info["score"] == 1.0


def test_one_environment_plays_both_catalogues(folder):
    env = WebShopEnv(root=folder)
    for task_id in ("synthetic_9", "webshop_9", "synthetic_9"):
        assert play(env, task_id)[-1][4]["success"]
    # The folder holds the generated catalogue, so the ids stand for the same goals.
    texts = [env.reset(options={"task_id": task_id})[0] for task_id in ("synthetic_9", "webshop_9")]
    assert texts[0] == texts[1]


def test_a_task_is_drawn_with_the_seed(folder):
    for env in (WebShopEnv("synthetic"), WebShopEnv("real", folder), WebShopEnv(root=folder)):
        drawn = [env.reset(seed=seed)[0] for seed in (5, 5, 6)]
        assert drawn[0] == drawn[1] != drawn[2]
    train = {task.task_id for task in WebShopEnv.tasks("train", data="synthetic")}
    env = WebShopEnv("synthetic")
    for seed in range(20):
        env.reset(seed=seed)
        assert f"synthetic_{env.browser.goal.index}" in train


def test_another_pool_is_split_in_proportion(folder):
    train, test, pool = (WebShopEnv.tasks(split, root=folder) for split in ("train", "test", "all"))
    assert (len(train), len(test), len(pool)) == (1475 * 3930 // 6910, 1475 * 200 // 6910, 1475)
    assert not {task.task_id for task in train} & {task.task_id for task in test}
    assert {task.task_id.partition("_")[0] for task in pool} == {"webshop"}
    with pytest.raises(UnknownSplitError, match="'dev'"):
        WebShopEnv.tasks("dev", root=folder)


def test_without_a_data_folder(env):
    message = r"no-such-folder.*does not exist.*make-data webshop.*`root`.*\$WEBSHOP_DATA.*data=\"synthetic\""
    for call in (
        lambda: WebShopEnv.tasks("train"),
        env.reset,
        lambda: env.reset(options={"task_id": "webshop_3"}),
    ):
        with pytest.raises(EnvDataError, match=message):
            call()
    assert env.reset(options={"task_id": "synthetic_3"})


@pytest.mark.parametrize(
    "task_id",
    ["", "17", "webshop_", "webshop_-1", "webshop_٣", "WEBSHOP_1", "sciworld_17", "synthetic_1475", "x" * 5000],
)
def test_unknown_task_ids(env, task_id):
    for call in (lambda: WebShopEnv.check_task_id(task_id), lambda: env.reset(options={"task_id": task_id})):
        with pytest.raises(UnknownTaskError, match="synthetic_1474") as caught:
            call()
        assert repr(task_id) in str(caught.value)


def test_an_id_beyond_the_last_goal(folder, monkeypatch):
    with pytest.raises(UnknownTaskError, match="'webshop_1475'.*'webshop_1474'"):
        WebShopEnv(root=folder).reset(options={"task_id": "webshop_1475"})
    WebShopEnv.check_task_id("webshop_1475")  # that folder is not the default one
    monkeypatch.setenv(ROOT_VARIABLE, str(folder))
    with pytest.raises(UnknownTaskError, match="'webshop_1474'"):
        WebShopEnv.check_task_id("webshop_1475")
    WebShopEnv.check_task_id("webshop_1474")


def test_load_tasks():
    from cope_trl.data.tasks import load_tasks

    rows = load_tasks("webshop", split="test", data="synthetic", limit=5, families=["grocery"])
    assert len(rows) == 5
    assert set(rows["environment"]) == {"webshop"}
    ids = ["synthetic_3", "synthetic_1474"]
    assert load_tasks("webshop", ids=ids, data="synthetic")["task_id"][:] == ids


# ------------------------------------------------------------------------------------------------------ what it needs


@pytest.mark.parametrize("package", ["nltk", "regex", "rapidfuzz"])
def test_missing_package(env, monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    for call in (WebShopEnv.check_requirements, lambda: env.reset(options={"task_id": "synthetic_3"})):
        with pytest.raises(MissingDependencyError, match=rf"`{package}`.*pip install 'cope_trl\[webshop\]'"):
            call()
    assert WebShopEnv.tasks("test", data="synthetic")


def test_listing_tasks_imports_nothing_optional():
    code = (
        "import sys, env_adapters.webshop as w; assert not {'numpy', 'gymnasium'} & set(sys.modules);"
        "w.WebShopEnv(); w.WebShopEnv.tasks('train', data='synthetic'); w.WebShopEnv.check_requirements();"
        "bad = {'nltk', 'regex', 'rapidfuzz', 'spacy', 'torch', 'transformers', 'trl'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ---------------------------------------------------------------------------------------------------- hostile replies


def hostile_actions(rng: random.Random, page_words: list[str]):
    pieces = [
        "search[", "click[", "]", "[", "[[", "]]", "<r>", "<a> x", "<c>", "<q>", "buy now", "back to search", "\n",
        " ", "Action:", "<think>", "</think>", "é", "日本", "\ud800", "\x00", "\u2028", "\u0301", "🧪", "{}", "'", '"',
        "\\", "search_results", "item_page", "item_sub_page", "done", "red", "a" * 300, *page_words[:5],
    ]  # fmt: skip
    kind = rng.random()
    if kind < 0.5:
        return "".join(rng.choices(pieces, k=rng.randrange(0, 9)))
    if kind < 0.7:
        return f"Action: search[{''.join(rng.choices(pieces, k=rng.randrange(0, 6)))}]"
    if kind < 0.9 and page_words:
        return f"Action: click[{rng.choice(page_words)}]"
    return "".join(
        chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x110000)])) for _ in range(rng.randrange(40))
    )


def test_ten_thousand_random_replies(env):
    rng = random.Random(11)
    tasks = WebShopEnv.tasks("all", data="synthetic")
    done, invalid, ends = True, 0, 0
    for _ in range(10_000):
        if done:
            ends += 1
            env.reset(options={"task_id": rng.choice(tasks).task_id})
        words = [word for word in env.browser.clickables if word != "buy now" or rng.random() < 0.1]
        reply = f"Action: {env.expert_action()}" if rng.random() < 0.2 else hostile_actions(rng, words)
        observation, reward, done, truncated, info = env.step(reply)
        assert isinstance(observation, str)
        assert (reward == 1.0) == info["success"]
        assert 0 <= info["score"] <= 1
        assert not truncated
        invalid += info["invalid"]
        assert env.browser.clickables or done
    assert 1_000 < invalid < 9_000
    assert 10 < ends < 5_000
    # The episode is still playable.
    if not done:
        for _ in range(env.max_turns):
            _, _, done, _, info = env.step(f"Action: {env.expert_action()}")
            if done:
                break
    assert done


@pytest.mark.parametrize(
    "unit", ["a", "[", "]", "search[", "click[x] ", "the ", "\u0301", "red 🧪 ", "\ud800", "_", "\n"]
)
def test_a_megabyte(env, unit):
    env.reset(options={"task_id": "synthetic_3"})
    long = unit * (1_000_000 // len(unit))
    start = time.process_time()
    for reply in (long, f"Action: search[{long}]", f"Action: click[{long}]", f"Action: {long}"):
        assert env.step(reply)[2] is False
    env.step(f"Action: search[{long}]")
    env.step("Action: click[back to search]")
    assert time.process_time() - start < 20  # measured: up to 2 s; quadratic time would take hours
    done = False
    while not done:
        _, _, done, _, info = env.step(f"Action: {env.expert_action()}")
    assert info["success"]


# --------------------------------------------------------------------------------------------- sharing, threads, speed


def test_a_second_environment_shares_the_shop(env, shop):
    play(env, "synthetic_3")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    others = [WebShopEnv() for _ in range(10)]
    for other in others:
        other.reset(options={"task_id": "synthetic_3"})
        other.step("Action: search[dress]")
        assert other.browser.shop is shop
    used = (tracemalloc.get_traced_memory()[0] - before) / len(others)
    tracemalloc.stop()
    assert used < 100_000  # bytes; 2 MB would be allowed


def test_threads_build_one_shop_and_do_not_disturb_each_other(monkeypatch, folder):
    monkeypatch.setattr(shop_module, "_real", {})
    built = []
    build = shop_module.SearchIndex
    monkeypatch.setattr(shop_module, "SearchIndex", lambda documents: built.append(1) or build(documents))
    alone = {index: play(WebShopEnv(), f"synthetic_{index}") for index in range(24)}
    start = threading.Barrier(8)

    def work(worker: int) -> bool:
        env = WebShopEnv(root=folder)
        start.wait()
        return all(play(env, f"webshop_{index}") == alone[index] for index in range(worker, 24, 8))

    built.clear()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert len(built) == 1


def test_steps_are_fast(env):
    tasks = WebShopEnv.tasks("test", data="synthetic")
    play(env, tasks[0].task_id)
    start, steps = time.process_time(), 0
    for task in tasks:
        steps += len(play(env, task.task_id))
    milliseconds = 1000 * (time.process_time() - start) / steps
    assert milliseconds < UPSTREAM_STEP_MS / 20
