"""ScienceWorld: its task pool, its Java processes and their end, the real simulator played through the contract."""

import hashlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_adapters.errors import (
    EnvAdapterError,
    EpisodeStateError,
    MissingDependencyError,
    UnknownSplitError,
    UnknownTaskError,
)
from env_adapters.scienceworld import ScienceWorldEnv, gold_actions, jvm
from env_adapters.scienceworld.env import SIMPLIFICATIONS
from env_adapters.scienceworld.jvm import GOLD_HEAP_MB, Simulator
from env_adapters.scienceworld.splits import TASK_TYPES, draw_split, find_entry

ROOT = Path(__file__).parents[2]


def _missing() -> str:
    try:
        ScienceWorldEnv.check_requirements()
    except MissingDependencyError as error:
        return str(error)
    return ""


MISSING = _missing()


def needs_jvm(test):
    return pytest.mark.jvm(pytest.mark.skipif(bool(MISSING), reason=MISSING)(test))


def id_of(task_type: str, variation: int = 0) -> str:
    return next(e.task_id for e in draw_split("all") if (e.task_type, e.variation) == (task_type, variation))


def act(env: ScienceWorldEnv, action: str):
    return env.step(f"Thought: I see. Action: {action}")


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    if Path("/proc/self/stat").exists():  # where an orphan may stay a zombie until somebody collects it
        try:
            return stat.read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def assert_ends(pid: int, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"the Java process {pid} is still there"
        time.sleep(0.05)


# ------------------------------------------------------------------------------------------- the pool, without Java


def test_splits_have_the_sizes_of_the_paper_and_share_no_task():
    train, test, pool = (ScienceWorldEnv.tasks(split) for split in ("train", "test", "all"))
    assert (len(train), len(test), len(pool)) == (2_120, 200, 4_639)
    families = [{task.family for task in tasks} for tasks in (train, test, pool)]
    assert [len(names) for names in families] == [22, 12, 23]
    assert families[1] < families[0] < families[2]
    train_ids, test_ids, pool_ids = ({task.task_id for task in tasks} for tasks in (train, test, pool))
    assert not train_ids & test_ids
    assert train_ids | test_ids < pool_ids
    assert {task.split for task in train} == {"train"}
    with pytest.raises(UnknownSplitError, match="'dev'"):
        ScienceWorldEnv.tasks("dev")


def test_splits_never_change():
    digests = {
        split: hashlib.sha256(" ".join(task.task_id for task in ScienceWorldEnv.tasks(split)).encode()).hexdigest()[
            :16
        ]
        for split in ("train", "test")
    }
    assert digests == {"train": "8761d3f7bdab7e8e", "test": "5c138cc52822ae0c"}


def test_shares_follow_the_sizes_of_the_task_types():
    train = [task.family for task in ScienceWorldEnv.tasks("train")]
    left_out = min(TASK_TYPES, key=lambda name: (name in train, TASK_TYPES[name]))
    assert left_out == "identify-life-stages-1"
    trainable = sum(TASK_TYPES.values()) - TASK_TYPES[left_out]
    for name in set(train):
        assert abs(train.count(name) - 2_120 * TASK_TYPES[name] / trainable) < 1


def test_running_ids():
    assert find_entry("sciworld_0") == find_entry("0")
    assert (find_entry("30").task_type, find_entry("30").variation) == ("melt", 0)
    last = find_entry("sciworld_4638")
    assert (last.task_type, last.variation) == ("identify-life-stages-2", 9)
    assert [entry.index for entry in draw_split("all")] == list(range(4_639))


@pytest.mark.parametrize("task_id", ["sciworld_4639", "-1", "17.0", "", "sciworld_", "alfworld_17", "٣", "9" * 5000])
def test_unknown_task_ids(task_id):
    with pytest.raises(UnknownTaskError, match="'sciworld_0' to 'sciworld_4638'") as caught:
        ScienceWorldEnv.check_task_id(task_id)
    assert repr(task_id) in str(caught.value)


def test_listing_tasks_imports_no_simulator():
    code = (
        "import sys; from env_adapters.scienceworld import ScienceWorldEnv as E; E(); E.tasks('train');"
        "bad = {'scienceworld', 'py4j', 'torch', 'transformers', 'trl'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# ------------------------------------------------------------------------------------------------- what is missing


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    """A machine on which `java` is what the test writes to the returned path, or nothing."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(jvm, "check_packages", lambda: None)
    monkeypatch.setattr("env_adapters.scienceworld.env.check_packages", lambda: None)
    monkeypatch.setattr(subprocess, "Popen", _refuse_java(subprocess.Popen))
    return tmp_path / "java"


def _refuse_java(popen):
    class Refusing(popen):
        def __init__(self, args, **kwargs):
            assert "py4j.GatewayServer" not in args, "a Java process was started"
            super().__init__(args, **kwargs)

    return Refusing


def test_missing_java(no_java):
    with pytest.raises(MissingDependencyError, match="no `java` was found.*apt-get install default-jre.*conda"):
        ScienceWorldEnv.check_requirements()
    with pytest.raises(MissingDependencyError, match="no `java`"):
        ScienceWorldEnv().reset(options={"task_id": "0"})
    with pytest.raises(MissingDependencyError, match="no `java`"):
        gold_actions("0")


@pytest.mark.skipif(os.name == "nt", reason="writes a shell script")
@pytest.mark.parametrize(
    ("says", "message"),
    [
        ('openjdk version "1.7.0_80"', "is version 7"),
        ("Unable to locate a Java Runtime.", "is not a working Java runtime"),
        ('java version "1.8.0_392"', None),
        ('openjdk version "21-ea" 2023-09-19', None),
    ],
)
def test_version_of_java(no_java, says, message):
    no_java.write_text(f"#!/bin/sh\necho '{says}' >&2\n")
    no_java.chmod(0o755)
    jvm._java_version.cache_clear()
    if message is None:
        assert jvm.find_java() == str(no_java)
    else:
        with pytest.raises(MissingDependencyError, match=f"{message}.*apt-get install"):
            jvm.find_java()


@pytest.mark.parametrize("package", ["scienceworld", "py4j"])
def test_missing_package(monkeypatch, package):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    monkeypatch.setattr(jvm, "find_java", lambda: "java")
    for call in (ScienceWorldEnv.check_requirements, lambda: ScienceWorldEnv().reset(options={"task_id": "0"})):
        with pytest.raises(MissingDependencyError, match=rf"`{package}`.*pip install cope_trl\[scienceworld\]"):
            call()


def test_simplifications_are_checked_before_anything_starts():
    with pytest.raises(EnvAdapterError, match="'openDoor' is none of.*Did you mean 'openDoors'"):
        ScienceWorldEnv("easy,openDoor")
    env = ScienceWorldEnv("noElectricalAction")
    with pytest.raises(EnvAdapterError, match="cannot be solved without electrical actions"):
        env.reset(options={"task_id": id_of("power-component")})
    assert env.java_pid is None


# ------------------------------------------------------------------------------------------------ the real simulator


@pytest.fixture(scope="module")
def env():
    env = ScienceWorldEnv()
    yield env
    env.close()


@pytest.fixture(scope="module")
def oracle():
    """A simulator of its own with a heap large enough for gold paths."""
    simulator = Simulator(GOLD_HEAP_MB)
    simulator.connect()
    yield simulator
    simulator.stop()


def gold_path(oracle: Simulator, task_id: str) -> list[str]:
    entry = find_entry(task_id)
    oracle.load(entry.task_type, entry.variation, "", gold=True)
    return oracle.gold_actions()


def play(env: ScienceWorldEnv, task_id: str, actions: list[str]) -> Iterator[tuple]:
    """Transcript of an episode, one entry a turn, as a generator: the caller may play others in between."""
    yield env.reset(options={"task_id": task_id})
    for action in actions:
        yield (result := act(env, action))
        if result[2]:
            return


@needs_jvm
@pytest.mark.parametrize(
    ("task_type", "variation"),
    [
        ("find-living-thing", 150),
        ("find-animal", 150),
        ("find-non-living-thing", 7),
        ("lifespan-longest-lived", 62),
        ("chemistry-mix-paint-secondary-color", 18),
        ("power-component", 10),
        ("use-thermometer", 270),
    ],
)
def test_gold_paths_succeed(env, oracle, task_type, variation):
    task_id = id_of(task_type, variation)
    path = gold_path(oracle, task_id)
    (first, info), *turns = play(env, task_id, path)
    assert first.startswith("Your task is to ")
    assert "\nThis " in first  # the first look around
    assert (info["success"], info["score"], info["invalid"]) == (False, 0.0, False)
    _, reward, terminated, truncated, info = turns[-1]
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["success"], info["score"], info["action"]) == (True, 100.0, path[len(turns) - 1])
    for _, reward, terminated, _, info in turns[:-1]:
        assert (reward, terminated, info["success"], info["invalid"]) == (0.0, False, False, False)
        assert 0.0 <= info["score"] < 100.0
    with pytest.raises(EpisodeStateError):
        act(env, "look around")


@needs_jvm
def test_gold_actions_is_the_same_path(oracle):
    task_id = id_of("lifespan-longest-lived", 62)
    assert gold_actions(task_id) == gold_path(oracle, task_id)


@needs_jvm
def test_a_negative_score_ends_the_episode_as_a_failure(env):
    env.reset(options={"task_id": id_of("find-living-thing")})
    _, reward, terminated, truncated, info = act(env, "focus on air")
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["success"], info["score"], info["invalid"]) == (False, -100.0, False)


@needs_jvm
def test_text_the_simulator_cannot_read_is_invalid(env):
    _, info = env.reset(options={"task_id": id_of("find-living-thing"), "admissible_actions": True})
    assert {"look around", "inventory"} <= set(info["admissible_actions"])
    assert len(set(info["admissible_actions"])) == len(info["admissible_actions"]) > 50
    observation, reward, terminated, _, info = act(env, "fly to the moon")
    assert "No known action matches that input" in observation
    assert (reward, terminated, info["invalid"], info["action"]) == (0.0, False, True, "fly to the moon")
    assert env.step("")[4]["invalid"] is True
    assert act(env, "inventory")[4]["invalid"] is False


@needs_jvm
def test_a_number_answers_an_ambiguous_action(env):
    env.reset(options={"task_id": id_of("find-living-thing")})
    question, _, _, _, info = act(env, "open door")
    assert question.startswith("Ambiguous request: Please enter the number")
    assert info["invalid"] is False
    observation, _, _, _, info = act(env, "0")
    assert (observation, info["invalid"], info["action"]) == ("The door is now open.", False, "0")
    assert act(env, "0")[4]["invalid"] is True  # nothing was asked this time
    act(env, "open door")
    observation, _, _, _, info = act(env, "look around")  # cancels the choice, and is not executed
    assert observation.startswith("Unknown action.")
    assert info["invalid"] is True
    assert act(env, "look around")[0].startswith("This ")


@needs_jvm
def test_interleaved_episodes_are_those_played_alone(env):
    """Also across processes and after other episodes: the second environment's process starts with this task."""
    wander = ["open door", "1", "look around", "wait", "inventory", "wait1", "open door", "0", "look around"]
    first, second = id_of("use-thermometer", 3), id_of("find-animal", 30)
    alone = [list(play(env, first, wander)), list(play(env, second, wander))]
    other = ScienceWorldEnv()
    pid = None
    try:
        turns = zip(play(other, first, wander), play(env, second, wander), strict=True)
        together = [list(transcript) for transcript in zip(*turns, strict=True)]
        pid = other.java_pid
        assert together == alone
        assert pid is not None
        assert pid != env.java_pid
    finally:
        other.close()
    assert_ends(pid)
    assert other.java_pid is None


@needs_jvm
def test_the_seed_draws_the_task_and_nothing_else(env):
    named = [env.reset(seed=seed, options={"task_id": id_of("find-animal", 30)})[0] for seed in (None, 0, 1)]
    assert len(set(named)) == 1
    drawn = [env.reset(seed=seed)[0] for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]


@needs_jvm
def test_the_task_table_is_the_simulators(oracle):
    package = importlib.util.find_spec("scienceworld").submodule_search_locations[0]
    listed = json.loads(Path(package, "tasks.json").read_text(encoding="utf-8"))
    left_out = {"5-1", "5-2", "9-1", "9-2", "9-3", "10-1", "10-2"}
    names = [task["task_name"] for task in listed if task["task_id"] not in left_out]
    assert list(TASK_TYPES) == names
    assert {name: oracle.scienceworld.getTaskMaxVariations(name) for name in names} == TASK_TYPES
    assert {"easy", *oracle.scienceworld.getPossibleSimplifications().split(", ")} == set(SIMPLIFICATIONS)


# What the simulator's interface answers itself, what is ambiguous, unreadable or empty, the end of a tuple as text.
ODD_ACTIONS = (
    "help",
    " TASK ",
    "\x01objects\n",
    "task, please",
    "open door",
    "0",
    "open door",
    "look around",
    "fly",
    "",
    "wait1",
    "a,1.0,true)",
    "LOOK\taround",
    "\ud800",
    "focus on air",
    "look around",
    "task",
)


def through_the_interface(simulator: Simulator, action: str) -> tuple[str, float, bool]:
    """A step by the interface's own method, as the Python package makes it, without its list of valid actions."""
    interface = simulator.scienceworld
    observation = str(interface.step(action.encode("utf-8", "replace").decode("utf-8")))
    return observation, float(interface.getScore()), bool(interface.getCompleted())


@needs_jvm
@pytest.mark.parametrize("task_type", ["use-thermometer", "chemistry-mix"])
def test_steps_are_those_of_the_interface(oracle, task_type):
    path = ["look around", *gold_path(oracle, id_of(task_type))[:20]]
    actions = [action for pair in itertools.zip_longest(path, ODD_ACTIONS) for action in pair if action is not None]
    simulator = Simulator()
    try:
        simulator.connect()
        for played in (simulator, oracle):
            played.load(task_type, 0, "")
        for action in actions:
            assert simulator.step(action) == through_the_interface(oracle, action), action
    finally:
        simulator.stop()


@needs_jvm
def test_java_forgets_what_a_step_and_an_episode_returned(env):
    """What Java hands to Python stays in a table of the gateway, an old world too, until Python gives it back."""
    held = []
    for task_type in ("find-living-thing", "boil", "find-living-thing"):
        for _ in play(env, id_of(task_type), ["look around", "inventory", "open door", "0"]):
            gateway = env._simulator._gateway
            java = gateway.java_gateway_server.getGateway()
            bindings = java.getBindings()
            held.append(bindings.size())
            gateway.detach(bindings)
            gateway.detach(java)
    assert len(held) == 15
    assert len(set(held)) == 1


@needs_jvm
def test_the_contract():
    from env_adapters.checker import check_env

    check_env(ScienceWorldEnv(simplifications="easy"))


# ----------------------------------------------------------------------------------- the end of the Java processes


@needs_jvm
def test_memory(record_property):
    """At its peak, after playing task types that load the largest worlds."""
    env = ScienceWorldEnv()
    try:
        for task_type in ("boil", "use-thermometer", "power-component", "identify-life-stages-1"):
            for _ in play(env, id_of(task_type), ["look around", "open door", "0", "wait", "look around"]):
                pass
        status = Path(f"/proc/{env.java_pid}/status")
        if not status.exists():
            pytest.skip("reads /proc")
        peak = next(int(line.split()[1]) // 1024 for line in status.read_text().splitlines() if "VmHWM" in line)
    finally:
        env.close()
    record_property("java_peak_mb", peak)
    assert peak <= 150


@needs_jvm
def test_a_process_that_dies_fails_one_episode(env):
    env.reset(options={"task_id": id_of("find-living-thing")})
    dead = env.java_pid
    os.kill(dead, signal.SIGKILL)
    with pytest.raises(EnvAdapterError, match=r"ended \(exit code -9\).*the next `reset` starts a new one"):
        act(env, "look around")
    with pytest.raises(EpisodeStateError):
        act(env, "look around")
    env.reset(options={"task_id": id_of("find-living-thing")})
    assert env.java_pid not in (None, dead)
    assert act(env, "look around")[0].startswith("This ")


@needs_jvm
def test_kill_frees_a_step_that_hangs():
    env = ScienceWorldEnv()
    env.reset(options={"task_id": id_of("find-living-thing")})
    pid = env.java_pid
    os.kill(pid, signal.SIGSTOP)
    raised = []

    def step():
        try:
            act(env, "look around")
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    thread.join(timeout=1.0)
    assert thread.is_alive()
    env.kill()
    thread.join(timeout=20.0)
    assert not thread.is_alive()
    assert isinstance(raised[0], EnvAdapterError)
    assert "was stopped" in str(raised[0])
    assert_ends(pid)
    with pytest.raises(EpisodeStateError, match="closed"):
        env.reset(options={"task_id": "0"})


@needs_jvm
@pytest.mark.parametrize("end", ["exit", "SIGKILL"])
def test_no_java_process_survives_the_interpreter(end):
    code = (
        "import sys; from env_adapters.scienceworld import ScienceWorldEnv; env = ScienceWorldEnv();"
        "env.reset(options={'task_id': '0'}); print(env.java_pid, flush=True); sys.stdin.readline()"
    )
    python = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    pid = int(python.stdout.readline())
    try:
        assert is_running(pid)
        if end == "SIGKILL":
            python.kill()
            python.communicate()
        else:
            python.communicate("go on\n")
            assert python.returncode == 0
        assert_ends(pid)
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
        python.kill()


@needs_jvm
def test_an_environment_dropped_without_close_ends_its_process():
    simulator = Simulator()
    pid = simulator.process.pid
    assert is_running(pid)
    del simulator
    assert_ends(pid)
