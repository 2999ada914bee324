"""What `environment_throughput.py` plays: each adapter's tasks with replies that suit them, and the stock packages.

The replies are recorded once, from the adapter's own expert or, in ScienceWorld, from the simulator's gold paths;
AppWorld gets a fixed script of API calls. All of them are valid actions.
"""

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_adapters import TextEnv, make
from env_adapters.errors import EnvDataError
from env_adapters.registry import resolve

SCIENCEWORLD_TYPES = ("find-living-thing", "use-thermometer", "power-component", "lifespan-longest-lived")
APPWORLD_CODE = (
    "print(apis.supervisor.show_profile())",
    "print(apis.api_docs.show_app_descriptions())",
    "print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))",
    "numbers = [n * n for n in range(1000)]",
    "print(sum(numbers))",
    "apis.supervisor.complete_task(answer='nothing')",
)
TASKS, MAX_TURNS = 4, 30


@dataclass(frozen=True)
class Play:
    """An adapter with the episodes to play on it.

    Attributes:
        make: makes one more environment.
        episodes: replies by task id.
        stock: starts the stock package's own environment, or `None` where there is none to compare with; returns what
            begins a task, what takes one reply, and what ends it all.
        why_no_stock: why there is none.
    """

    make: Callable[[], Any]
    episodes: dict[str, list[str]]
    stock: "Callable[[], Stock] | None" = None
    why_no_stock: str = ""


@dataclass(frozen=True)
class Stock:
    """A running environment of the stock package, which is told tasks and replies as the adapter is."""

    reset: Callable[[str], None]
    step: Callable[[str], None]
    close: Callable[[], None]


@contextmanager
def prepared(name: str) -> Iterator[Play]:
    """The adapter and its episodes; whatever had to be made for them lasts as long as the context.

    Raises:
        EnvAdapterError: something it needs is missing; the message says what.
    """
    resolve(name)  # an unknown name is an error here, not later
    if name == "tau2":
        os.environ.setdefault("TAU2_CUSTOMER", "scripted")
    if name == "webshop":
        yield _webshop_play(name)  # in the generated catalogue, which needs no files
        return
    if name != "alfworld":
        resolve(name).check_requirements()
        yield _PLAYS.get(name, _expert_play)(name)
        return
    from env_adapters.alfworld.games import game_list

    with tempfile.TemporaryDirectory() as folder:
        resolve(name).check_requirements()
        try:
            game_list()
        except EnvDataError:
            from env_adapters.alfworld.make_data import make_games

            os.environ["ALFWORLD_DATA"] = str(make_games(Path(folder) / "games", per_family=1, test_per_family=1))
        yield _alfworld_play(name)


def _expert_play(
    name: str,
    stock: Callable[[], Stock] | None = None,
    why: str = "",
    kind: Callable[[], Any] | None = None,
    **data: str,
) -> Play:
    """Tasks of as many families as there are, won by the adapter's own expert."""
    kind = kind or functools.partial(make, name)
    rows = resolve(name).tasks("train", **data)
    firsts = list({row.family: row.task_id for row in reversed(rows)}.values())
    task_ids = list(dict.fromkeys([*firsts[:TASKS], *(row.task_id for row in rows[:TASKS])]))[:TASKS]
    env = kind()
    episodes = {}
    for task_id in task_ids:
        env.reset(options={"task_id": task_id})
        replies, done = [], False
        while not done and len(replies) < MAX_TURNS and (action := env.expert_action()) is not None:
            replies.append(as_reply(env, action))
            done = env.step(replies[-1])[2]
        episodes[task_id] = replies
    env.close()
    return Play(kind, episodes, stock, why or "there is no stock package")


def as_reply(env: TextEnv, action: str) -> str:
    """An action as an agent would say it; an expert of tool calls gives whole replies."""
    return f"Action: {action}" if env.protocol.name == "react" else action


def _webshop_play(name: str) -> Play:
    from env_adapters.webshop import WebShopEnv

    why = "the original has no package to install"
    return _expert_play(name, why=why, kind=functools.partial(WebShopEnv, data="synthetic"), data="synthetic")


def _tau2_play(name: str) -> Play:
    return _expert_play(name, why="the package's own environment needs a model to play the customer")


def _appworld_play(name: str) -> Play:
    rows = resolve(name).tasks("train")
    replies = [f"```python\n{code}\n```" for code in APPWORLD_CODE]
    why = "the stock class runs in AppWorld's interpreter only, one world a process"
    return Play(functools.partial(make, name), {row.task_id: replies for row in rows[:TASKS]}, None, why)


def _scienceworld_play(name: str) -> Play:
    from env_adapters.scienceworld.jvm import GOLD_HEAP_MB, Simulator
    from env_adapters.scienceworld.splits import draw_split, find_entry

    simulator = Simulator(GOLD_HEAP_MB)
    try:
        simulator.connect()
        first = {entry.task_type: entry for entry in reversed(draw_split("all"))}  # variation 0 of each type
        episodes = {}
        for task_type in SCIENCEWORLD_TYPES:
            entry = first[task_type]
            simulator.load(task_type, entry.variation, "", gold=True)
            path = simulator.gold_actions()[:MAX_TURNS]
            # The path's end may hold actions that come after the success.
            simulator.load(task_type, entry.variation, "")
            simulator.step("look around")
            scores = [simulator.step(action)[1] for action in path]
            last = next((number for number, score in enumerate(scores, 1) if score >= 1), len(path))
            episodes[entry.task_id] = [f"Action: {action}" for action in path[:last]]
    finally:
        simulator.stop()

    def stock() -> Stock:
        from scienceworld import ScienceWorldEnv

        env: Any = ScienceWorldEnv("boil")

        def reset(task_id: str) -> None:
            entry = find_entry(task_id)
            env.load(entry.task_type, entry.variation)
            env.reset()

        def close() -> None:
            process = env._gateway.java_process
            env.close()
            process.wait(timeout=60)

        return Stock(reset, lambda reply: env.step(reply.removeprefix("Action: ")), close)

    return Play(functools.partial(make, name), episodes, stock)


def _alfworld_play(name: str) -> Play:
    from env_adapters.alfworld.games import game_list

    def stock() -> Stock:
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
        from textworld.envs import PddlEnv

        env: Any = AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)
        games = game_list()

        def reset(task_id: str) -> None:
            env.load(str(games.find(task_id).file(games.root)))
            env.reset()

        return Stock(reset, lambda reply: env.step(reply.removeprefix("Action: ")), lambda: None)

    return _expert_play(name, stock)


_PLAYS: dict[str, Callable[[str], Play]] = {
    "appworld": _appworld_play,
    "scienceworld": _scienceworld_play,
    "tau2": _tau2_play,
}
