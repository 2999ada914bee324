"""Servers that die, hang, are full, ask for a token, or are none: a clear error, and the next reset plays on."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from cope_trl.rollout.pool import Call, EnvironmentPool, Failure
from env_adapters import EnvAdapterError, EpisodeStateError, make, resolve
from env_adapters.household import HouseholdEnv
from env_adapters.openenv import OpenEnvError, OpenEnvTimeoutError

pytest.importorskip("openenv")


@pytest.fixture
def stopped(moody):
    """The server of `moody`, to be stopped by the test with SIGSTOP, so that it takes calls and answers none."""
    yield moody
    os.kill(moody.pid, signal.SIGCONT)


# -------------------------------------------------------------------- it dies


def test_a_server_that_dies_fails_the_episode_and_a_new_one_is_played(launch):
    server = launch("household")
    pool = EnvironmentPool(make)
    handle = pool.acquire(server.name)
    ((first, _),) = pool.run([Call(handle, "reset", kwargs={"options": {"task_id": "train-00000"}})])
    server.end()
    (failure,) = pool.run([Call(handle, "step", ("Action: look",))])
    assert isinstance(failure, Failure)
    assert isinstance(failure.cause, OpenEnvError)
    for part in (server.url, "went away during `step`", "cope-trl envs serve"):
        assert part in failure.message
    handle = pool.acquire(server.name)
    (failure,) = pool.run([Call(handle, "reset")])
    assert "No OpenEnv server can be reached" in failure.message
    assert server.url in failure.message
    assert "Is it running?" in failure.message
    launch("household", "--port", str(server.port))
    handle = pool.acquire(server.name)
    assert pool.run([Call(handle, "reset", kwargs={"options": {"task_id": "train-00000"}})])[0][0] == first
    pool.release(handle)
    pool.close()


def test_a_step_that_kills_its_server(launch, made):
    server = launch("moody")
    env = made(server)
    env.reset()
    with pytest.raises(OpenEnvError, match="went away during `step`"):
        env.step("Action: die")
    with pytest.raises(EpisodeStateError):
        env.step("Action: wave")


def test_a_connection_lost_between_episodes_is_opened_anew(launch, made):
    server = launch("moody")
    env = made(server)
    env.reset()
    server.end()
    again = launch("moody", "--port", str(server.port))
    assert env.reset()[0] == f"Hello from {again.pid}."
    assert env.step("Action: wave")[0] == "You wave."


def test_another_environment_at_the_same_address(launch, made):
    server = launch("moody")
    env = made(server)
    env.reset()
    server.end()
    launch("household", "--port", str(server.port))
    with pytest.raises(OpenEnvError, match="serves 'household' now, where it served 'moody'"):
        env.reset()


# -------------------------------------------------------------------- it hangs


def test_a_server_that_hangs_passes_the_deadline(stopped, made):
    env, other = made(stopped, deadline=1.0), made(stopped, deadline=1.0)
    env.reset()
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(OpenEnvTimeoutError, match=rf"{stopped.url} did not answer `step` within 1 s.*`deadline`"):
        env.step("Action: wave")
    with pytest.raises(EpisodeStateError):
        env.step("Action: wave")
    with pytest.raises(OpenEnvTimeoutError, match=stopped.url):  # the kernel takes the connection, nobody answers it
        other.reset()
    os.kill(stopped.pid, signal.SIGCONT)
    for each in (env, other):
        assert each.reset()[0] == f"Hello from {stopped.pid}."


def test_the_server_ends_an_environment_that_hangs(launch, made):
    """Otherwise its place would be taken for good."""
    server = launch("moody", "--deadline", "0.5", "--max-sessions", "1")
    env = made(server)
    for _ in range(2):
        env.reset()
        with pytest.raises(EnvAdapterError, match=r"`step` did not return within 0\.5 s, the server's deadline"):
            env.step("Action: hang")
    env.close()
    assert made(server).reset()[0] == f"Hello from {server.pid}."


def test_kill_wakes_a_call_that_waits(moody, made):
    env = made(moody, deadline=600)
    env.reset()
    threading.Timer(0.3, env.kill).start()
    with pytest.raises(EpisodeStateError, match="closed while it waited for `step`"):
        env.step("Action: hang")
    with pytest.raises(EpisodeStateError, match="closed"):
        env.reset()
    assert env.url is None


def test_kill_wakes_a_reset_that_waits_for_a_connection(stopped, made):
    resolve(stopped.name)
    os.kill(stopped.pid, signal.SIGSTOP)
    env = made(stopped, deadline=600)
    threading.Timer(0.3, env.kill).start()
    with pytest.raises(EpisodeStateError, match="closed while it waited for `connect`"):
        env.reset()


# -------------------------------------------------------------------- it refuses


def test_a_full_server_says_so(launch, made):
    server = launch("household", "--max-sessions", "1")
    first, second = made(server), made(server, deadline=1.0)
    first.reset()
    with pytest.raises(OpenEnvError, match=r"no room|has room.*1/1 sessions active.*`--max-sessions`"):
        second.reset()
    first.close()
    assert second.reset(seed=1) == HouseholdEnv().reset(seed=1)


def test_a_place_that_becomes_free_is_taken(launch, made, monkeypatch):
    """A session that has just ended still counts on its server for a moment."""
    server = launch("household", "--max-sessions", "1")
    first, second = made(server), made(server)
    first.reset()
    waits = []

    def sleep(seconds):
        waits.append(seconds)
        first.close()
        time.sleep(seconds)

    monkeypatch.setattr("env_adapters.openenv.client.time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    assert second.reset(seed=1) == HouseholdEnv().reset(seed=1)
    assert waits


def test_a_full_host_is_passed_over_for_another(launch, moody, made):
    full = launch("moody", "--max-sessions", "1")
    environments = [made(f"{full.name};{moody.url}") for _ in range(4)]
    for env in environments:
        env.reset()
    assert sorted(env.url == full.url for env in environments) == [False, False, False, True]


def test_the_token(launch, made, monkeypatch):
    secret = "s3cret/@:? ü"
    server = launch("household", COPE_TRL_TOKEN=secret)
    assert secret not in server.said
    assert "a token" in server.said
    monkeypatch.delenv("COPE_TRL_TOKEN", raising=False)
    with pytest.raises(OpenEnvError, match=r"refused the token: \$COPE_TRL_TOKEN is not set"):
        resolve(server.name)
    monkeypatch.setenv("COPE_TRL_TOKEN", "wrong")
    with pytest.raises(OpenEnvError, match=r"the one in \$COPE_TRL_TOKEN is not its own"):
        resolve(server.name)
    monkeypatch.setenv("COPE_TRL_TOKEN", secret)
    env = made(server)
    assert env.reset(seed=1) == HouseholdEnv().reset(seed=1)
    assert env.step("Action: look")
    env.close()
    # The WebSocket asks for itself, whoever was told about the environment before.
    for wrong in ("wrong", ""):
        monkeypatch.setenv("COPE_TRL_TOKEN", wrong)
        env = made(server)
        with pytest.raises(OpenEnvError, match="refused the token") as caught:
            env.reset()
        assert "wrong@" not in str(caught.value)


GETS = ("/health", "/schema", "/text_env", "/docs", "/openapi.json")


@pytest.mark.parametrize("path", [*GETS, "/mcp", "/reset", "/step"])
def test_nothing_is_open_without_the_token(guarded, path):
    import httpx

    method = "GET" if path in GETS else "POST"
    for wrong in ("", "Bearer no", "Bearer", "Basic !", "Digest open", "open"):
        response = httpx.request(method, guarded.url + path, headers={"Authorization": wrong}, trust_env=False)
        assert response.status_code == 401, (path, wrong)
    assert httpx.request(method, guarded.url + path, trust_env=False).status_code == 401


@pytest.mark.parametrize("path", ["/ws", "/mcp"])
def test_no_websocket_without_the_token(guarded, path):
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    with pytest.raises(InvalidStatus, match="403"):
        connect(guarded.url.replace("http", "ws") + path, proxy=None)


@pytest.fixture(scope="module")
def guarded(launch):
    return launch("household", "--token", "open")


# -------------------------------------------------------------------- it is none


@contextlib.contextmanager
def answering(handler):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class _Pages(http.server.BaseHTTPRequestHandler):
    answer = b"<html>Hello</html>"

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_):
        pass


class _Json(_Pages):
    answer = b'{"models": []}'


class _Nothing(_Pages):
    def do_GET(self):
        self.send_error(404)


@pytest.mark.parametrize(
    ("handler", "why"),
    [(_Pages, "is not JSON"), (_Json, "no action and observation"), (_Nothing, "it has nothing at '/schema'")],
)
def test_a_web_server_that_is_no_openenv(handler, why):
    with answering(handler) as url, pytest.raises(OpenEnvError, match=f"{url} does not speak OpenEnv: .*{why}"):
        resolve(f"openenv:{url}")


def test_something_that_is_no_web_server():
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"

        def hang_up():
            with server.accept()[0] as connection:
                connection.recv(1 << 16)
                connection.sendall(b"SSH-2.0-elsewhere\r\n\r\n")

        threading.Thread(target=hang_up, daemon=True).start()
        with pytest.raises(OpenEnvError, match=f"{url} does not speak OpenEnv: .*not HTTP"):
            resolve(f"openenv:{url}")


def test_nobody_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(OpenEnvError, match=f"No OpenEnv server can be reached at {url}.*Is it running"):
            make(f"openenv:{url}")


def test_hosts_of_one_address_must_serve_the_same(household, moody):
    with pytest.raises(OpenEnvError, match=f"{moody.url} serves another environment than {household.url}"):
        resolve(f"{household.name},{moody.url}")


def test_another_version_of_this_package(moody, monkeypatch):
    from env_adapters.openenv import wire

    monkeypatch.setattr(wire, "VERSION", 2)
    with pytest.raises(OpenEnvError, match="version 1 of a text environment, this package plays version 2"):
        resolve(f"{moody.name}/")  # not the name that was resolved before


def test_options_for_foreign_servers(moody):
    with pytest.raises(OpenEnvError, match=r"\['action_field'\] are for servers of other people's"):
        resolve(f"{moody.name}?action_field=reply")


@pytest.mark.parametrize("deadline", [0, -1.0])
def test_a_deadline_is_a_time(moody, deadline):
    with pytest.raises(EnvAdapterError, match="`deadline` is"):
        make(moody.name, deadline=deadline)


# -------------------------------------------------------------------- the command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_server_also_while_it_plays(launch, made, number):
    server = launch("moody")
    env = made(server)
    env.reset()
    ended = server.end(number)
    assert ended["code"] == 0
    assert "Stopped serving 'moody'." in ended["said"]
    assert "Traceback" not in ended["said"]


def test_clients_that_come_and_go_print_nothing(launch, made):
    from websockets.sync.client import connect

    server = launch("moody")
    for _ in range(5):
        env = made(server)
        env.reset()
        env.close()
        env = made(server)
        env.reset()
        env.kill()
        with connect(server.url.replace("http", "ws") + "/ws", proxy=None) as connection:
            connection.send('{"type": "reset"}')
            connection.recv()
            connection.socket.shutdown(socket.SHUT_RDWR)  # gone without a word
    assert server.end(signal.SIGINT)["said"].split() == ["Stopped", "serving", "'moody'."]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("houshold",), "Did you mean 'household'"),
        (("household", "--options", "[1]"), "`--options` is '[1]'; write a JSON object"),
        (("household", "--options", "{"), "which is no JSON"),
        (("household", "--max-sessions", "0"), "`max_sessions` is 0"),
        (("household", "--deadline", "0"), "`deadline` is 0.0"),
        (("household", "--host", "192.0.2.1"), "Cannot listen on `--host` 192.0.2.1"),
    ],
)
def test_a_server_that_cannot_start_says_why(launch, arguments, message):
    ended = launch(*arguments)
    assert ended["code"] == 2
    assert message in ended["said"]


def test_a_port_that_is_taken(launch, household):
    ended = launch("household", "--port", str(household.port))
    assert ended["code"] == 2
    assert f"`--port` {household.port}" in ended["said"]


def test_a_warning_beyond_this_machine_without_a_token(launch, made, household):
    open_server = launch("household", "--host", "0.0.0.0")
    warned = f"Warning: everybody who reaches 0.0.0.0 port {open_server.port}"
    with_token = launch("household", "--host", "0.0.0.0", "--token", "open")
    assert made(f"openenv:http://127.0.0.1:{open_server.port}").reset()
    assert warned in open_server.end()["said"]
    assert "Warning" not in with_token.end()["said"]
    assert "no token" in household.said


def test_what_cannot_be_served():
    from env_adapters import register, registry
    from env_adapters.openenv.server import build_app

    sys.path.insert(0, os.path.dirname(__file__))
    names = dict(registry._registered)
    try:
        register("private", "served_worlds:Private")
        register("bare", "gymnasium:Env")
        with pytest.raises(EnvAdapterError, match="protocol 'own' is none of"):
            build_app("private")
        with pytest.raises(EnvAdapterError, match="no TextEnv"):
            build_app("bare")
    finally:
        registry._registered.clear()
        registry._registered.update(names)
        sys.path.pop(0)


def test_without_the_engine_the_extra_is_named():
    code = (
        "import sys\n"
        "sys.modules['openenv'] = None\n"
        "from env_adapters import make, MissingDependencyError\n"
        "from env_adapters.openenv.server import build_app\n"
        "for attempt in (lambda: make('openenv:http://127.0.0.1:1'), lambda: build_app('household')):\n"
        "    try:\n"
        "        attempt()\n"
        "    except MissingDependencyError as error:\n"
        "        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'cope_trl[openenv]'") == 2
