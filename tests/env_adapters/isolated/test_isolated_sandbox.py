"""A shut-in worker: what it can no longer do, with the kernel's help and without."""

import os
import socket
import sys

import pytest

from env_adapters.isolated import Access, Limits, RemoteError, WorkerError, confine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits as Linux has them")
LIMITS = Limits(memory_mb=512, file_mb=1, processes=64)


@pytest.fixture
def folders(tmp_path):
    """`readable/given.txt`, an empty `writable`, and `hidden/secret.txt` with a link to it in `writable`."""
    for name in ("readable", "writable", "hidden"):
        (tmp_path / name).mkdir()
    (tmp_path / "readable" / "given.txt").write_text("given")
    (tmp_path / "hidden" / "secret.txt").write_text("secret")
    (tmp_path / "writable" / "link").symlink_to(tmp_path / "hidden")
    return tmp_path


@pytest.fixture
def forked(template, folders):
    """A worker whose working folder is `writable`."""
    worker = template.fork("The worker")
    worker.call("run", 10, code=f"import os; os.chdir({str(folders / 'writable')!r})")
    yield worker
    worker.stop()


@pytest.fixture(params=["audit hook and Landlock", "audit hook"])
def shut_in(request, forked, folders):
    if request.param == "audit hook":
        forked.call("without_landlock", 10)
    access = Access((str(folders / "readable"),), (str(folders / "writable"),))
    answer = confine(forked, LIMITS, access)
    if request.param != "audit hook" and not answer["landlock"]:
        pytest.skip("this kernel has no Landlock")
    return forked


def run(worker, code, **names):
    return worker.call("run", 20, code="".join(f"{name} = {value!r}\n" for name, value in names.items()) + code)


ALLOWED = {
    "read what is given": ("result = open(base + '/readable/given.txt').read()", "given"),
    "list what is given": ("import os; result = os.listdir(base + '/readable')", ["given.txt"]),
    "write and read its own": (
        "open('own.txt', 'w').write('own')\nimport os; os.mkdir('deep'); os.rename('own.txt', 'deep/own')\n"
        "result = open(base + '/writable/deep/own').read()",
        "own",
    ),
    "remove its own": ("import os, shutil; os.mkdir('x'); shutil.rmtree('x'); result = os.path.exists('x')", False),
    "import late": ("import colorsys, xml.dom.minidom; result = colorsys.__name__", "colorsys"),
    "compute": ("import random, hashlib; result = hashlib.sha256(b'x').hexdigest()[:4]", "2d71"),
    "a database in memory": (
        "import sqlite3; result = sqlite3.connect(':memory:').execute('select 7').fetchone()",
        [7],
    ),
    "throw output away": ("result = open('/dev/null', 'w').write('x')", 1),
    "pairs of sockets": ("import socket; a, b = socket.socketpair(); a.send(b'x'); result = b.recv(1).decode()", "x"),
    "threads": ("import threading; t = threading.Thread(target=print); t.start(); t.join(); result = 1", 1),
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_it_needs_still_works(shut_in, folders, what):
    code, expected = ALLOWED[what]
    assert run(shut_in, code, base=str(folders)) == expected


FORBIDDEN = {
    "read a file": "open(base + '/hidden/secret.txt').read()",
    "read through a link": "open(base + '/writable/link/secret.txt').read()",
    "read through its parent": "open(base + '/readable/../hidden/secret.txt').read()",
    "read with a path object": "import pathlib; pathlib.Path(base, 'hidden', 'secret.txt').read_text()",
    "read with bytes": "open((base + '/hidden/secret.txt').encode()).read()",
    "read with os": "import os; os.open(base + '/hidden/secret.txt', os.O_RDONLY)",
    "read with io": "import io; io.FileIO(base + '/hidden/secret.txt').read()",
    "read with linecache": "import tokenize; tokenize.open(base + '/hidden/secret.txt').read()",
    "read as a database": "import sqlite3; sqlite3.connect(base + '/hidden/secret.txt').execute('select 1')",
    "read as a database by address": "import sqlite3; sqlite3.connect(f'file:{base}/hidden/x.db?mode=rwc', uri=True)",
    "list a folder": "import os; os.listdir(base + '/hidden')",
    "walk a folder": "import os; next(os.scandir(base + '/hidden'))",
    "read its parent's memory": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "write a file": "open(base + '/hidden/new', 'w')",
    "write what it may read": "open(base + '/readable/given.txt', 'a')",
    "write through a link": "open(base + '/writable/link/new', 'w')",
    "make a folder": "import os; os.mkdir(base + '/hidden/new')",
    "make a folder with pathlib": "import pathlib; pathlib.Path(base, 'new').mkdir()",
    "remove a file": "import os; os.remove(base + '/hidden/secret.txt')",
    "remove a tree": "import shutil; shutil.rmtree(base + '/hidden')",
    "move a file out": "import os; open('x', 'w').close(); os.rename('x', base + '/hidden/x')",
    "move a file in": "import os; os.rename(base + '/hidden/secret.txt', 'secret.txt')",
    "link a file in": "import os; os.link(base + '/hidden/secret.txt', 'secret.txt')",
    "change permissions": "import os; os.chmod(base + '/hidden/secret.txt', 0o777)",
    "cut a file": "import os; os.truncate(base + '/hidden/secret.txt', 0)",
    "make a link elsewhere": "import os; os.symlink('/etc', base + '/hidden/etc')",
    "fork": "import os; os.fork()",
    "fork a terminal": "import os; os.forkpty()",
    "run a command": "import os; os.system('true')",
    "run a program": "import subprocess; subprocess.run(['true'])",
    "run a program without the module": (
        "import _posixsubprocess as p, os\n"
        "r, w = os.pipe()\n"
        "p.fork_exec([b'/bin/true'], [b'/bin/true'], True, (w,), None, None, -1, -1, -1, -1, -1, -1, r, w, False, "
        "False, 0, None, None, None, -1, None, False)"
    ),
    "run multiprocessing": "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "spawn": "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "become a program": "import os; os.execv('/bin/true', ['true'])",
    "signal its parent": "import os; os.kill(os.getppid(), 0)",
    "signal a group": "import os; os.killpg(os.getpgrp(), 0)",
    "connect": "import socket; socket.create_connection(('127.0.0.1', port), 2)",
    "listen": "import socket; socket.socket().bind(('127.0.0.1', 0))",
    "send": "import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
    "look up a name": "import socket; socket.getaddrinfo('localhost', 80)",
    "fetch": "import urllib.request as u; u.urlopen(f'http://127.0.0.1:{port}', timeout=2)",
    "load a library": "import ctypes; ctypes.CDLL(None)",
    "look through memory": "import gc; gc.get_objects()",
    "raise its limits": "import resource as r; r.setrlimit(r.RLIMIT_AS, (r.RLIM_INFINITY, r.RLIM_INFINITY))",
    "disarm the lifeline": "import fcntl, os; [fcntl.fcntl(n, fcntl.F_SETFL, 0) for n in range(3, 12)]",
    "take 600 MB": "x = bytearray(600 << 20)",
    "take memory in pieces": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "write 2 MB": "f = open('big', 'wb'); f.write(bytes(2 << 20)); f.flush()",
}
REFUSALS = {"PermissionError", "MemoryError", "OSError", "OperationalError", "URLError"}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_what_it_can_no_longer_do(shut_in, folders, what):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(RemoteError) as caught:
            run(shut_in, FORBIDDEN[what], base=str(folders), port=server.getsockname()[1])
    assert caught.value.kind in REFUSALS, caught.value
    assert "secret" not in caught.value.text.replace("secret.txt", "")
    assert (folders / "hidden" / "secret.txt").read_text() == "secret"
    assert (folders / "readable" / "given.txt").read_text() == "given"
    assert sorted(os.listdir(folders / "hidden")) == ["secret.txt"]
    assert sorted(os.listdir(folders)) == ["hidden", "readable", "writable"]
    assert run(shut_in, "result = 1") == 1  # and it lives on


TAMPERING = {
    "names of the os module": "import os\nfor n in ('lstat', 'readlink', 'getcwd', 'fspath'): setattr(os, n, str)",
    "where paths lead": "import os\nos.path.realpath = lambda *given, **options: base + '/readable'",
    "names of its module": "import sys\nm = sys.modules['_sandbox']\nfor n in list(vars(m)): setattr(m, n, None)",
    "built-in names": "import builtins\nbuiltins.isinstance = lambda *a: True\nbuiltins.PermissionError = Warning",
    "its code": (
        "try: open('/etc/passwd')\n"
        "except OSError as e: f = e.__traceback__.tb_next.tb_frame\n"
        "for v in list(f.f_locals.values()):\n"
        "    try: v.__code__ = (lambda *a: None).__code__\n"
        "    except (AttributeError, OSError, ValueError, TypeError): pass"
    ),
}


@pytest.mark.parametrize("target", ["hidden/secret.txt", "writable/link/secret.txt"])
@pytest.mark.parametrize("what", TAMPERING)
def test_changing_what_python_code_can_reach_does_not_open_it(shut_in, folders, what, target):
    steal = "\nresult = open(base + '/' + target).read()"
    with pytest.raises(WorkerError):  # refused, or so broken that the worker ended
        run(shut_in, TAMPERING[what] + steal, base=str(folders), target=target)


# What Python reports to no audit hook, so that only the kernel can refuse it.
KERNEL_ONLY = {
    "make a pipe": "import os; os.mkfifo(base + '/hidden/pipe')",
    "attach a database": (
        "import sqlite3; c = sqlite3.connect(':memory:'); c.execute('attach ? as x', (base + '/hidden/x.db',)); "
        "c.execute('create table x.t (a)')"
    ),
    "read relative to a folder": "import os; d = os.open('.', 0); os.open('../hidden/secret.txt', 0, dir_fd=d)",
}


@pytest.mark.parametrize("what", KERNEL_ONLY)
def test_what_the_kernel_refuses(forked, folders, what):
    if not confine(forked, LIMITS, Access((), (str(folders / "writable"),)))["landlock"]:
        pytest.skip("this kernel has no Landlock")
    with pytest.raises(RemoteError):
        run(forked, KERNEL_ONLY[what], base=str(folders))
    assert os.listdir(folders / "hidden") == ["secret.txt"]


def test_limits_alone_leave_the_rest_open(start, folders):
    worker = start()
    assert confine(worker, Limits(memory_mb=512)) == {}
    assert run(worker, "result = open(base + '/hidden/secret.txt').read()", base=str(folders)) == "secret"
    with pytest.raises(RemoteError, match="MemoryError"):
        run(worker, "x = bytearray(600 << 20)")


def test_a_process_limit_counts_from_now(start):
    worker = start()
    confine(worker, Limits(processes=100))
    code = "import resource; result = resource.getrlimit(resource.RLIMIT_NPROC)[0]"
    threads = sum(len(os.listdir(f"/proc/{pid}/task")) for pid in os.listdir("/proc") if pid.isdecimal() and mine(pid))
    assert abs(run(worker, code) - 100 - threads) < 60  # others start and end meanwhile


def mine(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid() and os.path.isdir(f"/proc/{pid}/task")
    except OSError:
        return False


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not limit root")
def test_a_loop_that_starts_threads_meets_the_limit(start):
    worker = start()
    confine(worker, Limits(processes=20))
    code = "import threading as t\nfor _ in range(500): t.Thread(target=t.Event().wait, daemon=True).start()"
    with pytest.raises(RemoteError, match="can't start new thread"):
        run(worker, code)
