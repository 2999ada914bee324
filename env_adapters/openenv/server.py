"""A registered environment behind OpenEnv's own web application, with what a training host asks before it plays."""

import base64
import binascii
import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from env_adapters.base import TextEnv
from env_adapters.errors import EnvAdapterError
from env_adapters.isolated.proxy import PROTOCOLS
from env_adapters.openenv import wire
from env_adapters.openenv.describe import ROOT
from env_adapters.openenv.errors import spoken
from env_adapters.openenv.library import load
from env_adapters.openenv.session import TextEnvSession, models
from env_adapters.registry import resolve

_TAG = "Text environment"
# Less than a client's, so that the one who knows most speaks first. In seconds.
DEADLINE = 100.0
Scope = dict[str, Any]
Send = Callable[[dict[str, Any]], Awaitable[None]]
App = Callable[[Scope, Callable[..., Any], Send], Awaitable[None]]


def build_app(
    name: str,
    *,
    options: dict[str, Any] | None = None,
    max_sessions: int = 64,
    token: str = "",
    deadline: float = DEADLINE,
) -> "ServerApp":
    """Make the ASGI application that serves an environment.

    Args:
        name: registry name.
        options: arguments of the environment's constructor, the same for all sessions.
        max_sessions: sessions at a time; one more is refused.
        token: what every request and every session must carry; empty for none.
        deadline: seconds until a `reset` or a `step` is given up.

    Raises:
        UnknownEnvironmentError: no environment has that name.
        MissingDependencyError: openenv-core, or something the environment needs, is not installed.
        EnvAdapterError: the environment is no `TextEnv` or has a protocol of its own, or an argument is out of range.
    """
    if max_sessions < 1:
        raise EnvAdapterError(f"`max_sessions` is {max_sessions}; use 1 or more.")
    if not deadline > 0:
        raise EnvAdapterError(f"`deadline` is {deadline!r}; use a number of seconds above 0.")
    served = resolve(name)
    if not issubclass(served, TextEnv):
        raise EnvAdapterError(f"`name` is {name!r}, a {served.__name__} that is no TextEnv, so it cannot be served.")
    if PROTOCOLS.get(served.protocol.name) is None:
        raise EnvAdapterError(
            f"`name` is {name!r}, whose protocol {served.protocol.name!r} is none of {list(PROTOCOLS)}; forecasts are "
            "laid out on the training host, so only those can be served."
        )
    served.check_requirements()
    made = models(served, options or {}, deadline)
    engine = load("openenv.core.env_server.http_server")
    app = engine.create_fastapi_app(made.environment, made.action, made.observation, max_concurrent_envs=max_sessions)
    _add_questions(app, served)
    return ServerApp(_Guard(app, token) if token else app, made.environment)


class ServerApp:
    """An ASGI application, and a way to end the environments of its sessions.

    Args:
        app: the application.
        environment: the class of its sessions.
    """

    def __init__(self, app: App, environment: type[TextEnvSession]) -> None:
        self._app = app
        self._environment = environment

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except load("starlette.websockets").WebSocketDisconnect:
            pass  # the engine closes a session whose client has closed it already; that is no error to print

    def kill(self) -> None:
        """End the environments of all sessions at once, also those that hang."""
        for session in list(self._environment.live):
            session.kill()


def describe(served: type[TextEnv]) -> dict[str, Any]:
    """What a client's class says of itself: the class attributes, the protocol as its name."""
    tools_by_task = _overridden(served, "tools")
    return {
        "version": wire.VERSION,
        "name": served.name,
        "protocol": served.protocol.name,
        "instruction": served.instruction,
        "acknowledgement": served.acknowledgement,
        "score_range": list(served.score_range),
        "splits": list(served.splits),
        "max_turns": served.max_turns,
        "max_turns_eval": served.max_turns_eval,
        "mean_over_families": served.mean_over_families,
        "prompt_by_task": _overridden(served, "standing_messages"),
        "tools_by_task": tools_by_task,
        "tools": None if tools_by_task else served.tools(),
        "checks_task_ids": _overridden(served, "check_task_id"),
    }


def _overridden(served: type[TextEnv], method: str) -> bool:
    return getattr(served, method).__func__ is not getattr(TextEnv, method).__func__


def _add_questions(app: Any, served: type[TextEnv]) -> None:
    """Add what OpenEnv has no place for: task lists, prompts, checks; plain functions, which FastAPI threads."""
    described = describe(served)

    def text_env() -> dict[str, Any]:
        return described

    def tasks(split: str, options: str = "{}") -> list[dict[str, str]]:
        found = served.tasks(split, **json.loads(options))
        return [{"task_id": task.task_id, "family": task.family} for task in found]

    def prompt(task_id: str | None = None) -> dict[str, Any]:
        return {"messages": served.standing_messages(task_id), "tools": served.tools(task_id)}

    def check(task_id: str | None = None) -> dict[str, Any]:
        if task_id is None:
            served.check_requirements()
        else:
            served.check_task_id(task_id)
        return {}

    summaries: dict[str, tuple[Callable[..., Any], str]] = {
        ROOT: (text_env, "What the environment says of itself"),
        f"{ROOT}/tasks": (tasks, "The tasks of a split; options as JSON"),
        f"{ROOT}/prompt": (prompt, "Standing messages and tools of a task"),
        f"{ROOT}/check": (check, "Whether everything needed is there; whether a task id exists"),
    }
    for path, (function, summary) in summaries.items():
        app.get(path, tags=[_TAG], summary=summary)(function)
    response = load("fastapi.responses").JSONResponse

    async def tell(request: Any, error: Exception) -> Any:
        return response({"raised": spoken(error)}, status_code=400)

    # What a client can cause is told to it; anything else is printed here too.
    for kind in (EnvAdapterError, TypeError, ValueError, Exception):
        app.add_exception_handler(kind, tell)


class _Guard:
    """Lets requests and WebSockets in that carry the token: `Authorization: Bearer TOKEN`, or Basic with it as
    password, which is all that a WebSocket's address can carry.
    """

    def __init__(self, app: App, token: str) -> None:
        self._app = app
        self._token = token.encode("utf-8")

    async def __call__(self, scope: Scope, receive: Callable[..., Any], send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._admits(dict(scope["headers"])):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})  # before it was accepted: HTTP 403
        else:
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b'{"detail": "token missing or wrong"}'})

    def _admits(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, value = headers.get(b"authorization", b"").partition(b" ")
        given = value.strip()
        if kind.lower() == b"basic":
            try:
                given = base64.b64decode(given, validate=True).partition(b":")[2]
            except binascii.Error:
                return False
        return kind.lower() in (b"basic", b"bearer") and hmac.compare_digest(given, self._token)
