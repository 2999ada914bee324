"""OpenEnv environments of other people: which field is the text, what a task is, what counts as success."""

import math
import random

import pytest
from datasets import Dataset

from cope_trl import load_tasks
from cope_trl.rollout.pool import Call, EnvironmentPool
from env_adapters import EnvAdapterError, UnknownTaskError, check_env, make, resolve
from env_adapters.openenv.foreign import action_field_of, observation_fields_of
from env_adapters.protocols import CodeBlock, ReActText


@pytest.fixture(scope="module")
def guess(launch):
    return launch(function="foreign_world:serve_guess")


@pytest.fixture(scope="module")
def talk(launch):
    return launch(function="foreign_world:serve_talk")


def hidden(seed):
    return random.Random(seed).randint(1, 9)


def test_an_episode(guess, made):
    env = made(guess)
    assert env.reset(options={"task_id": "7"}) == (
        "Which number from 1 to 9? (seed 7)",
        {"success": False, "score": 0.0, "action": "", "invalid": False},
    )
    wrong = hidden(7) % 9 + 1
    assert env.step(f"Thought: maybe.\nAction: {wrong}") == (
        "No.",
        0.0,
        False,
        False,
        {"success": False, "score": 0.25, "action": str(wrong), "invalid": False},
    )
    observation, reward, terminated, _, info = env.step(f"Action: {hidden(7)}")
    assert (observation, reward, terminated) == ("Right.", 1.0, True)
    assert (info["success"], info["score"]) == (True, 1.0)
    env.reset(options={"task_id": "7"})
    _, reward, terminated, _, info = env.step("Action: give up")
    assert (reward, terminated, info["success"], info["score"]) == (0.0, True, False, -0.5)


def test_it_keeps_the_contract(guess):
    check_env(make(guess.name), task_id="3", replies=[f"Action: {hidden(3)}"])


def test_tasks_are_seeds(guess):
    cls = resolve(guess.name)
    rows = load_tasks(guess.name, split="train", limit=3)
    assert rows["task_id"] == ["0", "1", "2"]
    assert rows["prompt"][0] == [{"role": "system", "content": "GuessEnvironment environment"}]
    train, test = ({task.task_id for task in cls.tasks(split)} for split in ("train", "test"))
    assert not train & test
    assert (len(train), len(test)) == (1000, 200)
    for wrong in ("x", "-1", "1.5", "", "²"):
        with pytest.raises(UnknownTaskError, match="are seeds"):
            cls.check_task_id(wrong)
    assert Dataset.from_list([dict(row) for row in rows])["environment"] == [guess.name] * 3


def test_several_at_a_time(guess):
    pool = EnvironmentPool(make)
    handles = [pool.acquire(guess.name) for _ in range(6)]
    pool.run([Call(handle, "reset", kwargs={"options": {"task_id": str(n)}}) for n, handle in enumerate(handles)])
    results = pool.run([Call(handle, "step", (f"Action: {hidden(n)}",)) for n, handle in enumerate(handles)])
    assert [result[0] for result in results] == ["Right."] * 6
    pool.close()


def test_a_server_for_one_session(launch, made):
    server = launch(function="foreign_world:serve_single")
    first = made(server)
    first.reset()
    with pytest.raises(EnvAdapterError, match="has room for one more session.*Server at capacity"):
        made(server, deadline=1.0).reset()


def test_where_there_are_several_text_fields_one_has_to_be_chosen(talk, made):
    cls = resolve(talk.name)  # the class can be had, to be told what to choose
    for attempt in (cls.check_requirements, cls):
        with pytest.raises(
            EnvAdapterError, match=r"observation .* has the text fields \['title', 'text'\]; choose with"
        ):
            attempt()
    env = made(talk, observation_field="title+text")
    assert env.reset()[0] == env.reset(seed=1)[0] == "Welcome"  # an empty field, or none, leaves no line
    assert env.step("Action: rain")[0] == "On rain\n0 words"
    assert made(talk, observation_field="text").reset()[0] == ""
    by_name = f"{talk.name}?observation_field=title&action_field=subject&protocol=code"
    resolve(by_name).check_requirements()
    assert isinstance(resolve(by_name).protocol, CodeBlock)
    env = made(by_name)
    env.reset()
    assert env.step("```\nsun\nmoon\n```")[:3] == ("On sun\nmoon", 1.0, True)
    assert isinstance(made(by_name, protocol="react").protocol, ReActText)
    with pytest.raises(EnvAdapterError, match=r"needs \['subject'\] beside 'body'"):
        made(talk, observation_field="text", action_field="body")
    with pytest.raises(EnvAdapterError, match=r"`protocol` is 'raect'.*Did you mean 'react'"):
        made(talk, observation_field="text", protocol="raect")


TEXT, NUMBER, WORDS = {"type": "string"}, {"type": "integer"}, {"type": "string", "enum": ["a", "b"]}
MAYBE = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("fields", "required", "chosen", "expected"),
    [
        ({"text": TEXT}, ["text"], None, "text"),
        ({"text": TEXT, "metadata": {"type": "object"}}, ["text", "metadata"], None, "text"),
        ({"text": TEXT, "note": TEXT}, ["text"], None, "text"),
        ({"text": TEXT, "count": NUMBER}, [], None, "text"),
        ({"text": MAYBE}, [], None, "text"),
        ({"kind": WORDS, "text": TEXT}, [], None, "text"),
        ({"a": TEXT, "b": TEXT}, [], "b", "b"),
        ({"a": TEXT, "b": TEXT}, ["a", "b"], None, r"text fields \['a', 'b'\]; choose with `action_field=`"),
        ({"a": TEXT, "b": TEXT}, [], None, r"text fields \['a', 'b'\]; choose"),
        ({"count": NUMBER}, ["count"], None, r"no text field \(its fields are \['count'\]\)"),
        ({"kind": WORDS}, ["kind"], None, r"no text field"),
        ({"text": TEXT, "count": NUMBER}, ["text", "count"], None, r"needs \['count'\] beside 'text'"),
        ({"text": TEXT}, ["text"], "txt", r"`action_field` is 'txt'.*Did you mean 'text'"),
    ],
)
def test_the_field_that_takes_the_action(fields, required, chosen, expected):
    schema = {"action": {"properties": fields, "required": required}}
    if expected in fields:
        assert action_field_of(schema, chosen) == expected
    else:
        with pytest.raises(EnvAdapterError, match=expected):
            action_field_of(schema, chosen)


def test_the_fields_that_are_shown():
    schema = {"observation": {"properties": {"done": {"type": "boolean"}, "a": TEXT, "n": NUMBER, "b": MAYBE}}}
    assert observation_fields_of(schema, "b + a".replace(" ", "")) == ["b", "a"]
    assert observation_fields_of(schema, "b a") == ["b", "a"]  # a `+` that went through an address
    with pytest.raises(EnvAdapterError, match=r"`observation_field` names 'n'"):
        observation_fields_of(schema, "a+n")
    del schema["observation"]["properties"]["a"]
    assert observation_fields_of(schema) == ["b"]


@pytest.mark.parametrize("reward", [math.nan, math.inf, "much"])
def test_a_reward_that_is_no_number(guess, made, monkeypatch, reward):
    env = made(guess)
    env.reset()
    answer = type("Answer", (), {"observation": {"hint": "?"}, "reward": reward, "done": False})
    monkeypatch.setattr(env, "_step", lambda action: answer)
    with pytest.raises(EnvAdapterError, match="gave the reward"):
        env.step("Action: 1")
