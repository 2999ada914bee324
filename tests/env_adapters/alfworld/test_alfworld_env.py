"""The environment on generated games, played by the real engine: observations, success, bad input, the contract."""

import hashlib
import json
import random
import shutil
import sys
import threading
import time

import pytest

pytest.importorskip("alfworld")

from env_adapters import registry
from env_adapters.alfworld import AlfWorldEnv, engine, textworld_copy
from env_adapters.alfworld.games import DATA_FOLDER, MANIFEST, game_list
from env_adapters.checker import check_env
from env_adapters.errors import EnvDataError, EpisodeStateError, MissingDependencyError, UnknownTaskError

LIST = "\nAVAILABLE ACTIONS: "


@pytest.fixture(scope="module")
def env(games_root):
    env = AlfWorldEnv(root=games_root)
    yield env
    env.close()


def start(env, number=0, **options):
    return env.reset(options={"task_id": f"alfworld_{number}", **options})


def act(env, command):
    return env.step(f"Thought: I see. Action: {command}")


def number_of(root, family, split="train"):
    return next(game.index for game in game_list(root).split(split) if game.family == family)


def commands_shown(observation):
    return observation.rpartition(LIST)[2].split(",")


# ------------------------------------------------------------------------------------------------------- playing games


def test_every_generated_game_is_won_by_its_walkthrough(env, games_root):
    games = game_list(games_root).games
    assert len(games) == 24
    for game in games:
        observation, info = start(env, game.index)
        assert (info["success"], info["score"], info["invalid"]) == (False, 0.0, False)
        terminated = False
        while not terminated:
            command = env.expert_action()
            assert command in commands_shown(observation), game
            observation, reward, terminated, truncated, info = act(env, command)
            assert (info["action"], info["invalid"], truncated) == (command, False, False)
            assert (reward, info["score"], info["success"]) == (
                (1.0,) * 2 + (True,) if terminated else (0.0, 0.0, False)
            )
        assert env.expert_action() is None
        with pytest.raises(EpisodeStateError):
            act(env, "look")


def test_all_six_families_are_listed(data):
    for split, each in {"train": 3, "test": 1}.items():
        families = [task.family for task in AlfWorldEnv.tasks(split)]
        assert {family: families.count(family) for family in families} == dict.fromkeys(
            ("pick", "look", "clean", "heat", "cool", "pick2"), each
        )


def test_the_first_observation_is_room_task_and_commands(env):
    observation, info = start(env, admissible_actions=True)
    room, task, commands = observation.split("\n")
    assert room.startswith("You are in the middle of a room. Looking quickly around you, you see a ")
    assert task.startswith("Your task is to: ")
    assert commands.startswith("AVAILABLE ACTIONS: go to ")
    assert commands.removeprefix("AVAILABLE ACTIONS: ").split(",") == info["admissible_actions"]
    assert info["admissible_actions"] == env.admissible_actions() == sorted(env.admissible_actions())


def test_every_observation_ends_with_the_commands(env):
    start(env)
    place = next(command for command in env.admissible_actions() if command.startswith("go to "))
    replies = [f"Action: {place}", "Action: fly", "", "<think>", "Action: look", "Action: inventory", "Action: help"]
    for reply in replies:
        observation = env.step(reply)[0]
        assert observation.count(LIST) == 1
        assert commands_shown(observation) == env.admissible_actions()


def test_without_the_list(games_root):
    env = AlfWorldEnv(games_root, available_actions=False)
    first = start(env)[0]
    assert "AVAILABLE" not in first
    assert act(env, "fly")[0] == env.step("")[0] == "Nothing happens."
    assert act(env, "inventory")[0] == "You are not carrying anything."
    env.close()


@pytest.mark.parametrize("command", ["fly", "look around", "LOOK", "go to desk 99", "look.", "put mug 1 in/on desk 1"])
def test_a_command_that_is_not_listed_is_invalid_and_changes_nothing(env, command):
    start(env)
    before = env.admissible_actions()
    observation, reward, terminated, _, info = act(env, command)
    assert observation.partition(LIST)[0] == "Nothing happens."
    assert (reward, terminated, info["invalid"], info["action"]) == (0.0, False, True, command)
    assert env.admissible_actions() == before
    assert act(env, "look")[4]["invalid"] is False


def test_the_expert_knows_the_way_only_while_it_is_followed(env):
    start(env)
    first = env.expert_action()
    assert first.startswith("go to ")
    act(env, "fly")  # changes nothing
    assert env.expert_action() == first
    act(env, first)
    assert env.expert_action() not in (None, first)
    act(env, "look")
    assert env.expert_action() is None


def test_success_is_the_goal_not_the_last_command(env, games_root):
    """The goal of `heat` does not hold for a thing that was not heated."""
    start(env, number_of(games_root, "heat"))
    path = []
    while (command := env.expert_action()) is not None:
        path.append(command)
        act(env, command)
    start(env, number_of(games_root, "heat"))
    results = [act(env, command) for command in path if not command.startswith("heat ")]
    assert results[-1][0].startswith("You move the ")
    assert not any(result[2] or result[4]["success"] or result[4]["score"] for result in results)


def test_a_seed_draws_training_games(env, games_root):
    first, again, other = (env.reset(seed=seed)[0] for seed in (3, 3, 4))
    assert first == again
    train = {start(env, game.index)[0] for game in game_list(games_root).split("train")}
    assert {first, other} <= train
    assert len({env.reset(seed=seed)[0] for seed in range(12)}) > 3


def test_the_contract(data):
    env = AlfWorldEnv()
    start(env, number_of(data, "pick2"))
    replies = []
    while (command := env.expert_action()) is not None:
        replies.append(f"Action: {command}")
        env.step(replies[-1])
    env.close()
    check_env(AlfWorldEnv(), task_id=f"alfworld_{number_of(data, 'pick2')}", replies=replies)
    check_env(registry.make("alfworld"))


def test_the_prompt_never_changes():
    """The digest of the paper's text (C.1), with straight quotes and apostrophes."""
    assert hashlib.sha256(AlfWorldEnv.instruction.encode()).hexdigest()[:16] == "721239159137f3fe"
    assert [message["role"] for message in AlfWorldEnv.standing_messages()] == ["user", "assistant"]
    assert AlfWorldEnv.acknowledgement == "OK. I'll follow your instructions and try my best to solve the task."
    assert (AlfWorldEnv.max_turns, AlfWorldEnv.max_turns_eval, AlfWorldEnv.score_range) == (20, 30, (0.0, 1.0))


# ---------------------------------------------------------------------------------------------------------- bad input


def test_ten_thousand_random_replies_leave_the_episode_playable(env):
    rng = random.Random(0)
    words = ["Action:", "go to", "desk 1", "look", "-1", "<think>", "</think>", "\n", "\t", "\\n", "'", '"', ";", "%s"]
    words += ["{r}", "}", "[o | in(o:object)]", "#look.feedback#", "\x00", "\ud800", "🧪", "你好", "مرحبا", "e\u0301"]
    start(env)
    expected, played = env.admissible_actions(), 0
    for _ in range(10_000):
        reply = "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(rng.randrange(8)))
        _, reward, terminated, truncated, info = env.step(reply)
        assert (reward, terminated, truncated) == (0.0, False, False)
        played += not info["invalid"]
        assert info["invalid"] or info["action"] in expected
    assert played > 0  # "look" among them
    for reply in ("", "Action: " + "go to desk 1 " * 80_000, "x" * 1_000_000, "{" * 100_000, "\n" * 1_000_000):
        assert env.step(reply)[4]["invalid"] is True
    assert env.admissible_actions() == expected
    assert act(env, expected[0])[4]["invalid"] is False


@pytest.fixture
def spoiled(games_root, tmp_path):
    """A copy of the games whose first file the test rewrites: `spoil(change)` returns an environment."""
    shutil.copytree(games_root / DATA_FOLDER, tmp_path / DATA_FOLDER)
    shutil.copy(games_root / MANIFEST, tmp_path)
    path = game_list(tmp_path).games[0].file(tmp_path)
    env = AlfWorldEnv(tmp_path)

    def spoil(change):
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)
        return env, path

    yield spoil
    env.close()


def in_json(change):
    def apply(content):
        game = json.loads(content)
        change(game)
        return json.dumps(game).encode()

    return apply


OLD = in_json(lambda game: game.update(grammar=game["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param(OLD, r"another ALFWorld version.*put \{o\} in/on \{r\}.*alfworld-download -f", id="old verbs"),
        pytest.param(lambda content: content[:-200], "is damaged", id="cut off"),
        pytest.param(lambda content: b"", "is damaged", id="empty"),
        pytest.param(lambda content: b"\xff\xfe\x00", "is damaged", id="binary"),
        pytest.param(lambda content: b"[]", "lacks pddl_domain, pddl_problem, grammar", id="a list"),
        pytest.param(in_json(lambda game: game.pop("grammar")), "lacks grammar", id="no grammar"),
        pytest.param(in_json(lambda game: game.update(walkthrough=3)), "walkthrough is no list", id="no walkthrough"),
        pytest.param(
            in_json(lambda game: game.update(pddl_problem=game["pddl_problem"][:-300])),
            "cannot load",
            id="PDDL cut off",
        ),
        pytest.param(in_json(lambda game: game.update(pddl_problem="(")), "cannot load", id="no PDDL"),
        pytest.param(
            in_json(
                lambda game: game.update(pddl_domain=game["pddl_domain"].replace(":action look", ":action loook"))
            ),
            "cannot load",
            id="unknown command",
        ),
        pytest.param(
            in_json(lambda game: game.update(grammar=game["grammar"][:900] + "move {o} to {r}")),
            "cannot load",
            id="grammar",
        ),
    ],
)
def test_a_file_that_cannot_be_played_is_one_clear_error(spoiled, change, says):
    env, path = spoiled(change)
    argv, stdout = sys.argv, sys.stdout
    with pytest.raises(EnvDataError, match=says) as caught:
        start(env)
    assert repr(str(path)) in str(caught.value)
    assert "alfworld-download" in str(caught.value)
    assert "\n" not in str(caught.value)[:200]
    assert (sys.argv, sys.stdout) == (argv, stdout)
    with pytest.raises(EpisodeStateError):
        env.step("Action: look")
    assert start(env, 1)[0].startswith("You are in the middle")  # the environment is not lost


def test_a_file_that_went_away(spoiled):
    env, _ = spoiled(lambda content: content)
    start(env)
    env, _ = spoiled(lambda content: None)
    with pytest.raises(EnvDataError, match="cannot be read"):
        start(env)


def test_a_file_without_walkthrough_has_no_expert(spoiled):
    env, _ = spoiled(in_json(lambda game: game.pop("walkthrough")))
    start(env)
    assert env.expert_action() is None
    assert act(env, "look")[4]["invalid"] is False


@pytest.mark.parametrize("task_id", ["alfworld_24", "24", "alfworld_-1", "mug"])
def test_an_id_that_is_not_there(env, task_id):
    with pytest.raises(UnknownTaskError):
        env.reset(options={"task_id": task_id})


@pytest.mark.parametrize("package", ["alfworld", "textworld", "fast_downward"])
def test_missing_package(monkeypatch, data, package):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    for call in (AlfWorldEnv.check_requirements, lambda: start(AlfWorldEnv())):
        with pytest.raises(MissingDependencyError, match=rf"`{package}`.*pip install 'cope_trl\[alfworld\]'"):
            call()


def test_missing_data(tmp_path):
    env = AlfWorldEnv(tmp_path)
    with pytest.raises(EnvDataError, match="holds no ALFWorld data"):
        start(env)
    with pytest.raises(UnknownTaskError, match="'mug'"):  # the id is wrong whatever the data
        env.reset(options={"task_id": "mug"})
    with pytest.raises(EpisodeStateError, match="call `reset` first"):
        env.admissible_actions()


# ----------------------------------------------------------------------------------------------------- process and end


def test_loading_leaves_argv_and_stdout_alone(games_root, monkeypatch, capsys):
    """The translator overwrites both. What other threads print meanwhile arrives, what it prints itself does not."""
    monkeypatch.setattr(textworld_copy, "_copied", None)  # so that the games are translated once more
    argv, stdout = list(sys.argv), sys.stdout
    stop, said = threading.Event(), []

    def chat():
        while not stop.is_set():
            print("somebody else")
            said.append(True)
            time.sleep(0.001)

    thread = threading.Thread(target=chat)
    thread.start()
    try:
        for game in game_list(games_root).games[:2]:
            engine.Engine().load(game.file(games_root))
    finally:
        stop.set()
        thread.join()
    assert sys.argv == argv
    assert sys.stdout is stdout
    assert len(said) > 10
    assert capsys.readouterr().out.splitlines() == ["somebody else"] * len(said)


def test_engines_are_used_again(games_root, monkeypatch):
    monkeypatch.setattr(engine, "_free", [])
    first = AlfWorldEnv(games_root)
    start(first)
    used = first._engine
    start(first, 1)
    assert first._engine is used
    first.close()
    first.close()
    second = AlfWorldEnv(games_root)
    start(second, 2)
    assert second._engine is used
    assert act(second, "look")[4]["invalid"] is False
    second.close()
    for call in (lambda: act(first, "look"), lambda: start(first)):
        with pytest.raises(EpisodeStateError):
            call()


def test_an_engine_in_use_is_not_handed_on(games_root, monkeypatch):
    """`kill` comes from another thread, while `step` is inside the engine."""
    monkeypatch.setattr(engine, "_free", [])
    env = AlfWorldEnv(games_root)
    start(env)
    inside, go_on, raised = threading.Event(), threading.Event(), []

    class Slow:
        def step(self, command):
            inside.set()
            assert go_on.wait(20)
            return env._turn

    env._engine = Slow()
    thread = threading.Thread(target=lambda: raised.append(act(env, "look")[4]["action"]))
    thread.start()
    assert inside.wait(20)
    env.kill()
    assert engine._free == []
    go_on.set()
    thread.join(20)
    with pytest.raises(EpisodeStateError):
        act(env, "look")
