"""One session with one OpenEnv server, by the engine's own client: every call under a deadline, cut off by `kill`.

All sessions of a process share one thread with an event loop; a caller waits for its own call only.
"""

import asyncio
import concurrent.futures
import functools
import json
import os
import threading
from collections.abc import Coroutine
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

from env_adapters.errors import EpisodeStateError
from env_adapters.openenv.errors import OpenEnvError, OpenEnvTimeoutError, as_here
from env_adapters.openenv.library import load

TOKEN_VARIABLE = "COPE_TRL_TOKEN"
CONNECT_SECONDS = 10.0
FAREWELL_SECONDS = 15.0
MAX_MESSAGE_MB = 64
RESTART = (
    "See what it printed last, and start it again (`cope-trl envs serve` for an environment of this package); the "
    "next `reset` connects anew."
)


class RefusedError(OpenEnvError):
    """The server answered with an error message of OpenEnv's.

    Attributes:
        code: OpenEnv's error code.
        said: the message.
        url: the server.
    """

    def __init__(self, code: str, said: str, url: str) -> None:
        super().__init__(f"The OpenEnv server at {url} answered: {said} (code {code}).")
        self.code = code
        self.said = said
        self.url = url


def token() -> str:
    """The token that servers ask for; empty for none."""
    return os.environ.get(TOKEN_VARIABLE, "")


class Session:
    """A session with a server: an environment of its own over there, for as long as the connection lasts.

    Args:
        url: base address of the server, `http` or `https`.
        deadline: seconds until a call is given up.
    """

    def __init__(self, url: str, deadline: float) -> None:
        self.url = url
        self.connected = False
        self._deadline = deadline
        self._lock = threading.Lock()  # of `_pending` and `_closed`, which `kill` reads from another thread
        self._pending: concurrent.futures.Future[Any] | None = None
        self._closed = False
        self._client = _client_class()(
            _with_token(url),
            connect_timeout_s=min(CONNECT_SECONDS, deadline),
            message_timeout_s=2 * deadline,  # the deadline of the whole call, below, is the one that counts
            max_message_size_mb=MAX_MESSAGE_MB,
            mode="simulation",
        )

    def connect(self) -> None:
        """Open the connection.

        Raises:
            OpenEnvError: there is no OpenEnv server that lets us in.
        """
        try:
            self._wait("connect", self._client.connect())
        except (OpenEnvTimeoutError, EpisodeStateError):
            raise
        except Exception as error:
            self.drop()
            raise _unreachable(self.url, error.__cause__ or error) from None  # the engine's own shows the token
        self.connected = True

    def reset(self, **arguments: Any) -> Any:
        """Start an episode; returns OpenEnv's step result."""
        return self._call("reset", self._client.reset(**arguments))

    def step(self, action: dict[str, Any]) -> Any:
        """Send one action; returns OpenEnv's step result."""
        return self._call("step", self._client.step(action))

    def drop(self, wait: float = 0.0) -> None:
        """Give the session up, from any thread: a call in progress ends at once, the server is told.

        Args:
            wait: seconds to wait until the server has been told.
        """
        with self._lock:
            self._closed, self.connected = True, False
            pending = self._pending
        if pending is not None:
            pending.cancel()
        told = _submit(self._client.part())
        if wait:
            concurrent.futures.wait([told], wait)

    def _call(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self._wait(what, coroutine)
        except _AnsweredError as error:
            code, said = error.args
            if code == "EXECUTION_ERROR":  # the environment's own exception; the session lives on
                raise as_here(self.url, said) from None
            self.drop()
            raise RefusedError(code, said, self.url) from None
        except (OpenEnvTimeoutError, EpisodeStateError):
            raise
        except Exception as error:
            self.drop()
            if isinstance(error, (OSError, load("websockets.exceptions").WebSocketException)):
                raise OpenEnvError(
                    f"The OpenEnv server at {self.url} went away during `{what}` ({error}). {RESTART}"
                ) from error
            raise foreign_tongue(self.url, f"its answer to `{what}` could not be read ({error!r})") from error

    def _wait(self, what: str, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop's thread, under the deadline, and wait for it."""
        with self._lock:
            if self._closed:
                coroutine.close()
                raise EpisodeStateError(f"The session with {self.url} is closed; call `reset` for a new one.")
            self._pending = _submit(asyncio.wait_for(coroutine, self._deadline))
        try:
            return self._pending.result()
        except concurrent.futures.CancelledError:
            raise EpisodeStateError(
                f"The session with {self.url} was closed while it waited for `{what}` to return."
            ) from None
        except (TimeoutError, asyncio.TimeoutError, concurrent.futures.TimeoutError):
            self.drop()
            raise OpenEnvTimeoutError(
                f"The OpenEnv server at {self.url} did not answer `{what}` within {self._deadline:g} s; the session "
                "was dropped. Look at what the server prints, or allow more time with `deadline`."
            ) from None
        except (KeyboardInterrupt, SystemExit):
            self.drop()
            raise
        finally:
            with self._lock:
                self._pending = None


class _AnsweredError(Exception):
    """Code and message of an error that a server answered."""


class _Explained:
    """What this package adds to the engine's client: errors with their code, the last words of a closed session."""

    _ws: Any

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await super()._send(message)  # type: ignore[misc]
        except load("websockets.exceptions").ConnectionClosed:
            pass  # a server that refuses a session says why before it closes; reading tells, or raises the same

    async def _receive(self) -> dict[str, Any]:
        answer = await super()._receive()  # type: ignore[misc]
        if not isinstance(answer, dict) or "type" not in answer or not isinstance(answer.get("data"), dict):
            raise ValueError(f"{json.dumps(answer)[:200]}")
        if answer["type"] == "error":
            data = answer["data"]
            errors = f" {json.dumps(data['errors'])[:500]}" if data.get("errors") else ""
            raise _AnsweredError(str(data.get("code")), f"{data.get('message')}{errors}")
        return answer

    async def part(self) -> None:
        """Disconnect politely; from a server that does not listen any more, the other way."""
        connection = self._ws
        try:
            await asyncio.wait_for(self.disconnect(), FAREWELL_SECONDS)  # type: ignore[attr-defined]
        except (TimeoutError, asyncio.TimeoutError):
            connection.transport.abort()


@functools.lru_cache(maxsize=1)
def _client_class() -> Any:
    return type("Client", (_Explained, load("openenv.core.generic_client").GenericEnvClient), {})


# -------------------------------------------------------------------- the loop

_loops: dict[int, asyncio.AbstractEventLoop] = {}  # by process id: a forked child has no thread of its parent's
_loop_lock = threading.Lock()


def _submit(coroutine: Coroutine[Any, Any, Any]) -> "concurrent.futures.Future[Any]":
    with _loop_lock:
        loop = _loops.get(os.getpid())
        if loop is None:
            loop = _loops[os.getpid()] = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name="openenv-sessions", daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, loop)


# -------------------------------------------------------------------- addresses and what is wrong with them


def _with_token(url: str) -> str:
    """The address with the token as password: the engine's client has no other place for it."""
    if not token():
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"token:{quote(token(), safe='')}@{parts.netloc}"))


def _unreachable(url: str, error: BaseException) -> OpenEnvError:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return refused_token(url)
    if isinstance(error, TimeoutError):
        return OpenEnvTimeoutError(f"No connection with the OpenEnv server at {url} in time ({error}). {RESTART}")
    if isinstance(error, OSError):
        return OpenEnvError(f"No OpenEnv server can be reached at {url} ({error}). Is it running? {RESTART}")
    return foreign_tongue(url, f"it refused the WebSocket at '/ws' ({error})")


def refused_token(url: str) -> OpenEnvError:
    """The error for a server that asks for another token."""
    sent = f"the one in ${TOKEN_VARIABLE} is not its own" if token() else f"${TOKEN_VARIABLE} is not set"
    return OpenEnvError(
        f"The OpenEnv server at {url} refused the token: {sent}. Set {TOKEN_VARIABLE} to the token the server was "
        "started with."
    )


def foreign_tongue(url: str, why: str) -> OpenEnvError:
    """The error for a server that speaks another protocol."""
    return OpenEnvError(
        f"What answers at {url} does not speak OpenEnv: {why}. Check host and port, and that the server's "
        "openenv-core is of version 0.3."
    )
