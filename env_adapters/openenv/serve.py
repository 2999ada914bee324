"""`cope-trl envs serve`: an environment behind an OpenEnv server, until Ctrl-C."""

import argparse
import json
import os
import signal
import socket
import sys
import threading
from typing import Any

from env_adapters.errors import EnvAdapterError
from env_adapters.openenv.connection import MAX_MESSAGE_MB, TOKEN_VARIABLE
from env_adapters.openenv.describe import is_loopback
from env_adapters.openenv.library import load
from env_adapters.openenv.server import DEADLINE, ServerApp, build_app

# How long sessions may take to end after Ctrl-C, in seconds.
GOODBYE_SECONDS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("name", help="registry name")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks a free one")
    parser.add_argument("--max-sessions", type=int, default=64, help="sessions at a time (default: 64)")
    parser.add_argument("--deadline", type=float, default=DEADLINE, help="seconds a call may take (default: 100)")
    parser.add_argument("--options", default="{}", help="arguments of the environment's constructor, as JSON")
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE, ""),
        help=f"what clients must know (default: ${TOKEN_VARIABLE}, where others on this machine do not see it)",
    )


def serve(args: argparse.Namespace) -> None:
    """Serve until Ctrl-C or a SIGTERM.

    Raises:
        EnvAdapterError: the environment cannot be served, the options are no JSON object, or the port is taken.
    """
    options = _options(args.options)
    app = build_app(
        args.name, options=options, max_sessions=args.max_sessions, token=args.token, deadline=args.deadline
    )
    listening = _bind(args.host, args.port)
    uvicorn = load("uvicorn")

    async def startup(server: Any, sockets: Any = None) -> None:
        await uvicorn.Server.startup(server, sockets)
        _announce(args, listening.getsockname()[1])  # not sooner: from here on, Ctrl-C is the server's

    config = uvicorn.Config(
        app,
        log_level="warning",
        ws_max_size=MAX_MESSAGE_MB << 20,
        timeout_graceful_shutdown=GOODBYE_SECONDS,
    )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end as Ctrl-C does
    try:
        type("Server", (uvicorn.Server,), {"startup": startup})(config).run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        _end(app)
    print(f"Stopped serving {args.name!r}.", flush=True)


def _options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise EnvAdapterError(f"`--options` is {text!r}, which is no JSON: {error}.") from error
    if not isinstance(options, dict):
        raise EnvAdapterError(f'`--options` is {text!r}; write a JSON object, for example \'{{"size": "tiny"}}\'.')
    return options


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        raise EnvAdapterError(
            f"Cannot listen on `--host` {host} and `--port` {port}: {error}. Choose another port, or 0 for a free one."
        ) from error


def _announce(args: argparse.Namespace, port: int) -> None:
    wildcard = args.host in ("0.0.0.0", "::")
    shown = socket.gethostname() if wildcard else f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{shown}:{port}"
    print(f"Serving {args.name!r} at {url} ({args.max_sessions} sessions, {'a' if args.token else 'no'} token).")
    print(f"Play it:   make('openenv:{url}')   load_tasks('openenv:{url}')   --environment openenv:{url}")
    if args.token:
        print(f"There, set {TOKEN_VARIABLE} to the same token.")
    print("Ctrl-C ends it.", flush=True)
    if not args.token and not is_loopback(args.host):
        print(
            f"Warning: everybody who reaches {args.host} port {port} can play, without a token and unencrypted. Set "
            f"{TOKEN_VARIABLE}, and put a reverse proxy with TLS in front where the network is not your own.",
            file=sys.stderr,
            flush=True,
        )


def _end(app: ServerApp) -> None:
    """End what still plays; a thread in a `step` that nothing wakes must not keep the process alive."""
    ending = threading.Thread(target=app.kill, daemon=True)
    ending.start()
    ending.join(GOODBYE_SECONDS)
