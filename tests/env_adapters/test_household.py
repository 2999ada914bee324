"""The household: its tasks, its rules, its expert, and the promises an environment makes."""

import os
import random
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from env_adapters.checker import check_env
from env_adapters.errors import EpisodeStateError, UnknownSplitError, UnknownTaskError
from env_adapters.household import HouseholdEnv, HouseholdExpert, expert_actions
from env_adapters.household.catalog import ACCEPTS, FAMILIES, HOMES, LAMP_PLACES, OBJECTS, OPENABLE, ROOMS
from env_adapters.household.expert import next_command
from env_adapters.household.layout import LAMP, Goal, Layout
from env_adapters.household.tasks import SIZES, TASKS, build, families, parse_task_id
from env_adapters.household.world import World

# Fewest and most necessary steps of each size, as the class promises them.
NECESSARY = {"standard": (6, 15), "small": (3, 7), "tiny": (2, 4)}


def play(env, actions):
    """Play commands that must all have an effect; return the last step's result."""
    result = None
    for action in actions:
        result = env.step(f"Action: {action}")
        assert not result[4]["invalid"], action
    return result


def state(world):
    """Everything that a command can change, apart from what the agent has seen."""
    places = tuple(sorted(world.where.items()))
    marks = tuple(sorted((name, tuple(sorted(marks))) for name, marks in world.marks.items()))
    return world.room, world.place, world.held, places, tuple(sorted(world.opened)), marks, world.lit


def started(task_id):
    env = HouseholdEnv()
    env.reset(options={"task_id": task_id})
    return env


# ------------------------------------------------------------------ tasks


@pytest.mark.parametrize("size", SIZES)
def test_no_task_is_listed_twice_or_in_both_splits(size):
    contents = {}
    for split in HouseholdEnv.splits:
        for task in HouseholdEnv.tasks(split, size=size):
            content = build(task.task_id).content()
            assert content not in contents, (task.task_id, contents.get(content))
            contents[content] = task.task_id
    assert len(contents) == sum(TASKS.values())


def test_content_is_the_world_and_the_goal_and_not_the_start():
    layout = build("tiny-train-00000")
    assert replace(layout, room="elsewhere", place="bed 9").content() == layout.content()
    assert replace(layout, goal=replace(layout.goal, place="bed 9")).content() != layout.content()
    assert replace(layout, objects=layout.objects[1:]).content() != layout.content()
    assert replace(layout, lamp="bed 9").content() != layout.content()


@pytest.mark.parametrize("size", SIZES)
def test_listed_tasks(size):
    train, test = HouseholdEnv.tasks("train", size=size), HouseholdEnv.tasks("test", size=size)
    assert (len(train), len(test)) == (4200, 200)
    assert {task.split for task in train} == {"train"}
    counts = Counter(task.family for task in train)
    assert set(counts) == set(families(size))
    assert len(set(counts.values())) == 1
    for task in [*train[:12], *test[:12]]:
        assert build(task.task_id).goal.family == task.family
        assert parse_task_id(task.task_id)[0] == size


def test_listing_generates_nothing(monkeypatch):
    monkeypatch.setattr("env_adapters.household.env.build", None)
    monkeypatch.setattr("random.Random", None)
    assert HouseholdEnv.tasks("test")[17].task_id == "test-00017"


def test_standard_is_the_default_size():
    assert HouseholdEnv.tasks("test") == HouseholdEnv.tasks("test", size="standard")
    assert HouseholdEnv.tasks("train")[3].task_id == "train-00003"
    assert HouseholdEnv.tasks("train", size="tiny")[3].task_id == "tiny-train-00003"


@pytest.mark.parametrize(
    "task_id",
    [
        "train-04200",
        "test-00200",
        "tiny-test-00200",
        "train-17",
        "standard-train-00017",
        "huge-train-00001",
        "",
        "\ud800",
        "train-00017\n",
        "train-0001\u0667",
    ],
)
def test_unknown_task(task_id):
    with pytest.raises(UnknownTaskError) as caught:
        HouseholdEnv().reset(options={"task_id": task_id})
    assert repr(task_id) in str(caught.value)
    assert "'train-00000' to 'train-04199' and 'test-00000' to 'test-00199'" in str(caught.value)


def test_unknown_split_or_size():
    with pytest.raises(UnknownSplitError, match="Did you mean 'train'"):
        HouseholdEnv.tasks("trai")
    with pytest.raises(UnknownSplitError, match=r"`size` is 'smal'.*Did you mean 'small'"):
        HouseholdEnv.tasks("train", size="smal")
    with pytest.raises(UnknownSplitError, match="`size` is 'smal'"):
        HouseholdEnv(size="smal")


@pytest.mark.parametrize("size", SIZES)
def test_without_a_task_id_the_seed_draws_a_task_of_the_size(size):
    env = HouseholdEnv(size=size)
    first = [env.reset(seed=seed)[0] for seed in range(8)]
    assert [env.reset(seed=seed)[0] for seed in range(8)] == first
    assert len(set(first)) == 8
    assert env.world.layout.in_sight == (size == "tiny")
    assert len(env.world.layout.rooms) == (4 if size == "standard" else 1)
    known = {build(task.task_id).content() for task in HouseholdEnv.tasks("train", size=size)}
    assert env.world.layout.content() in known


def test_the_catalog_is_consistent():
    kinds = {kind for always, extra in ROOMS.values() for kind in always + extra}
    assert kinds >= OPENABLE | LAMP_PLACES
    assert not OPENABLE & LAMP_PLACES  # a lamp that is shut away could not be used
    assert set(HOMES) == set(OBJECTS)
    assert all(kinds <= set(OBJECTS) for kinds in ACCEPTS.values())


# ------------------------------------------------------------------ determinism

TRANSCRIPT = """
import hashlib
from env_adapters.household import HouseholdEnv, expert_actions
env, digest = HouseholdEnv(), hashlib.sha256()
for size in ("standard", "small", "tiny"):
    for split in ("train", "test"):
        for task in HouseholdEnv.tasks(split, size=size)[:30]:
            observation, _ = env.reset(options={"task_id": task.task_id})
            digest.update(observation.encode())
            for action in expert_actions(env, explore=True):
                digest.update("|".join([*env.admissible_actions(), env.step("Action: " + action)[0]]).encode())
print(digest.hexdigest())
"""


def test_the_same_in_every_process():
    outputs = set()
    for seed in ("0", "1", "12345"):
        environ = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", TRANSCRIPT], capture_output=True, text=True, check=True, env=environ
        )
        outputs.add(done.stdout.strip())
    # Also pinned: a task id must mean the same task in every Python version and in every release.
    assert outputs == {"67cc1955c84061b3edbd9f0a648ff014971b8f8d86a63aba6a414a540ac19738"}


# ------------------------------------------------------------------ the expert


@pytest.mark.parametrize("size", SIZES)
def test_the_expert_solves_tasks_in_the_promised_number_of_steps(size):
    env = HouseholdEnv()
    fewest, most = NECESSARY[size]
    for split in HouseholdEnv.splits:
        for task in HouseholdEnv.tasks(split, size=size)[:120]:
            env.reset(options={"task_id": task.task_id})
            actions = expert_actions(env)
            assert fewest <= len(actions) <= most, task
            assert env.world.score == 0.0  # planning leaves the episode as it is
            _, reward, terminated, truncated, info = play(env, actions)
            assert (reward, terminated, truncated, info["success"], info["score"]) == (1.0, True, False, True, 1.0)
            assert expert_actions(env) == []


def shortest(world, limit):
    """Length of the shortest solution by breadth-first search, or `None` above the limit."""
    layer, known = [world], {state(world)}
    for depth in range(1, limit + 1):
        following = []
        for current in layer:
            for command in current.admissible():
                successor = current.copy()
                successor.act(command)
                if successor.done:
                    return depth
                if state(successor) not in known:
                    known.add(state(successor))
                    following.append(successor)
        layer = following
    return None


@pytest.mark.parametrize("index", range(20))
def test_tiny_tasks_cannot_be_solved_faster(index):
    env = started(f"tiny-test-{index:05d}")
    assert shortest(env.world, 4) == len(expert_actions(env))


@pytest.mark.parametrize("index", range(6))
def test_small_and_standard_tasks_cannot_be_solved_in_fewer_steps_than_promised(index):
    assert shortest(started(f"small-test-{index:05d}").world, 2) is None
    assert shortest(started(f"test-{index:05d}").world, 5) is None


@pytest.mark.parametrize("explore", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_expert_continues_from_any_state(size, explore):
    rng = random.Random(f"{size} {explore}")
    env = HouseholdEnv()
    expert = HouseholdExpert(env, explore=explore)
    for task in HouseholdEnv.tasks("train", size=size)[:60]:
        env.reset(options={"task_id": task.task_id})
        done, turns = False, 0
        while not done:
            # 45% noise at first, none after 60 turns, from wherever that has led
            noisy = turns < 60 and rng.random() < 0.45
            action = rng.choice(env.admissible_actions()) if noisy else expert.next_action()
            _, _, done, _, info = env.step(f"Action: {action}")
            assert not info["invalid"], (task, action)
            turns += 1
            assert turns < 120, task
        assert info["success"]


@pytest.mark.parametrize("size", SIZES)
def test_the_exploring_expert_only_uses_what_was_seen(size):
    env = HouseholdEnv()
    for task in HouseholdEnv.tasks("train", size=size)[:120]:
        told, _ = env.reset(options={"task_id": task.task_id})
        for action in expert_actions(env, explore=True):
            if action.startswith("take"):
                name = action.removeprefix("take ").partition(" from ")[0]
                assert name in told, (task, action)
            if action.startswith("use"):
                assert LAMP in told.replace(f"under the {LAMP}", ""), (task, action)
            told += env.step(f"Action: {action}")[0]
        assert env.world.done


def test_the_expert_needs_an_episode():
    with pytest.raises(EpisodeStateError, match="call `reset` first"):
        HouseholdExpert(HouseholdEnv()).next_action()


# ------------------------------------------------------------------ the rules


def every_command(world):
    """All commands over the names of a world, and some that no world knows."""
    places, rooms = [*world.room_of, "attic 9"], [*world.places_in, "attic"]
    names = [*(name for name, _ in world.layout.objects), LAMP, "unicorn 1"]
    yield from (
        "look",
        "inventory",
        "dance",
        "go",
        "take",
        "put",
        "look around",
        "inventory 1",
        "go to",
        "go at bed 1",
    )
    for place in [*places, *rooms]:
        yield f"go to {place}"
    for place in [*places, *names]:
        yield from (f"open {place}", f"close {place}", f"use {place}")
    for name in names:
        for place in places:
            yield f"take {name} from {place}"
            yield f"put {name} in/on {place}"
            yield from (f"{verb} {name} with {place}" for verb in ACCEPTS)


def test_admissible_actions_are_exactly_those_with_an_effect():
    rng = random.Random(0)
    tried = set()
    for task_id in ("train-00001", "train-00010", "small-train-00002", "small-train-00003", "small-train-00004"):
        world = started(task_id).world
        for _ in range(30):
            admissible = world.admissible()
            assert len(admissible) == len(set(admissible))
            effective = set()
            for command in every_command(world):
                attempt = world.copy()
                if attempt.act(command) is None:
                    assert state(attempt) == state(world), command
                else:
                    effective.add(command)
                    assert state(attempt) != state(world) or command in ("look", "inventory"), command
            assert effective == set(admissible)
            tried |= {command.partition(" ")[0] for command in admissible}
            # Half expert, half chance: states deep in a task and states beside it.
            world.act(rng.choice(admissible) if world.done or rng.random() < 0.5 else next_command(world))
    assert tried == {"go", "open", "close", "take", "put", "use", "clean", "heat", "cool", "look", "inventory"}


def kitchen(goal, objects, *, lamp="table 1", place=None):
    """A hand-made world."""
    rooms = (("kitchen", ("cabinet 1", "fridge 1", "microwave 1", "sink 1", "table 1")), ("bedroom", ("bed 1",)))
    return World(Layout(rooms, tuple(sorted(objects.items())), lamp, "kitchen", place, goal))


def test_observations():
    world = kitchen(Goal("heat", "egg", "bed 1"), {"egg 1": "cabinet 1", "mug 1": "table 1"})
    for command, answer in [
        ("look", "You are in the kitchen. You see a cabinet 1, a fridge 1, a microwave 1, a sink 1, a table 1."),
        ("inventory", "You carry nothing."),
        ("go to table 1", "On the table 1, you see a mug 1, a lamp 1."),
        ("use lamp 1", "You turn on the lamp 1."),
        ("use lamp 1", "You turn off the lamp 1."),
        ("go to cabinet 1", "The cabinet 1 is closed."),
        ("open cabinet 1", "You open the cabinet 1. In the cabinet 1, you see an egg 1."),
        ("take egg 1 from cabinet 1", "You take the egg 1 from the cabinet 1."),
        ("look", "In the cabinet 1, you see nothing."),
        ("close cabinet 1", "You close the cabinet 1."),
        ("go to fridge 1", "The fridge 1 is closed."),
        ("cool egg 1 with fridge 1", "You cool the egg 1 with the fridge 1."),
        ("inventory", "You carry an egg 1 (cool)."),
        ("go to microwave 1", "The microwave 1 is closed."),
        ("heat egg 1 with microwave 1", "You heat the egg 1 with the microwave 1."),
        ("go to sink 1", "In the sink 1, you see nothing."),
        ("clean egg 1 with sink 1", "You clean the egg 1 with the sink 1."),
        ("inventory", "You carry an egg 1 (clean, hot)."),
        ("go to bedroom", "You are in the bedroom. You see a bed 1."),
        ("go to bed 1", "On the bed 1, you see nothing."),
        ("put egg 1 on bed 1", "You put the egg 1 on the bed 1."),
    ]:
        assert world.act(command) == answer, command
    assert world.done


def test_cooling_undoes_heating():
    world = kitchen(Goal("heat", "egg", "table 1"), {"egg 1": "sink 1"})
    for command in ["go to sink 1", "take egg 1 from sink 1", "go to microwave 1", "heat egg 1 with microwave 1"]:
        assert world.act(command)
    assert world.act("heat egg 1 with microwave 1") is None  # hot already
    for command in ["go to fridge 1", "cool egg 1 with fridge 1", "go to table 1", "put egg 1 in/on table 1"]:
        assert world.act(command)
    assert not world.done


@pytest.mark.parametrize(
    ("goal", "sentence"),
    [
        (Goal("pick", "apple", "table 1"), "put an apple on the table 1"),
        (Goal("clean", "apple", "cabinet 1"), "put a clean apple in the cabinet 1"),
        (Goal("heat", "mug", "bed 1"), "put a hot mug on the bed 1"),
        (Goal("cool", "egg", "sink 1"), "put a cool egg in the sink 1"),
        (Goal("pick2", "pen", "box 1", 2), "put two pens in the box 1"),
        (Goal("look", "apple", "desk 1"), "look at an apple under the lamp 1"),
    ],
)
def test_goal_in_words(goal, sentence):
    assert goal.sentence() == sentence


def test_scores_follow_the_subgoals_and_never_fall():
    world = kitchen(Goal("pick2", "mug", "sink 1", 2), {"mug 1": "table 1", "mug 2": "table 1", "egg 1": "sink 1"})
    scores = []
    for command in [
        "go to table 1",
        "take mug 1 from table 1",
        "put mug 1 in/on table 1",
        "take mug 1 from table 1",
        "go to sink 1",
        "put mug 1 in/on sink 1",
        "take mug 1 from sink 1",
        "put mug 1 in/on sink 1",
        "go to table 1",
        "take mug 2 from table 1",
        "go to sink 1",
        "put mug 2 in/on sink 1",
    ]:
        assert world.act(command), command
        scores.append(world.score)
    assert scores == [0, 0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.75, 0.75, 1.0]


def test_a_state_is_a_subgoal():
    world = kitchen(Goal("clean", "mug", "table 1"), {"mug 1": "sink 1"}, place="sink 1")
    scores = []
    for command in ["take mug 1 from sink 1", "clean mug 1 with sink 1", "go to table 1", "put mug 1 in/on table 1"]:
        assert world.act(command)
        scores.append(world.score)
    assert scores == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1])


def test_a_dirty_mug_is_not_a_clean_one():
    world = kitchen(Goal("clean", "mug", "table 1"), {"mug 1": "sink 1"}, place="sink 1")
    for command in ["take mug 1 from sink 1", "go to table 1", "put mug 1 in/on table 1"]:
        assert world.act(command)
    assert not world.done


@pytest.mark.parametrize("lit_first", [False, True])
def test_looking_needs_the_object_and_the_light_together(lit_first):
    world = kitchen(Goal("look", "key", "table 1"), {"key 1": "sink 1"})
    if lit_first:
        assert world.act("go to table 1")
        assert world.act("use lamp 1")
        assert world.score == 0.0
    for command in ["go to sink 1", "take key 1 from sink 1", "go to table 1"]:
        assert world.act(command)
    assert world.done == lit_first
    assert lit_first or (world.act("use lamp 1") and world.done)


def test_an_object_in_hand_at_the_start_is_no_progress():
    env = HouseholdEnv()
    for task in HouseholdEnv.tasks("train", size="tiny")[:40]:
        observation, info = env.reset(options={"task_id": task.task_id})
        assert info["score"] == env.step("Action: look")[4]["score"] == 0.0
        assert ("You carry" in observation) == (env.world.held is not None)


def test_a_copy_shares_nothing_that_changes():
    world = kitchen(Goal("heat", "egg", "bed 1"), {"egg 1": "cabinet 1", "mug 1": "table 1"})
    before = state(world), list(world.contents["cabinet 1"]), set(world.seen)
    copy = world.copy()
    for command in ["go to cabinet 1", "open cabinet 1", "take egg 1 from cabinet 1", "go to microwave 1"]:
        assert copy.act(command)
    assert copy.act("heat egg 1 with microwave 1")
    assert (state(world), world.contents["cabinet 1"], world.seen) == before
    assert world.best == 0


# ------------------------------------------------------------------ the environment


@pytest.mark.parametrize(
    ("task_id", "pattern"),
    [
        (
            "train-00002",
            r"The house has: kitchen \(.*\), bedroom \(.*\), bathroom \(.*\), lounge \(.*\)\. You are in the \w+\. "
            r"Your task is to: put a clean \w+ (in|on) the \w+ \d\.",
        ),
        (
            "small-train-00005",
            r"You are in the kitchen\. You see: (\w+ \d(, )?){6}\. You are at the (\w+ \d)\. "
            r"(In|On) the \3, you see .*\. Your task is to: put two \w+s (in|on) the \w+ \d\.",
        ),
        (
            "tiny-train-00000",
            r"You see: (\w+ \d \([\w ,]+\)(, )?){4}\. .*Your task is to: put an? \w+ (in|on) the \w+ \d\.",
        ),
    ],
)
def test_first_observation(task_id, pattern):
    observation, _ = HouseholdEnv().reset(options={"task_id": task_id})
    assert re.fullmatch(pattern, observation)
    assert len(observation.split()) <= 65


def test_replies_are_read_leniently_in_case_and_blanks_only():
    env = started("train-00000")
    room = next(room for room in env.world.places_in if room != env.world.room)
    assert env.step(f"Action: go to {room}.")[4]["invalid"]
    observation, reward, terminated, _, info = env.step("Action: fly")
    assert (observation, reward, terminated) == ("Nothing happens.", 0.0, False)
    assert info == {"success": False, "score": 0.0, "action": "fly", "invalid": True}
    assert not env.step(f"Thought: off I go.\nAction:  GO  to {room.upper()}")[4]["invalid"]


def test_admissible_actions_in_info_are_computed_only_when_asked_for(monkeypatch):
    env = HouseholdEnv()
    _, info = env.reset(options={"task_id": "train-00000", "admissible_actions": True})
    assert info["admissible_actions"] == env.world.admissible()
    monkeypatch.setattr(World, "admissible", None)
    env.reset(options={"task_id": "train-00000"})
    env.step("Action: look")


def test_standing_instruction_is_short():
    assert len(HouseholdEnv.instruction.split()) <= 60
    assert "Action: ..." in HouseholdEnv.instruction
    assert [message["role"] for message in HouseholdEnv.standing_messages()] == ["user", "assistant"]


def test_random_play_never_raises():
    rng = random.Random(0)
    env = HouseholdEnv()
    steps = 0
    while steps < 2000:
        size = rng.choice(SIZES)
        env.reset(options={"task_id": rng.choice(HouseholdEnv.tasks("train", size=size)).task_id})
        vocabulary = list(every_command(env.world))
        score = 0.0
        for _ in range(50):
            steps += 1
            good = rng.random() < 0.7
            action = rng.choice(env.admissible_actions() if good else vocabulary)
            observation, _, done, _, info = env.step(f"Action: {action}")
            assert observation
            assert score <= info["score"] <= 1.0
            assert not (good and info["invalid"])
            score = info["score"]
            if done:
                break


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("index", range(len(FAMILIES)))
def test_contract(size, index):
    task = HouseholdEnv.tasks("test", size=size)[index]
    replies = [f"Action: {action}" for action in expert_actions(started(task.task_id))]
    check_env(HouseholdEnv(size=size), task.task_id, replies=replies)
