"""What a policy's code must not be able to do; each ends with the trainer alive and the rollout scored or failed."""

import os
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")]

# How code gets at names that AppWorld's guard has replaced or refuses to see in the text.
UNGUARDED = (
    "from appworld.common.safety_guard import SafetyGuard\n"
    "import os, builtins\n"
    "real = lambda name: [c.cell_contents for c in builtins.open.__closure__][0].name_to_function[name]\n"
)
# A `for`: of an inner `while True`, Python 3.11 leaves the jump back outside of the `try`.
SWALLOW = "while True:\n    try:\n        for n in range(10**15): pass\n    except BaseException: pass"


@pytest.fixture
def playing(world):
    env = world(code_timeout=30)
    env.reset(options={"task_id": "aaaa003_1"})
    return env


@pytest.fixture
def impatient(playing, monkeypatch):
    """The same, with short limits on time."""
    monkeypatch.setattr("env_adapters.appworld.env.GRACE_SECONDS", 1)
    playing._code_timeout = 3
    playing.reset(options={"task_id": "aaaa003_1"})
    return playing


@pytest.fixture
def goes_on(playing, reply, solution):
    """The episode can still be played to its success."""

    def check():
        for code in solution["aaaa003_1"]:
            last = playing.step(reply(code))
        assert last[1] == 1.0
        assert playing.report["success"]

    return check


def is_over(env, step):
    """The episode ended with score 0, and the next one can be played."""
    observation, reward, terminated, truncated, info = step
    assert (reward, terminated, truncated) == (0.0, True, False)
    assert (info["success"], info["score"], info["invalid"]) == (False, 0.0, True)
    assert "The session is over." in observation
    env.reset(options={"task_id": "aaaa001_1"})
    assert env.step("```\nprint(6 * 7)\n```")[0] == "Output:\n```\n42\n```"


@pytest.mark.parametrize(
    "code",
    [
        "from appworld.ground_truth import GroundTruth\nprint(GroundTruth.load('aaaa003_1').private_data)",
        "from appworld.task import Task\nprint(Task.load('aaaa003_1').ground_truth.private_data)",
        "from appworld import evaluate_task\nprint(evaluate_task('aaaa003_1', 'play'))",
        "from appworld.common.utils import read_json\nprint(read_json(TRUTH + '/private_data.json'))",
        "import pathlib\nprint(pathlib.Path(TRUTH, 'private_data.json').read_text())",
        "import os\nprint(os.scandir(TRUTH))",
        "import os\nlink = os.readlink('data/base_dbs')\nprint((lambda o: o(link + '/../tasks/aaaa003_1/ground_truth/"
        "private_data.json'))(getattr(__builtins__, 'op' + 'en')).read())",
        UNGUARDED + "print(real('builtins.open')(TRUTH + '/private_data.json').read())",
        UNGUARDED + "fd = real('os.open')(TRUTH + '/private_data.json', 0)\nprint(real('os.read')(fd, 1000))",
        UNGUARDED + "print(real('os.listdir')(TRUTH))",
        UNGUARDED + "real('shutil.copytree')(TRUTH, 'mine')\nprint(real('os.listdir')('mine'))",
    ],
)
def test_ground_truth_cannot_be_read(playing, goes_on, reply, appworld_root, code):
    truth = str(appworld_root / "data/tasks/aaaa003_1/ground_truth")
    observation, _, terminated, _, info = playing.step(reply(f"TRUTH = {truth!r}\n{code}"))
    assert info["invalid"]
    assert not terminated
    assert "jam" not in observation
    goes_on()


def test_ground_truth_is_not_in_memory(playing, reply):
    """The process was forked from one that never read any."""
    code = "import appworld.ground_truth\nprint(any('ground_truth' in name for name in dir(apis)))\nprint(world)"
    assert "NameError" in playing.step(reply(code))[0]


def test_an_endless_loop_is_interrupted(impatient, goes_on, reply):
    began = time.monotonic()
    observation, _, terminated, _, info = impatient.step(reply("while True: pass"))
    assert "timed out after 3 seconds" in observation
    assert info["invalid"]
    assert not terminated
    assert time.monotonic() - began < 10
    goes_on()


@pytest.mark.parametrize("code", [SWALLOW, "print(7 ** 7 ** 8 % 10)", "import re\nre.match('(a*)*b', 'a' * 40)"])
def test_a_loop_that_cannot_be_interrupted_is_killed(impatient, reply, assert_ends, code):
    pid = impatient.player_pid
    began = time.monotonic()
    step = impatient.step(reply(code))
    assert time.monotonic() - began < 8
    if step[2]:
        assert_ends(pid)
        is_over(impatient, step)
    else:  # some of these an interruption does end, on some versions of Python
        assert step[4]["invalid"]
        assert code != SWALLOW


@pytest.mark.parametrize("code", ["raise KeyboardInterrupt", "raise SystemExit", "raise GeneratorExit", "exit()"])
def test_exceptions_that_end_programs_do_not_end_this_one(playing, goes_on, reply, code):
    _, _, terminated, _, _ = playing.step(reply(code))
    assert not terminated
    goes_on()


@pytest.mark.parametrize(
    "code",
    [
        UNGUARDED + "real('os._exit')(0)",
        "import json\njson.loads = json.dumps = None",
        "__import__('ctypes').string_at(0)",
    ],
)
def test_code_that_breaks_its_process_scores_zero(playing, reply, code):
    is_over(playing, playing.step(reply(code)))


def test_a_string_of_300_mb(playing, goes_on, reply):
    assert "314572800" in playing.step(reply("x = 'x' * (300 << 20)\nprint(len(x))"))[0]
    assert playing.step(reply("print(x)"))[0].endswith("characters are shown. Print less.]\n```")
    playing.step(reply("del x"))
    goes_on()


def test_memory_has_an_end(playing, goes_on, reply):
    observation, _, terminated, _, info = playing.step(reply("x = 'x' * (4 << 30)"))
    assert "MemoryError" in observation
    assert info["invalid"]
    assert not terminated
    grow = "x = []\ntry:\n    while True: x.append(bytearray(8 << 20))\nexcept MemoryError:\n    print(len(x) * 8)"
    taken = int(playing.step(reply(grow))[0].split("\n")[2])
    assert taken < 2048
    playing.step(reply("del x"))
    goes_on()


@pytest.mark.parametrize(
    "code", ["print('x' * (10 << 20))", "for i in range(400_000): print('a line of some length', i)"]
)
def test_ten_mb_of_output(playing, goes_on, reply, code):
    observation = playing.step(reply(code))[0]
    assert "characters are shown. Print less.]" in observation
    assert len(observation) < 10_200
    goes_on()


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        UNGUARDED + "while True: real('os.fork')()",
        UNGUARDED + "while True: real('subprocess.Popen')(['sleep', '100'])",
        UNGUARDED + "real('os.system')('sleep 100 &')",
        "import os\nos.posix_spawn('/bin/sleep', ['sleep', '100'], {})",
        "__import__('multiprocessing').get_context('fork').Process(target=print).start()",
        "f = __import__('_posixsubprocess').fork_exec\n"
        "f([b'x'], [b'/bin/true'], 1, (), None, None, *[-1] * 6, 0, 0, 0, 0, 0, *[None] * 3, -1, None, 0)",
    ],
)
def test_no_process_is_started(playing, reply, goes_on, code):
    before = set(os.listdir("/proc"))
    assert not playing.step(reply(code))[2]
    group = [
        pid for pid in set(os.listdir("/proc")) - before if pid.isdecimal() and parent_of(pid) == playing.player_pid
    ]
    assert not group
    goes_on()


def parent_of(pid):
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def test_threads_do_not_keep_the_process(playing, reply, assert_ends):
    code = "t = __import__('threading')\nfor _ in range(50): t.Thread(target=t.Event().wait).start()\nprint('started')"
    assert "started" in playing.step(reply(code))[0]
    pid = playing.player_pid
    assert playing.step(reply("apis.supervisor.complete_task()"))[2]
    assert_ends(pid)


@pytest.mark.parametrize(
    "code",
    [
        "open(OUTSIDE + '/x', 'w').write('x')",
        "import os\nos.mkdir(OUTSIDE + '/x')",
        "import os\nos.makedirs(OUTSIDE + '/x/y')",
        "import os\nos.symlink('/etc', OUTSIDE + '/x')",
        "import os\nos.link('data/tasks/aaaa003_1/specs.json', OUTSIDE + '/x')",
        "import pathlib\npathlib.Path(OUTSIDE, 'x').write_text('x')\npathlib.Path(OUTSIDE, 'x').hardlink_to('data')",
        "from appworld.common.utils import write_file\nwrite_file('x', OUTSIDE + '/x')",
        UNGUARDED + "real('builtins.open')(OUTSIDE + '/x', 'w')",
        UNGUARDED + "real('shutil.copy')('data/tasks/aaaa003_1/specs.json', OUTSIDE + '/x')",
        UNGUARDED + "real('sqlite3.connect')(OUTSIDE + '/x').execute('create table t (a)')",
    ],
)
def test_nothing_is_written_outside_its_folder(playing, goes_on, reply, tmp_path, code):
    playing.step(reply(f"OUTSIDE = {str(tmp_path)!r}\n{code}"))
    assert os.listdir(tmp_path) == []
    goes_on()


def test_the_benchmark_data_cannot_be_changed(playing, goes_on, reply, appworld_root):
    before = {path: path.stat().st_mtime_ns for path in (appworld_root / "data").rglob("*")}
    playing.step(reply(UNGUARDED + "real('shutil.rmtree')('data')"))
    playing.step(reply(UNGUARDED + "real('builtins.open')('data/base_dbs/simple_note.db', 'r+b').write(b'x' * 100)"))
    assert {path: path.stat().st_mtime_ns for path in (appworld_root / "data").rglob("*")} == before
    playing.reset(options={"task_id": "aaaa003_1"})
    goes_on()


def test_a_large_file_is_refused(playing, goes_on, reply):
    code = UNGUARDED + "f = real('builtins.open')('big', 'wb')\nfor i in range(100): f.write(bytes(1 << 20))"
    assert "File too large" in playing.step(reply(code))[0]
    goes_on()


@pytest.mark.parametrize(
    "code", ["\x00", "print('\ud800')", "x" * 200_000, "(" * 5_000, "print(" + "-" * 20_000 + "1)"]
)
def test_code_that_no_parser_takes(playing, goes_on, reply, code):
    assert not playing.step(reply(code))[2]
    goes_on()


def test_the_trainers_secrets_are_not_there(world, reply, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    env = world()
    env.reset(options={"task_id": "aaaa003_1"})
    assert "secret-value" not in env.step(reply("import os\nprint(dict(os.environ))"))[0]


@pytest.mark.parametrize(
    "code",
    [
        "__import__('socket').create_connection(('127.0.0.1', 9), 1)",
        "__import__('urllib.request').request.urlopen('http://127.0.0.1:9', timeout=1)",
        "import os\nos.getppid()\n" + UNGUARDED + "real('os.kill')(os.getppid(), 0)",
        "__import__('gc').get_objects()",
    ],
)
def test_the_rest_of_the_machine_is_out_of_reach(playing, goes_on, reply, code):
    observation = playing.step(reply(code))[0]
    assert "PermissionError" in observation or "not allowed" in observation
    goes_on()


def test_a_forged_success_is_scored_all_the_same(playing, reply):
    """Another process scores what is on disk: what the player says of itself decides nothing."""
    code = (
        "import appworld.evaluator\n"
        "appworld.evaluator.evaluate_task = lambda *a, **k: None\n"
        "apis.supervisor.complete_task()"
    )
    step = playing.step(reply(code))
    assert step[2]
    assert step[1] == 0.0
    assert not playing.report["success"]
