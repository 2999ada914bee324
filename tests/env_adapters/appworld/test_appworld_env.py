"""AppWorld played with its real engine: observations, scoring, isolation of worlds, processes and their end."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from env_adapters.checker import check_env
from env_adapters.errors import EnvAdapterError, EpisodeStateError, UnknownTaskError
from env_adapters.isolated import WorkerEndedError

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")]


def play(env, task_id, codes, reply):
    """Play pieces of code; return what the last one gave."""
    env.reset(options={"task_id": task_id})
    for code in codes:
        last = env.step(reply(code))
        if last[2]:
            break
    return last


@pytest.mark.parametrize("task_id", ["aaaa001_1", "aaaa001_2", "aaaa002_1", "aaaa003_1", "aaaa004_1"])
def test_the_oracle_scores_one(world, reply, solution, task_id):
    env = world()
    _, reward, terminated, truncated, info = play(env, task_id, solution[task_id], reply)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["score"], info["success"], info["invalid"]) == (1.0, True, False)
    assert env.report["passed"] == env.report["total"] >= 2
    assert env.report["failures"] == []


@pytest.mark.parametrize(
    ("task_id", "codes", "unmet"),
    [
        ("aaaa001_1", ["apis.supervisor.complete_task(answer=5)"], ["the answer is right"]),
        ("aaaa001_1", ["apis.supervisor.complete_task(status='fail')"], ["the answer is right"]),
        (
            "aaaa003_1",
            ["apis.supervisor.complete_task()"],
            ["nothing else has changed", "one note is new and reads as asked"],
        ),
    ],
)
def test_a_wrong_end_scores_zero(world, reply, task_id, codes, unmet):
    env = world()
    _, reward, terminated, _, info = play(env, task_id, codes, reply)
    assert (reward, terminated, info["score"], info["success"]) == (0.0, True, 0.0, False)
    assert env.report["failures"] == unmet


def test_a_note_that_reads_otherwise_scores_zero(world, reply, solution):
    codes = [code.replace("'jam'", "'ham'") for code in solution["aaaa003_1"]]
    env = world()
    assert play(env, "aaaa003_1", codes, reply)[1] == 0.0
    assert (env.report["passed"], env.report["total"]) == (2, 3)


def test_the_contract(world, reply, solution):
    check_env(world(), task_id="aaaa001_1", replies=[reply(code) for code in solution["aaaa001_1"]])


def test_observations(world, reply):
    env = world(max_output_chars=50)
    first, info = env.reset(options={"task_id": "aaaa001_1"})
    assert first == "Task: How many lines has my note 'Shopping' in Simple Note?"
    assert info == {"success": False, "score": 0.0, "action": "", "invalid": False}

    def see(text):
        observation, reward, terminated, _, info = env.step(text)
        assert not reward
        assert not terminated
        return observation, info["invalid"]

    assert see(reply("x = 6\nprint(x * 7)")) == ("Output:\n```\n42\n```", False)
    assert see(reply("print(x)")) == ("Output:\n```\n6\n```", False)  # variables live on
    assert see(reply("x = 7")) == ("Output:\n```\nExecution successful.\n```", False)
    # One chunk of code a step: the last one.
    assert see(reply("print(1)") + "\nor\n" + reply("print(2)"))[0] == "Output:\n```\n2\n```"
    assert see("No code here.") == (env.protocol.no_action_observation, True)
    assert see("```python\nprint(3)") == (env.protocol.no_action_observation, True)
    cut, invalid = see(reply("print('y' * 1000)"))
    assert not invalid
    assert cut == f"Output:\n```\n{'y' * 50}\n[The output was cut: 50 of 1001 characters are shown. Print less.]\n```"
    for code, word in {"1 / 0": "ZeroDivision", "x = = 2": "Syntax error", "apis.nowhere.go()": "nowhere"}.items():
        env._max_output_chars = 1000
        observation, invalid = see(reply(code))
        assert invalid
        assert observation.startswith("Output:\n```\nExecution failed. Traceback:")
        assert word in observation


def test_the_same_actions_give_the_same_observations_whatever_was_played_before(world, reply, solution):
    codes = ["import random\nprint(random.random(), hash('x'))", "print({'b', 'a', 'c'})", *solution["aaaa001_2"]]

    def transcript(env):
        env.reset(options={"task_id": "aaaa001_2"})
        return [env.step(reply(code)) for code in codes]

    first = world()
    before = transcript(first)
    play(first, "aaaa003_1", ["import random, json\nrandom.seed(1)\njson.dumps = len\nx = 1"], reply)
    assert transcript(first) == before
    assert transcript(world()) == before


def test_two_worlds_at_once_do_not_mix(world, reply, solution):
    first, second = world(), world()
    first.reset(options={"task_id": "aaaa003_1"})
    second.reset(options={"task_id": "aaaa004_1"})
    third = world()
    third.reset(options={"task_id": "aaaa003_1"})
    for one, other in zip(solution["aaaa003_1"], solution["aaaa004_1"], strict=True):
        mine, theirs = first.step(reply(one)), second.step(reply(other))
    wrong = third.step(reply("apis.supervisor.complete_task()"))
    assert (mine[1], theirs[1], wrong[1]) == (1.0, 1.0, 0.0)


def test_many_worlds_in_threads(world, reply, solution):
    ids = ["aaaa001_1", "aaaa001_2", "aaaa003_1", "aaaa004_1"]
    rewards = {}

    def run(number):
        task_id = ids[number % 4]
        codes = solution[task_id] if number < 4 else ["x = 1", "apis.supervisor.complete_task(answer='no')"]
        rewards[number] = play(environments[number], task_id, codes, reply)[1]

    environments = [world() for _ in range(8)]
    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert rewards == {number: float(number < 4) for number in range(8)}


def test_a_task_is_drawn_with_the_seed(world):
    env = world()
    observations = {env.reset(seed=seed)[0] for seed in range(6)}
    assert len(observations) == 2  # both training tasks
    assert env.reset(seed=0)[0] == env.reset(seed=0)[0]
    with pytest.raises(UnknownTaskError, match="'aaaa001_9'.*Did you mean 'aaaa001"):
        env.reset(options={"task_id": "aaaa001_9"})


def test_processes_end_with_their_episode(world, reply, assert_ends, warm):
    threads = threading.active_count()  # other tests' servers and pools keep theirs
    env = world()
    env.reset(options={"task_id": "aaaa001_1"})
    pid, folder = env.player_pid, env._episode._folder
    assert folder.is_dir()
    env.reset(options={"task_id": "aaaa001_1"})
    assert_ends(pid)
    assert not folder.exists()
    pid, folder = env.player_pid, env._episode._folder
    env.step(reply("apis.supervisor.complete_task()"))
    assert_ends(pid)
    assert not folder.exists()
    env.reset(options={"task_id": "aaaa001_1"})
    pid = env.player_pid
    env.close()
    env.close()
    assert_ends(pid)
    with pytest.raises(EpisodeStateError):
        env.reset()
    assert warm.pid is not None  # still used by others
    assert threading.active_count() <= threads


def test_kill_wakes_a_step_that_hangs(world, reply, assert_ends):
    env = world()
    env.reset(options={"task_id": "aaaa001_1"})
    pid = env.player_pid
    threading.Timer(0.5, env.kill).start()
    began = time.monotonic()
    with pytest.raises(WorkerEndedError, match="was stopped"):
        env.step(reply("while True: pass"))
    assert time.monotonic() - began < 10
    assert_ends(pid)


def test_a_player_killed_from_outside_is_a_failure_not_a_wrong_answer(world, reply):
    env = world()
    env.reset(options={"task_id": "aaaa001_1"})
    threading.Timer(0.5, lambda: os.kill(env.player_pid, 9)).start()
    with pytest.raises(WorkerEndedError, match="exit code -9"):
        env.step(reply("while True: pass"))
    with pytest.raises(EpisodeStateError):
        env.step(reply("x = 1"))
    env.reset(options={"task_id": "aaaa001_1"})  # and a new one takes over
    assert "1" in env.step(reply("print(1)"))[0]


def test_a_scorer_that_fails_is_a_failure(world, reply, monkeypatch):
    env = world()
    env.reset(options={"task_id": "aaaa001_1"})
    monkeypatch.setattr("env_adapters.appworld.engine.lay_out_for_scoring", lambda root, play, folder: folder.mkdir())
    with pytest.raises(EnvAdapterError, match="The AppWorld scorer: `score` raised"):
        env.step(reply("apis.supervisor.complete_task()"))
    with pytest.raises(EpisodeStateError):
        env.step(reply("x = 1"))


def test_nothing_is_left_when_the_trainer_is_killed(appworld_root, warm, assert_ends):
    code = (
        "import os, threading, time, warnings\n"
        "warnings.simplefilter('ignore')\n"
        "from env_adapters import make\n"
        f"env = make('appworld', root={str(appworld_root)!r})\n"
        "env.reset(options={'task_id': 'aaaa001_1'})\n"
        "step = lambda: env.step('```python\\nwhile True:\\n  try:\\n    while True: pass\\n  except: pass\\n```')\n"
        "threading.Thread(target=step, daemon=True).start()\n"
        "time.sleep(1)\n"
        "print(env._engine.pid, env.player_pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).parents[3]
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    for pid in pids:
        assert_ends(pid)


def test_memory_stays_flat_over_a_hundred_episodes(world, warm):
    env = world()

    def resident(pid):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    env.reset(options={"task_id": "aaaa001_1"})
    player, parent = resident(env.player_pid), resident(warm.pid)
    for _ in range(100):
        env.reset(options={"task_id": "aaaa001_2"})
    assert resident(env.player_pid) < player + 5
    assert resident(warm.pid) < parent + 5
    assert len(os.listdir("/proc/self/fd")) < 100
