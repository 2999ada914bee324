"""AppWorld for the tests: its interpreter where there is one, and a data root made on the spot."""

import os
import subprocess
import time
import warnings
from pathlib import Path

import pytest

from env_adapters.appworld.engine import acquire, release
from env_adapters.appworld.env import AppWorldEnv
from env_adapters.appworld.interpreter import find_python
from env_adapters.errors import MissingDependencyError

LOG_IN = (
    "passwords = {row['account_name']: row['password'] for row in apis.supervisor.show_account_passwords()}\n"
    "email = apis.supervisor.show_profile()['email']\n"
    "token = apis.simple_note.login(username=email, password=passwords['simple_note'])['access_token']\n"
)
FIND = (
    "found = apis.simple_note.search_notes(access_token=token, query={title!r})\n"
    "note = apis.simple_note.show_note(note_id=found[0]['note_id'], access_token=token)\n"
)
WRITE = "print(apis.simple_note.create_note(title={title!r}, content={content!r}, access_token=token))"
DONE = "apis.supervisor.complete_task()"


@pytest.fixture(scope="session")
def appworld_python():
    """AppWorld's interpreter: `$APPWORLD_PYTHON`, else that of the default virtual environment."""
    try:
        return find_python()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def appworld_root(appworld_python, tmp_path_factory):
    """A data root with five tasks; takes half a minute to make. `$APPWORLD_TEST_ROOT` names one made earlier."""
    given = os.environ.get("APPWORLD_TEST_ROOT")
    if given:
        return Path(given)
    root = tmp_path_factory.mktemp("appworld") / "root"
    environment = {**os.environ, "APPWORLD_ROOT": str(root), "APPWORLD_CACHE": str(root / "cache")}
    script = Path(__file__).with_name("data_root.py")
    done = subprocess.run(
        [appworld_python, str(script)], env=environment, capture_output=True, text=True, timeout=500, cwd=root.parent
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="session")
def warm(appworld_python, appworld_root):
    """Keeps one engine in use, so that its warm process is started once for all tests."""
    engine = acquire(appworld_python, appworld_root)
    yield engine
    release(engine)


@pytest.fixture
def world(warm, appworld_root, monkeypatch):
    """Makes environments that are closed after the test."""
    monkeypatch.setenv("APPWORLD_ROOT", str(appworld_root))
    made = []

    def make(**options):
        made.append(AppWorldEnv(**options))
        return made[-1]

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "AppWorld's split")
        yield make
    for env in made:
        env.close()


@pytest.fixture(scope="session")
def reply():
    """Code as a model would write it."""
    return lambda code: f"Let me see.\n```python\n{code}\n```"


@pytest.fixture(scope="session")
def solution():
    """Pieces of code that solve each task."""
    answer = "apis.supervisor.complete_task(answer={})"
    return {
        "aaaa001_1": [LOG_IN + FIND.format(title="Shopping"), answer.format("len(note['content'].splitlines())")],
        "aaaa001_2": [LOG_IN, WRITE.format(title="Call", content="ring Tom"), DONE],
        "aaaa002_1": [LOG_IN + FIND.format(title="Plans"), answer.format("note['content']")],
        "aaaa003_1": [LOG_IN, WRITE.format(title="Buy", content="jam"), DONE],
        "aaaa004_1": [LOG_IN, WRITE.format(title="Pay", content="rent"), DONE],
    }


@pytest.fixture(scope="session")
def assert_ends():
    """Waits until a process is gone, or merely waits to be collected."""

    def wait(pid, seconds=10.0):
        until = time.monotonic() + seconds
        while True:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    return
            except OSError:
                return
            assert time.monotonic() < until, f"process {pid} is still there"
            time.sleep(0.02)

    return wait
