"""Steps per second in ALFWorld: this package's engine against the stock one, in one run.

    python examples/benchmarks/alfworld_speed.py [--root DATA] [--steps 50]

Both play the same random commands in the same games, one of each family, turn by turn in alternation, so that other
work on the machine slows both alike; every answer is compared. Loading a game is timed apart: new to the process, and
again (a rollout of a task that was played before). Memory is measured last, for environments that play at once. The
last line is the result as JSON. Needs `pip install 'cope_trl[alfworld]'`, and games in `$ALFWORLD_DATA` or `--root`;
without any, some are made in a temporary folder first.
"""

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from env_adapters.alfworld import AlfWorldEnv
from env_adapters.alfworld.engine import Engine
from env_adapters.alfworld.games import GameList, game_list
from env_adapters.alfworld.make_data import make_games
from env_adapters.errors import EnvDataError


class Clock:
    """Adds up the seconds of this thread's own work, and counts."""

    def __init__(self) -> None:
        self.seconds, self.count = 0.0, 0

    def time(self, function: Any, *args: Any) -> Any:
        start = time.thread_time()
        result = function(*args)
        self.seconds += time.thread_time() - start
        self.count += 1
        return result

    @property
    def mean_ms(self) -> float:
        return 1000 * self.seconds / self.count


def stock_engine() -> Any:
    """The engine as ALFWorld itself uses it."""
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
    from textworld.envs import PddlEnv

    return AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True)), shuffle=False)


def compare(paths: list[Path], steps: int) -> dict[str, Clock]:
    """Play every game with both, and time each of the things they do."""
    clocks = {name: Clock() for name in ("step", "stock step", "first load", "load again", "stock load")}
    engine, stock = Engine(), stock_engine()
    for path in paths:
        clocks["first load"].time(engine.load, path)
        turn = clocks["load again"].time(engine.load, path)
        state = clocks["stock load"].time(lambda path=path: stock.load(str(path)) or stock.reset())
        rng = random.Random(0)
        for _ in range(steps):
            assert list(turn.commands) == state["admissible_commands"]
            command = rng.choice(turn.commands)
            turn = clocks["step"].time(engine.step, command)
            state, _, _ = clocks["stock step"].time(stock.step, command)
            assert (turn.observation, turn.won) == (state.feedback, state["won"])
    return clocks


def resident_mb() -> float | None:
    """Resident memory of this process in MB (2^20 bytes), or `None` where there is no /proc."""
    gc.collect()
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def memory_per_environment(games: GameList, environments: int) -> float | None:
    """MB that one more environment takes, when many play the training games at once."""
    playing = [AlfWorldEnv(games.root) for _ in range(environments)]
    train = games.split("train")
    for game in train:  # so that what all share is there before
        playing[0].reset(options={"task_id": game.task_id})
    before = resident_mb()
    for number, env in enumerate(playing):
        env.reset(options={"task_id": train[number % len(train)].task_id})
        env.step("Action: look")
    after = resident_mb()
    for env in playing:
        env.close()
    return None if before is None or after is None else (after - before) / (environments - 1)


def games_to_play(root: str | None, made_in: str) -> GameList:
    try:
        return game_list(root)
    except EnvDataError:
        if root is not None:
            raise
        print("No games in $ALFWORLD_DATA; making twelve.", file=sys.stderr)
        return game_list(make_games(Path(made_in) / "games", per_family=1, test_per_family=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="data folder; $ALFWORLD_DATA by default")
    parser.add_argument("--steps", type=int, default=50, help="steps in each game")
    parser.add_argument("--environments", type=int, default=32, help="environments to measure memory with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made_in:
        games = games_to_play(args.root, made_in)
        first = {game.family: game for game in reversed(games.games)}
        clocks = compare([game.file(games.root) for game in first.values()], args.steps)
        memory = memory_per_environment(games, args.environments)
    for name, clock in clocks.items():
        print(f"{name:12}{clock.mean_ms:10.1f} ms, mean of {clock.count}")
    result = {name.replace(" ", "_") + "_ms": round(clock.mean_ms, 2) for name, clock in clocks.items()}
    result["times_as_fast"] = round(clocks["stock step"].mean_ms / clocks["step"].mean_ms, 1)
    result["mb_per_environment"] = None if memory is None else round(memory, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
