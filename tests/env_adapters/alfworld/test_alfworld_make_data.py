"""Generated games: the benchmark's format, all families, the same from the same seed, nothing written over."""

import hashlib
import json
import random
import re
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

from env_adapters.alfworld import make_data
from env_adapters.alfworld.engine import Engine
from env_adapters.alfworld.games import FAMILIES, MANIFEST, game_list
from env_adapters.alfworld.problem import mangle
from env_adapters.alfworld.scenes import draw_world, load_scene, type_of
from env_adapters.errors import EnvAdapterError, EnvDataError

FACT = re.compile(r"^ +\((\w+) ([^()]+)\)$", re.MULTILINE)


def problem_facts(path: Path) -> list[tuple[str, ...]]:
    text = json.loads(path.read_text())["pddl_problem"]
    return [(name, *arguments.split()) for name, arguments in FACT.findall(text.partition("(:goal")[0])]


def contents(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def few(monkeypatch):
    """Only the two families that are quickest to make."""
    chosen = {task_type: family for task_type, family in FAMILIES.items() if family in ("clean", "pick2")}
    monkeypatch.setattr(make_data, "FAMILIES", chosen)


def test_the_same_seed_makes_the_same_files(few, tmp_path):
    make_data.make_games(tmp_path / "a", 1, 1, seed=11)
    make_data.make_games(tmp_path / "b", 1, 1, seed=11)
    make_data.make_games(tmp_path / "c", 1, 1, seed=12)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a == b
    assert len(a) == 4 * 3 + 1
    assert not set(a) & set(c) - {MANIFEST}
    assert not set(a.values()) & set(c.values())


def test_files_are_laid_out_as_the_benchmark_lays_them_out(games_root):
    for game in game_list(games_root).games:
        path = game.file(games_root)
        assert {other.name for other in path.parent.iterdir()} == {
            "game.tw-pddl",
            "traj_data.json",
            "initial_state.pddl",
        }
        content = json.loads(path.read_text())
        assert set(content) == {"pddl_domain", "grammar", "pddl_problem", "solvable", "walkthrough"}
        assert content["solvable"] is True
        assert content["walkthrough"]
        assert content["pddl_problem"] == (path.parent / "initial_state.pddl").read_text()
        trajectory = json.loads((path.parent / "traj_data.json").read_text())
        target, receptacle = (trajectory["pddl_params"][name] for name in ("object_target", "parent_target"))
        assert game.folder == "-".join(
            [
                trajectory["task_type"],
                target,
                "None",
                receptacle or trajectory["pddl_params"]["toggle_target"],
                str(trajectory["scene"]["scene_num"]),
            ]
        )
        words = trajectory["turk_annotations"]["anns"][0]["task_desc"]
        assert f"Your task is to: {words}." in content["grammar"]
        assert "UNKNOWN GOAL" not in content["grammar"]
        assert target.lower() in words


def test_no_game_is_made_twice_and_the_splits_share_none(games_root):
    games = game_list(games_root).games
    worlds = Counter()
    for game in games:
        facts = problem_facts(game.file(games_root))
        kinds = {fact[1]: fact[2] for fact in facts if fact[0] == "objectType"}
        where = sorted((kinds[fact[1]], fact[2]) for fact in facts if fact[0] == "inReceptacle")
        worlds[game.folder, tuple(where)] += 1
    assert set(worlds.values()) == {1}
    assert {game.split for game in games} == {"train", "test"}


def test_every_receptacle_has_a_place_of_its_own_and_can_be_reached(games_root):
    """Two at one place make `go to` the second fail (alfworld#131)."""
    engine = Engine()
    for game in game_list(games_root).games[::5]:
        places = [fact[2] for fact in problem_facts(game.file(games_root)) if fact[0] == "receptacleAtLocation"]
        assert len(set(places)) == len(places) > 3
        turn = engine.load(game.file(games_root))
        reachable = [command for command in turn.commands if command.startswith("go to ")]
        assert len(reachable) == len(places)
        for command in reachable:
            turn = engine.step(command)
            assert turn.accepted
            assert turn.observation.startswith(f"You arrive at {command.removeprefix('go to ')}. ")


def test_places_are_distinct_in_every_floor_plan():
    scenes = [scene for number in range(1, 431) if (scene := load_scene(number)) is not None]
    assert len(scenes) > 100
    for scene in scenes:
        places = [*scene.receptacles.values(), scene.start]
        assert len(set(places)) == len(places)
        assert all(re.fullmatch(r"loc\|-?\d+\|-?\d+\|[0-3]\|-?\d+", place) for place in places)


@pytest.mark.parametrize("family", FAMILIES.values())
def test_no_drawn_goal_holds_at_the_start(family):
    rng = random.Random(0)
    for _ in range(30):
        world = draw_world(family, rng)
        targets = [type_of(where) for name, where in world.placed.items() if type_of(name) == world.target]
        assert len(targets) == (2 if family == "pick2" else 1)
        assert world.receptacle not in targets
        assert world.family == family
        assert bool(world.lamp) == (family == "look")


def test_ids_are_spelled_as_pddl_and_the_names_need():
    assert mangle("Sink|-01.90|+00.97|-01.50|SinkBasin") == (
        "Sink_bar__minus_01_dot_90_bar__plus_00_dot_97_bar__minus_01_dot_50_bar_SinkBasin"
    )


def test_a_folder_with_games_is_never_written_over(games_root, paper_root):
    for root in (games_root, paper_root):
        with pytest.raises(EnvDataError, match="holds games already; choose another folder"):
            make_data.make_games(root)


@pytest.mark.parametrize("numbers", [(0, 1), (1, -2)])
def test_numbers_of_games_are_checked(tmp_path, numbers):
    with pytest.raises(EnvAdapterError, match="both must be 1 or more"):
        make_data.make_games(tmp_path, *numbers)
    assert not list(tmp_path.iterdir())


def test_a_run_that_was_broken_off_is_refused(few, tmp_path, monkeypatch):
    monkeypatch.setattr(make_data, "_write_manifest", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_data.make_games(tmp_path / "games", 1, 1)
    with pytest.raises(EnvDataError, match="not the paper's"):
        game_list(tmp_path / "games")
    with pytest.raises(EnvDataError, match="delete this one first"):
        make_data.make_games(tmp_path / "games", 1, 1)


def test_a_walkthrough_that_does_not_win_is_an_error(few, tmp_path, monkeypatch):
    monkeypatch.setattr(make_data, "walkthrough", lambda world, name_of: ["look"])
    with pytest.raises(EnvAdapterError, match=r"not won by its walkthrough \['look'\].*'alfworld': '0"):
        make_data.make_games(tmp_path / "games", 1, 1)


def test_the_command(few, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    root = tmp_path / "games"
    make_data.main(["--root", str(root), "--per-family", "2", "--test-per-family", "1", "--seed", "3"])
    out = capsys.readouterr().out
    assert "train: 2 games of the family 'clean'" in out
    assert f"Wrote 6 games to {root}." in out
    assert f"export ALFWORLD_DATA={root}" in out
    manifest = json.loads((root / MANIFEST).read_text())
    assert (manifest["seed"], manifest["format"], len(manifest["train"]), len(manifest["test"])) == (3, 1, 4, 2)
    assert set(manifest["versions"]) == {"alfworld", "textworld", "fast-downward-textworld"}
    assert [game.family for game in game_list(root).games] == ["clean", "clean", "pick2", "pick2", "clean", "pick2"]


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit):
        make_data.main(["--help"])
    assert "cope-trl envs make-data alfworld" in capsys.readouterr().out
