"""Adapters as TRL's own trainer plays them: by its tool loop, its reward columns, and a real optimizer step."""

import gc
import json
import pickle
import runpy
import weakref
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import pytest
import torch
from datasets import Dataset
from support import CountEnv, make_model, make_tokenizer
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer

from env_adapters import CodeBlock, Outcome, ReActText, Task, TextEnv, ToolCall, as_trl_environment, registry
from env_adapters.errors import (
    EnvAdapterError,
    MissingDependencyError,
    UnknownEnvironmentError,
    UnknownSplitError,
    UnknownTaskError,
)
from env_adapters.household import HouseholdEnv
from env_adapters.trl_environment import FAILED, FENCED, OVER

ROOT = Path(__file__).parents[2]


class EchoEnv(TextEnv):
    """Answers with the action it was given; "win" ends it, "break" breaks it."""

    name = "echo"
    instruction = "Say win."
    protocol = ReActText()
    max_turns = 4
    broken_at_reset = False

    @classmethod
    def tasks(cls, split: str) -> Sequence[Task]:
        cls.check_split(split)
        return [Task(cls.name, str(n), "f", split) for n in range(3)]

    @classmethod
    def tools(cls, task_id=None):
        if cls.protocol.name != "tool_call":
            return None
        return [{"type": "function", "function": {"name": f"pay_{task_id}"}}]

    def _begin(self, task_id, seed):
        if task_id == "missing":
            raise UnknownTaskError("`task_id` is 'missing'.")
        if self.broken_at_reset:
            raise OSError("no disk")
        return f"task {task_id}, seed {seed}"

    def _act(self, action):
        if "break" in action.text:
            raise RuntimeError("kaput")
        won = "win" in action.text
        over = (won and "not yet" not in action.text) or "lose" in action.text
        return Outcome(action.text, score=0.25, success=won, done=over)


class EchoCode(EchoEnv):
    name = "echo-code"
    protocol = CodeBlock()


class EchoCall(EchoEnv):
    name = "echo_call"
    protocol = ToolCall()


class Plain(gymnasium.Env):
    """A Gymnasium environment that knows nothing of the contract."""

    def reset(self, *, seed=None, options=None):
        return "start", {}

    def step(self, reply):
        return f"heard {reply}", float(reply == "win"), reply == "win", reply == "stop", {}


@pytest.fixture(autouse=True)
def _own_names(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._BUILT_IN))
    for env in (EchoEnv, EchoCode, EchoCall, CountEnv):
        registry.register(env.name, env)
    registry.register("plain", Plain)


PAY = '{"name": "pay", "arguments": {"x": 1}}'


def playing(name, **options):
    env = as_trl_environment(name, **options)()
    env.reset(task_id="0")
    return env


# ---------------------------------------------------------------- one episode, without TRL


def test_an_episode_by_hand():
    env = as_trl_environment("count")()
    assert env.get_reward() == 0.0
    assert env.act("go") == OVER  # nothing was reset yet
    row = {"task_id": "count-2", "prompt": [], "family": "n2"}
    assert env.reset(**row) == "You are in room 0. Go to room 2."
    assert env.act("back") == "Nothing happens."
    assert env.act("go") == "You are in room 1. You see a door."
    assert (env.success, env.score, env.turns, env.get_reward()) == (False, 0.5, 2, 0.0)
    assert env.act("go") == f"You are in room 2. You see a door. You see a door.\n{OVER}"
    assert (env.success, env.score, env.turns, env.get_reward()) == (True, 1.0, 3, 1.0)
    assert env.act("go") == OVER
    assert (env.success, env.turns) == (True, 3)
    assert env.reset(task_id="count-1") == "You are in room 0. Go to room 1."
    assert (env.success, env.score, env.turns, env.get_reward()) == (False, 0.0, 0, 0.0)


def test_an_end_without_success_has_no_reward():
    env = playing("echo")
    assert env.act("lose") == f"lose\n{OVER}"
    assert (env.success, env.get_reward()) == (False, 0.0)
    cut = playing("echo", max_turns=1)
    assert cut.act("win, but not yet") == f"win, but not yet\n{OVER}"
    assert (cut.success, cut.get_reward()) == (False, 0.0)  # a success counts when the episode ends in it


@pytest.mark.parametrize(("options", "limit"), [({}, 4), ({"max_turns": 2}, 2)])
def test_the_limit_on_turns_ends_the_episode(options, limit):
    env = playing("echo", **options)
    assert [env.act(str(turn)) for turn in range(limit)] == [*map(str, range(limit - 1)), f"{limit - 1}\n{OVER}"]
    assert env.act("win") == OVER
    assert env.get_reward() == 0.0


def test_without_a_task_id_the_seed_draws_one():
    Household = as_trl_environment("household", size="tiny")
    first = [Household().reset(seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert first[0] == first[1]
    assert len(set(first)) > 1
    expected, _ = HouseholdEnv(size="tiny").reset(seed=0)
    assert first[0] == expected


def test_a_failure_is_data_and_the_environment_is_made_anew(monkeypatch):
    env = playing("echo")
    broken = env._env
    assert env.act("break") == FAILED
    assert (env.success, env.get_reward()) == (False, None)
    assert env.error == "RuntimeError: kaput"
    assert env.act("win") == FAILED
    assert broken._closed
    assert env.reset(task_id="1") == "task 1, seed None"
    assert (env.error, env.get_reward()) == (None, 0.0)
    assert env._env is not broken
    monkeypatch.setattr(EchoEnv, "broken_at_reset", True)
    assert env.reset(task_id="1") == FAILED
    assert (env.error, env.get_reward()) == ("OSError: no disk", None)


def test_mistakes_of_the_user_are_raised(monkeypatch):
    with pytest.raises(UnknownEnvironmentError, match="Did you mean 'household'"):
        as_trl_environment("houshold")
    with pytest.raises(EnvAdapterError, match="`max_turns` is 0"):
        as_trl_environment("echo", max_turns=0)
    with pytest.raises(UnknownTaskError):
        as_trl_environment("echo")().reset(task_id="missing")
    with pytest.raises(UnknownSplitError, match="Did you mean 'test'"):
        as_trl_environment("echo").rows("tset")
    with pytest.raises(EnvAdapterError, match="no TextEnv"):
        as_trl_environment("plain").rows()

    def missing(self):
        raise MissingDependencyError("no Java")

    monkeypatch.setattr(EchoEnv, "__init__", missing)
    with pytest.raises(MissingDependencyError, match="no Java"):
        as_trl_environment("echo")().reset()


def test_an_environment_is_closed_with_the_object_that_plays_it():
    env = playing("echo")
    inner, gone = env._env, weakref.ref(env)
    del env
    gc.collect()
    assert gone() is None
    assert inner._closed


# ---------------------------------------------------------------- what the tool takes


@pytest.mark.parametrize(
    ("name", "action", "executed"),
    [
        ("echo", "open fridge 1", "open fridge 1"),
        ("echo", "Thought: cold. Action: open fridge 1", "open fridge 1"),
        ("echo", "open fridge 1\nand look", "open fridge 1"),
        ("echo", "", "Nothing happens."),
        ("echo-code", "for x in y:\n    print(x)\n", "for x in y:\n    print(x)"),
        ("echo-code", "    indented()", "    indented()"),
        ("echo-code", "```python\nprint(1)\n```", "print(1)"),
        ("echo-code", "x = '''\n```\n'''", FENCED),
        ("echo-code", "x = 1\n```\n\n```\ny = 2", FENCED),
        (
            "echo_call",
            '{"name": "pay", "arguments": {"x": 1}}',
            '<tool_call>\n{"name": "pay", "arguments": {"x": 1}}\n',
        ),
        ("echo_call", {"name": "pay", "arguments": {"x": 1}}, '<tool_call>\n{"name": "pay", "arguments": {"x": 1}}\n'),
        ("echo_call", "How can I help?", "How can I help?"),
        ("plain", "hello", "heard hello"),
    ],
)
def test_the_action_reaches_the_environment_as_its_protocol_has_it(name, action, executed):
    env = playing(name)
    answer = env.act(action)
    assert answer.removesuffix("</tool_call>") == executed
    assert env.turns == 1


def test_a_plain_gymnasium_environment_is_played_too():
    env = playing("plain")
    assert env.max_turns == 30
    assert env.act("stop") == f"heard stop\n{OVER}"
    assert env.get_reward() == 0.0
    env.reset()
    assert env.act("win") == f"heard win\n{OVER}"
    assert (env.success, env.get_reward()) == (True, 1.0)


@pytest.mark.parametrize("name", ["echo", "echo-code", "echo_call", "plain"])
def test_the_docstring_makes_a_schema(name):
    schema = get_json_schema(playing(name).act)["function"]
    assert schema["name"] == "act"
    assert list(schema["parameters"]["properties"]) == ["action"]
    assert schema["parameters"]["properties"]["action"]["type"] == "string"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("household", "_Command"), ("scienceworld", "_Command"), ("appworld", "_Code"), ("tau2", "_Call")],
)
def test_each_protocol_has_a_tool_of_its_own(name, kind):
    assert as_trl_environment(name).__base__.__name__ == kind


def test_rows_word_the_instruction_for_the_tool():
    *_, row = rows = as_trl_environment("household").rows("train", limit=5, size="tiny")
    assert len(rows) == 5
    assert (row["environment"], row["task_id"], row["family"]) == ("household", "tiny-train-00004", "pick")
    first, second, last = row["prompt"]
    assert first["role"] == "user"
    assert first["content"].startswith(HouseholdEnv.instruction)
    assert "calling the tool `act`" in first["content"]
    assert (second["content"], last) == ("OK.", {"role": "user", "content": ""})
    assert len(as_trl_environment("echo").rows("test")) == 3
    system, _ = as_trl_environment("echo_call").rows()[2]["prompt"]
    assert system["role"] == "system"
    assert json.dumps({"type": "function", "function": {"name": "pay_2"}}) in system["content"]
    assert "fences" in as_trl_environment("echo-code").rows()[0]["prompt"][0]["content"]


def test_classes_are_named_after_their_environment_and_can_be_pickled():
    names = [as_trl_environment(name).__name__ for name in ("household", "echo-code", "echo_call")]
    assert names == ["HouseholdEnvironment", "EchoCodeEnvironment", "EchoCallEnvironment"]
    Household = pickle.loads(pickle.dumps(as_trl_environment("household", max_turns=7, size="tiny")))
    assert (Household.__name__, Household.max_turns, Household.env_options) == (
        "HouseholdEnvironment",
        7,
        {"size": "tiny"},
    )
    assert pickle.loads(pickle.dumps(Household.__base__)) is Household.__base__


# ---------------------------------------------------------------- TRL's own trainer


def call(action):
    return f"<tool_call>\n{json.dumps({'name': 'act', 'arguments': {'action': action}})}\n</tool_call>"


def scripted(tmp_path, factory, rows, scripts, **changes):
    """TRL's `GRPOTrainer` whose policy says script i in rollout i; everything else is the real thing."""
    tokenizer = make_tokenizer("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            if len(prompt_ids) == len(scripts) and "has_tool_images" not in kwargs:
                self.turn, self.playing = 0, list(range(len(scripts)))
            else:
                self.turn += 1
                self.playing = [i for i in self.playing if self.turn < len(scripts[i])]
            assert len(self.playing) == len(prompt_ids)
            ids = [
                [*tokenizer(scripts[i][self.turn], add_special_tokens=False)["input_ids"], end] for i in self.playing
            ]
            self.prompts_seen = [tokenizer.decode(prompt) for prompt in prompt_ids]
            return ids, None

    settings = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": len(scripts),
        "num_generations": 2,
        "max_steps": 1,
        "max_completion_length": 4000,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "learning_rate": 1e-2,
        **changes,
    }
    return Scripted(
        model=make_model("qwen3", max_position_embeddings=16384),
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=factory,
    )


def expert_commands(task_id):
    env = HouseholdEnv()
    env.reset(options={"task_id": task_id})
    commands = []
    while (command := env.expert_action()) is not None:
        commands.append(command)
        env.step(f"Action: {command}")
    return commands


def test_trl_plays_the_household_and_learns_from_it(tmp_path):
    Household = as_trl_environment("household")
    row = Household.rows("train", limit=1, size="tiny")[0]
    commands = expert_commands(row["task_id"])
    assert len(commands) >= 2
    expert = [*map(call, commands), "Done."]
    loser = [call("look"), "I give up."]
    trainer = scripted(tmp_path, Household, [row], [expert, loser])
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    won, lost = trainer.environments
    assert (won.success, won.turns, won.get_reward()) == (True, len(commands), 1.0)
    assert (lost.success, lost.turns, lost.get_reward()) == (False, 1, 0.0)
    observation, _ = HouseholdEnv().reset(options={"task_id": row["task_id"]})
    seen = trainer.prompts_seen[0]
    assert observation in seen  # appended to the prompt
    assert "The task is done." in seen  # the last answer of the environment
    assert OVER in seen
    assert '"name": "act"' in seen  # the schema
    logged = trainer.state.log_history[0]
    assert logged["rewards/HouseholdEnvironment/mean"] == 0.5
    assert logged["tools/call_frequency"] == (len(commands) + 1) / 2
    assert logged["tools/failure_frequency"] == 0
    assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


def test_trl_plays_two_environments_in_one_batch_and_leaves_failures_out(tmp_path):
    factories = {name: as_trl_environment(name) for name in ("count", "echo")}
    rows = [factories["count"].rows("train", limit=2)[1], factories["echo"].rows("train", limit=1)[0]]
    go, win = [call("go"), call("go"), "Done."], [call("win"), "Done."]
    scripts = [go, [call("back"), "No."], win, [call("break"), call("win"), "Broken."]]
    trainer = scripted(tmp_path, factories, rows, scripts)
    trainer.train()
    count_won, count_lost, echo_won, echo_broken = trainer.environments
    assert [env.get_reward() for env in trainer.environments] == [1.0, 0.0, 1.0, None]
    assert type(count_won) is type(count_lost) is factories["count"]
    assert echo_broken.error == "RuntimeError: kaput"
    logged = trainer.state.log_history[0]
    assert logged["rewards/CountEnvironment/mean"] == 0.5
    assert logged["rewards/EchoEnvironment/mean"] == 1.0
    assert logged["tools/failure_frequency"] == 0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert echo_won.success


def test_the_example_script_trains(tmp_path, monkeypatch):
    make_model("qwen3", max_position_embeddings=16384).save_pretrained(tmp_path / "model")
    make_tokenizer("qwen3").save_pretrained(tmp_path / "model")
    options = "--num_tasks 2 --max_steps 1 --per_device_train_batch_size 2 --num_generations 2 --report_to none"
    options += " --max_completion_length 16 --use_cpu True --bf16 False --logging_steps 1 --disable_tqdm True"
    paths = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["grpo_household.py", *options.split(), *paths])
    runpy.run_path(str(ROOT / "examples/scripts/grpo_household.py"), run_name="__main__")
    assert (tmp_path / "out" / "model.safetensors").exists()
