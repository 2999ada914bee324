"""Real servers on 127.0.0.1, started by one process that has imported the engine, and environments to play them."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Server:
    """A running server; `url` where it serves, `name` what the registry calls that."""

    def __init__(self, ask, pid, said):
        self.pid, self.said, self._ask, self._ended = pid, said, ask, None
        self.url = re.search(r"http://\S+:\d+", said).group()
        self.name = f"openenv:{self.url}"
        self.port = int(self.url.rpartition(":")[2])

    def end(self, number=signal.SIGKILL):
        """Send a signal and wait for the end; the exit status and what was printed."""
        if self._ended is None:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, number)
            self._ended = self._ask({"wait": self.pid})
        return self._ended


@pytest.fixture(scope="session")
def launch():
    """Starts servers: `launch("household", "--port", "0")` or `launch(function="module:function")`."""
    pytest.importorskip("openenv")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "launcher.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    servers = []

    def ask(request):
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    def start(*arguments, function=None, **environ):
        request = {"environ": environ}
        if function:
            request["function"] = function
        else:
            arguments = list(arguments) + ([] if "--port" in arguments else ["--port", "0"])
            request["run"] = ["envs", "serve", *arguments]
        answer = ask(request)
        if "Ctrl-C" not in answer["said"]:  # it ended without ever serving
            return {**ask({"wait": answer["pid"]}), "said": answer["said"]}
        servers.append(Server(ask, answer["pid"], answer["said"]))
        return servers[-1]

    yield start
    for server in servers:
        server.end()
    process.stdin.close()
    process.wait()


@pytest.fixture(scope="session")
def household(launch):
    return launch("household")


@pytest.fixture(scope="session")
def moody(launch):
    return launch("moody")


@pytest.fixture
def made():
    """Makes environments that are closed after the test."""
    from env_adapters import make

    environments = []

    def of(server, **options):
        environments.append(make(server if isinstance(server, str) else server.name, **options))
        return environments[-1]

    yield of
    for environment in environments:
        environment.close()
