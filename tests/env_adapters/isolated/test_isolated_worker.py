"""Worker processes: the protocol, deadlines, forks, and the certainty that none is left behind."""

import ast
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_adapters.errors import MissingDependencyError
from env_adapters.isolated import RemoteError, WorkerEndedError, WorkerError, WorkerTimeoutError, process, starting

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
FOLDER = Path(starting.__file__).parent
ROOT = FOLDER.parents[1]


# ------------------------------------------------------------------------------------------------------- the protocol


def test_a_worker_says_what_it_is(start):
    worker = start(packages=["gymnasium", "no-such-package"])
    assert worker.versions["protocol"] == starting.PROTOCOL
    assert worker.versions["python"] == sys.version.split()[0]
    assert worker.versions["packages"]["gymnasium"]
    assert worker.versions["packages"]["no-such-package"] is None


def test_both_sides_speak_the_same_version():
    tree = ast.parse((FOLDER / "worker.py").read_text())
    spoken = [n.value.value for n in tree.body if isinstance(n, ast.Assign) and n.targets[0].id == "PROTOCOL"]
    assert spoken == [starting.PROTOCOL]


def test_another_version_is_refused(start, monkeypatch):
    monkeypatch.setattr(starting, "PROTOCOL", 99)
    with pytest.raises(WorkerError, match="speaks version 1 of the worker protocol, this process version 99"):
        start()


def test_the_childs_side_needs_the_standard_library_only():
    for name in ("worker.py", "sandbox.py"):
        for node in ast.walk(ast.parse((FOLDER / name).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            assert {module.partition(".")[0] for module in names} <= sys.stdlib_module_names, name


def test_the_hosted_object_keeps_its_state(start):
    worker = start(arguments={"start": 40})
    assert [worker.call("add", 10, number=n) for n in (1, 1)] == [41, 42]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_values_come_back_as_they_went(template, value):
    assert template.call("echo", 10, value=value) == value


@pytest.mark.parametrize("value", ["\ud800 half a pair", "\x00\n\r\u2028", "x" * 3_000_000])
def test_hostile_text_comes_back(template, value):
    assert template.call("echo", 30, value=value) == value


def test_an_exception_is_an_answer(start):
    worker = start()
    with pytest.raises(RemoteError, match="The worker: `run` raised ZeroDivisionError: division by zero") as caught:
        worker.call("run", 10, code="1 / 0")
    assert (caught.value.kind, caught.value.text) == ("ZeroDivisionError", "division by zero")
    for code in ("raise KeyboardInterrupt", "raise SystemExit(3)", "raise GeneratorExit"):
        with pytest.raises(RemoteError):
            worker.call("run", 10, code=code)
    for method in ("unserializable", "no_such_method", "__init__", "_private"):
        with pytest.raises(RemoteError):
            worker.call(method, 10)
    assert worker.call("add", 10, number=1) == 1


def test_prints_do_not_disturb_the_protocol(start):
    worker = start()
    assert worker.call("print_a_lot", 10) == ""  # and there is no standard input to read requests from
    assert worker.call("add", 10, number=1) == 1


def test_what_it_printed_last_is_told(start):
    worker = start()
    with pytest.raises(
        WorkerEndedError, match=r"exit code 3\) while it was to `run`. Its last words: good bye"
    ) as caught:
        worker.call("run", 10, code="import os; os.write(2, b'good bye'); os._exit(3)")
    assert (caught.value.returncode, caught.value.stopped) == (3, False)
    assert not worker.alive
    with pytest.raises(WorkerEndedError, match="is not running any more"):
        worker.call("add", 10, number=1)


def test_an_answer_that_is_none_ends_the_worker(start, assert_ends):
    worker = start()
    forge = (
        "import gc, os\n"
        "server = next(o for o in gc.get_objects() if type(o).__name__ == 'Server')\n"
        'os.write(server._answers, b\'{"id": 77, "result": 1}\\n\')'
    )
    with pytest.raises(WorkerError, match="is not the protocol's"):
        worker.call("run", 10, code=forge)
    assert_ends(worker.pid)


def test_an_endless_answer_ends_the_worker(start, assert_ends, monkeypatch):
    worker = start()
    monkeypatch.setattr(process, "MAX_ANSWER", 1 << 20)
    with pytest.raises(WorkerError, match="exceeds 1 MB"):
        worker.call("run", 10, code="result = 'x' * (3 << 20)")
    assert_ends(worker.pid)


def test_secrets_stay_here(start, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    seen = start(environment={"GIVEN": "1"}).call("run", 10, code="import os; result = dict(os.environ)")
    assert seen["GIVEN"] == "1"
    assert not {"HF_TOKEN", "PYTHONPATH"} & set(seen)


def test_what_cannot_be_loaded(start):
    with pytest.raises(RemoteError, match="ValueError: never ready"):
        start("Broken")
    with pytest.raises(RemoteError, match="has no attribute 'Missing'"):
        start("Missing")
    with pytest.raises(MissingDependencyError, match="'/no/such/python' cannot be started"):
        starting.start_worker("The worker", ("x.py", "X"), {}, python="/no/such/python")
    with pytest.raises(WorkerEndedError, match="exit code"):
        starting.start_worker("The worker", ("x.py", "X"), {}, python="/bin/false")


# --------------------------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("method", ["sleep", "hold_the_interpreter"])
def test_a_deadline_ends_the_process(start, assert_ends, method):
    worker = start()
    began = time.monotonic()
    with pytest.raises(WorkerTimeoutError, match="did not return within 0.5 s; the process was killed"):
        worker.call(method, 0.5, **({"seconds": 60} if method == "sleep" else {}))
    assert time.monotonic() - began < 5
    assert_ends(worker.pid)


def test_the_whole_process_group_ends(start, assert_ends):
    worker = start()
    child = worker.call("run", 10, code="import subprocess, sys; result = subprocess.Popen(['sleep', '600']).pid")
    with pytest.raises(WorkerTimeoutError):
        worker.call("sleep", 0.2, seconds=60)
    assert_ends(child)


def test_stop_wakes_a_thread_that_waits(start, assert_ends):
    worker = start()
    caught = []

    def wait():
        try:
            worker.call("sleep", 60, seconds=60)
        except WorkerEndedError as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    began = time.monotonic()
    worker.stop()
    worker.stop()
    thread.join(5)
    assert time.monotonic() - began < 5
    assert caught[0].stopped
    assert_ends(worker.pid)


def test_a_dropped_handle_ends_its_process(assert_ends):
    worker = starting.start_worker(
        "The worker", (Path(__file__).with_name("hosted.py"), "Hosted"), {}, python=sys.executable
    )
    pid = worker.pid
    open_before = len(os.listdir("/proc/self/fd"))
    del worker
    gc.collect()
    assert_ends(pid)
    assert len(os.listdir("/proc/self/fd")) < open_before


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("method", ["sleep", "hold_the_interpreter"])
def test_no_worker_outlives_this_process(assert_ends, forked, method):
    """The parent is killed without a chance to clean up, while its worker is busy."""
    arguments = "seconds=60" if method == "sleep" else ""
    code = (
        "import sys, threading, time\n"
        "from env_adapters.isolated import start_worker\n"
        f"worker = start_worker('w', ({str(Path(__file__).with_name('hosted.py'))!r}, 'Hosted'), {{}}, "
        "python=sys.executable)\n"
        f"busy = worker.fork('f') if {forked} else worker\n"
        f"threading.Thread(target=lambda: busy.call({method!r}, 60, {arguments})).start()\n"
        "time.sleep(0.5)\n"
        "print(worker.pid, busy.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    for pid in pids:
        assert_ends(pid, 5)


def test_no_socket_listens(start):
    worker = start()
    code = (
        "import os\n"
        "inodes = [os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') "
        "if os.path.lexists(f'/proc/self/fd/{n}')]\n"
        "mine = {link[8:-1] for link in inodes if link.startswith('socket:')}\n"
        "table = [line.split() for name in ('tcp', 'tcp6') for line in open(f'/proc/net/{name}').readlines()[1:]]\n"
        "result = [len(mine), [row for row in table if row[9] in mine]]"
    )
    assert worker.call("run", 10, code=code) == [1, []]  # the control socket, a pair of Unix sockets
    assert worker.fork("The fork").call("run", 10, code=code) == [0, []]


# ------------------------------------------------------------------------------------------------------------- forks


def test_a_fork_starts_from_the_state_of_its_parent_and_shares_nothing(start):
    worker = start(arguments={"start": 1})
    first, second = worker.fork("The first"), worker.fork("The second")
    assert first.call("add", 10, number=10) == 11
    assert second.call("add", 10, number=100) == 101
    assert worker.call("add", 10, number=1000) == 1001
    assert worker.fork("The third").call("add", 10, number=0) == 1001
    with pytest.raises(RemoteError, match="a forked worker does not fork again"):
        first.call("fork", 10, reap=[])


def test_the_end_of_a_fork_leaves_the_others_alone(start, running, assert_ends):
    worker = start()
    first, second = worker.fork("The first"), worker.fork("The second")
    with pytest.raises(WorkerEndedError, match=r"The first ended \(exit code 5\)") as caught:
        first.call("run", 10, code="import os; os._exit(5)")
    assert caught.value.returncode == 5
    with pytest.raises(WorkerEndedError) as caught:
        second.call("run", 10, code="import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert caught.value.returncode == -signal.SIGSEGV
    third = worker.fork("The third")
    with pytest.raises(WorkerTimeoutError):
        third.call("hold_the_interpreter", 0.3)
    assert_ends(third.pid)
    assert worker.call("add", 10, number=1) == 1


def test_forks_are_collected(start):
    worker = start()
    forks = [worker.fork("The fork") for _ in range(5)]
    for fork in forks:
        fork.stop()
    time.sleep(0.3)
    worker.fork("The last")
    assert not [fork.pid for fork in forks if Path(f"/proc/{fork.pid}").exists()]


def test_forks_come_from_many_threads_at_once(start):
    worker = start()
    answers = []

    def play(number):
        fork = worker.fork(f"Fork {number}")
        answers.append((number, fork.call("add", 20, number=number)))
        fork.stop()

    threads = [threading.Thread(target=play, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(answers) == [(number, number) for number in range(12)]


def test_a_worker_that_ended_forks_no_more(start):
    worker = start()
    worker.stop()
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerError):
        worker.fork("The fork")
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_requests_are_lines_of_json(tmp_path):
    """The worker spoken to by hand, as another language would."""
    import socket

    ours, theirs = socket.socketpair()
    life_out, life_in = os.pipe()
    child = subprocess.Popen(
        [sys.executable, str(FOLDER / "worker.py"), str(life_out), str(theirs.fileno())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(life_out, theirs.fileno()),
        start_new_session=True,
    )
    hosted = str(Path(__file__).with_name("hosted.py"))
    first = {"protocol": 1, "file": hosted, "name": "Hosted", "arguments": {}, "path": [], "packages": []}
    requests = [
        {"id": 1, "method": "start", "arguments": first},
        {"id": 2, "method": "add", "arguments": {"number": 2}},
    ]
    answers, _ = child.communicate(b"".join(json.dumps(request).encode() + b"\n" for request in requests), timeout=20)
    lines = [json.loads(line) for line in answers.splitlines()]
    assert lines[0]["result"]["protocol"] == 1
    assert lines[1] == {"id": 2, "result": 2}
    assert child.returncode == 0  # the requests ended
    for end in (life_out, life_in):
        os.close(end)
    ours.close()
    theirs.close()
