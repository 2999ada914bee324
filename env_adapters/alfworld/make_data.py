"""`cope-trl envs make-data alfworld`: make games of the benchmark's own format, offline.

Rooms, objects, goals and sentences come from the `alfworld` wheel; which object lies where is drawn. Every game is
played to its end by its walkthrough before it is written. They are meant for trying things out and for tests: results
on them are not results on ALFWorld.
"""

import argparse
import functools
import json
import os
import random
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from env_adapters.alfworld.engine import Engine, borrow, give_back
from env_adapters.alfworld.env import AlfWorldEnv
from env_adapters.alfworld.games import DATA_FOLDER, FAMILIES, MANIFEST, MANIFEST_FORMAT, Game, data_root
from env_adapters.alfworld.problem import pddl_problem, task_in_words, walkthrough
from env_adapters.alfworld.scenes import World, draw_world, type_of
from env_adapters.errors import EnvAdapterError, EnvDataError


def main(argv: list[str]) -> None:
    """Parse the command line and make the games."""
    parser = argparse.ArgumentParser(
        prog="cope-trl envs make-data alfworld",
        description="Make ALFWorld games offline, from what the alfworld package ships. All six families.",
    )
    parser.add_argument("--root", help="folder to write to; $ALFWORLD_DATA or ~/.cache/alfworld by default")
    parser.add_argument("--per-family", type=int, default=20, metavar="N", help="training games of each family")
    parser.add_argument("--test-per-family", type=int, default=5, metavar="N", help="test games of each family")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed makes the same games")
    args = parser.parse_args(argv)
    root = make_games(args.root, args.per_family, args.test_per_family, args.seed, progress=print)
    print(f"Wrote {(args.per_family + args.test_per_family) * len(FAMILIES)} games to {root}.")
    if root != data_root():
        print(f"To play them: export ALFWORLD_DATA={root}")


def make_games(
    root: str | os.PathLike[str] | None = None,
    per_family: int = 20,
    test_per_family: int = 5,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Path:
    """Make games of all families, and the manifest that lists them.

    Args:
        root: folder to write to, which must hold no games yet; see [`~env_adapters.alfworld.games.data_root`].
        per_family: number of training games of each family.
        test_per_family: number of test games of each family; no game is in both splits.
        seed: the same seed and numbers make the same files, with the same version of `alfworld`.
        progress: called with a line of text after each family of a split.

    Returns:
        The folder, as an absolute path.

    Raises:
        MissingDependencyError: `alfworld` is not installed.
        EnvDataError: the folder holds games already.
        EnvAdapterError: a number of games is not positive.
    """
    AlfWorldEnv.check_requirements()
    place = data_root(root)
    if per_family < 1 or test_per_family < 1:
        raise EnvAdapterError(
            f"`per_family` is {per_family} and `test_per_family` {test_per_family}; both must be 1 or more."
        )
    if (place / MANIFEST).exists() or (place / DATA_FOLDER).exists():
        raise EnvDataError(
            f"`root` is {str(place)!r}, which holds games already; choose another folder, or delete this one first."
        )
    engine = borrow()
    listed: dict[str, list[Game]] = {"train": [], "test": []}
    drawn: set[str] = set()
    for split, number in {"train": per_family, "test": test_per_family}.items():
        # The families in the order in which the benchmark's folders sort.
        for family in (FAMILIES[task_type] for task_type in sorted(FAMILIES)):
            rng = random.Random(f"{seed} {split} {family}")
            for _ in range(number):
                listed[split].append(_make_game(place, split, family, rng, drawn, engine))
            if progress is not None:
                progress(f"{split}: {number} games of the family {family!r}")
    give_back(engine)
    _write_manifest(place, seed, listed)
    return place


def _make_game(root: Path, split: str, family: str, rng: random.Random, drawn: set[str], engine: Engine) -> Game:
    """Draw a game that was not drawn before, and write its three files."""
    while True:
        world = draw_world(family, rng)
        # Two games with the same things in the same places and the same goal are one game.
        content = json.dumps([world.folder, sorted((type_of(k), v) for k, v in world.placed.items())])
        if content not in drawn:
            break
    drawn.add(content)
    trial = f"trial_T2019{rng.randint(901, 930):04d}_{rng.randrange(10**6):06d}_{rng.randrange(10**6):06d}"
    game = Game(-1, split, world.folder, trial)
    problem, words = pddl_problem(world, trial), task_in_words(world, rng)
    content_of_game = {
        "pddl_domain": _shipped("ALFRED_PDDL_PATH"),
        "grammar": _shipped("ALFRED_TWL2_PATH").replace("UNKNOWN GOAL", words),
        "pddl_problem": problem,
        "solvable": True,
        "walkthrough": [],
    }
    path = game.file(root)
    path.parent.mkdir(parents=True)
    _write_json(path, content_of_game)
    content_of_game["walkthrough"] = _solve(world, path, engine)
    _write_json(path, content_of_game)
    _write_json(path.parent / "traj_data.json", _trajectory(world, trial, words))
    (path.parent / "initial_state.pddl").write_text(problem, encoding="utf-8")
    return game


def _solve(world: World, path: Path, engine: Engine) -> list[str]:
    """The walkthrough of a written game, after it was seen to win at its last command and not before."""
    engine.load(path)
    commands = walkthrough(world, engine.name_of)
    turns = [engine.step(command) for command in commands]
    if not all(turn.accepted for turn in turns) or [turn.won for turn in turns] != [False] * (len(turns) - 1) + [True]:
        raise EnvAdapterError(
            f"The game {str(path)!r} is not won by its walkthrough {commands}. This installation of ALFWorld "
            f"({_versions()}) differs from the versions it was written for; see docs/environments/alfworld.md."
        )
    return commands


def _trajectory(world: World, trial: str, words: str) -> dict[str, Any]:
    """What other ALFWorld tools read of a game: its task in numbers and in words."""
    return {
        "task_id": trial,
        "task_type": world.task_type,
        "pddl_params": {
            "object_target": world.target,
            "parent_target": world.receptacle,
            "toggle_target": world.lamp,
            "mrecep_target": "",
            "object_sliced": False,
        },
        "scene": {"floor_plan": f"FloorPlan{world.scene.number}", "scene_num": world.scene.number},
        "turk_annotations": {"anns": [{"task_desc": words, "high_descs": []}]},
    }


def _write_manifest(root: Path, seed: int, listed: dict[str, list[Game]]) -> None:
    # Last, so that a run that was broken off leaves a folder that is refused, not a short list.
    _write_json(
        root / MANIFEST,
        {
            "format": MANIFEST_FORMAT,
            "made_by": "cope-trl envs make-data alfworld",
            "seed": seed,
            "versions": _versions(),
            **{
                split: [{"folder": game.folder, "trial": game.trial} for game in games]
                for split, games in listed.items()
            },
        },
    )


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("alfworld", "textworld", "fast-downward-textworld")}


@functools.cache
def _shipped(constant: str) -> str:
    """A file of the wheel, by the name of the constant that holds its path."""
    import alfworld.info

    return Path(getattr(alfworld.info, constant)).read_text(encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
