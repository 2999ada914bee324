"""What a server says of its environment before anybody plays: read once, kept, asked for task by task where needed.

Plain GET requests to the same web application that OpenEnv's sessions run on; `schema` and `metadata` are OpenEnv's
own, those below `/text_env` are added by [`~env_adapters.openenv.server`].
"""

import functools
import ipaddress
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from env_adapters.base import Task
from env_adapters.errors import UnknownTaskError
from env_adapters.openenv.connection import RESTART, foreign_tongue, refused_token, token
from env_adapters.openenv.errors import OpenEnvError, OpenEnvTimeoutError, as_here
from env_adapters.openenv.library import load

ROOT = "/text_env"
# Listing tasks may load a benchmark's files over there. In seconds.
DEADLINE = 120.0
CONNECT_SECONDS = 10.0


class Description:
    """What a server of this package says of its environment.

    Args:
        url: the server.
        said: what `GET /text_env` answered.

    Attributes:
        name: registry name of the environment over there.
        said: the class attributes of a [`~env_adapters.base.TextEnv`], the protocol as its name.
        prompt_by_task, tools_by_task: whether the standing messages and the tools differ from task to task.
        common_tools: the tools where they do not.
    """

    def __init__(self, url: str, said: Mapping[str, Any]) -> None:
        self.url = url
        self.said = said
        self.name = str(said["name"])
        self.prompt_by_task = bool(said["prompt_by_task"])
        self.tools_by_task = bool(said["tools_by_task"])
        self.common_tools: list[dict[str, Any]] | None = said["tools"]
        self._ids: set[str] | None = None if said["checks_task_ids"] else set()
        self._lock = threading.Lock()
        self.prompt = functools.cache(self._prompt)

    def tasks(self, environment: str, split: str, options: Mapping[str, Any]) -> Sequence[Task]:
        """The tasks of a split over there, as tasks of the environment of that name here."""
        rows = fetch(self.url, f"{ROOT}/tasks", split=split, options=json.dumps(options))
        tasks = [Task(environment, row["task_id"], row["family"], split) for row in rows]
        with self._lock:
            self._ids = (self._ids or set()) | {task.task_id for task in tasks}
        return tasks

    def check_requirements(self) -> None:
        """Raise what the environment's own check raises over there."""
        fetch(self.url, f"{ROOT}/check")

    def check_task_id(self, task_id: str) -> None:
        """The same for one task id; ids that were listed once are known."""
        if not self.said["checks_task_ids"]:
            return
        with self._lock:
            known = self._ids is not None
        if not known:
            for split in self.said["splits"]:
                self.tasks("", split, {})
        if task_id in (self._ids or ()):
            return
        try:
            task_id.encode("utf-8")
        except UnicodeEncodeError:
            raise UnknownTaskError(f"`task_id` is {task_id!r}, which is no text.") from None
        fetch(self.url, f"{ROOT}/check", task_id=task_id)

    def _prompt(self, task_id: str | None) -> dict[str, Any]:
        return dict(fetch(self.url, f"{ROOT}/prompt", **({} if task_id is None else {"task_id": task_id})))


def fetch(url: str, path: str, **parameters: str) -> Any:
    """GET a JSON document from a server.

    Args:
        url: base address of the server.
        path: what to get there.
        parameters: query parameters.

    Returns:
        The document.

    Raises:
        OpenEnvError: the server cannot be reached, refuses the token, has nothing there, or answers no JSON.
        EnvAdapterError: what the environment raised over there.
    """
    httpx = load("httpx")
    try:
        response = _http(_is_loopback(url), os.getpid()).get(url + path, params=parameters, headers=_headers())
    except httpx.TimeoutException as error:
        raise OpenEnvTimeoutError(
            f"The OpenEnv server at {url} did not answer in time ({type(error).__name__} at {path!r}). {RESTART}"
        ) from error
    except (httpx.ConnectError, httpx.ReadError, httpx.WriteError) as error:
        raise OpenEnvError(f"No OpenEnv server can be reached at {url} ({error}). Is it running? {RESTART}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise foreign_tongue(url, f"its answer at {path!r} is not HTTP's ({error})") from error
    if response.status_code in (401, 403):
        raise refused_token(url)
    if response.status_code == 404:
        raise foreign_tongue(url, f"it has nothing at {path!r}")
    try:
        document = response.json()
    except ValueError as error:
        raise foreign_tongue(url, f"its answer at {path!r} is not JSON ({response.text[:80]!r})") from error
    if response.status_code == 200:
        return document
    raised = document.get("raised") if isinstance(document, dict) else None
    if isinstance(raised, str):
        raise as_here(url, raised)
    raise foreign_tongue(url, f"it answered {path!r} with status {response.status_code}")


@functools.cache
def _http(loopback: bool, process: int) -> Any:
    """A client for each process: a forked child must not write into its parent's connections."""
    httpx = load("httpx")
    # A proxy for the outside world cannot reach this machine.
    return httpx.Client(timeout=httpx.Timeout(DEADLINE, connect=CONNECT_SECONDS), trust_env=not loopback)


def _headers() -> dict[str, bytes]:
    return {"Authorization": f"Bearer {token()}".encode()} if token() else {}


def _is_loopback(url: str) -> bool:
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Whether a host name or address stands for this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
