"""Generated games for the tests that play; a made-up data folder for those that only list."""

import json
from pathlib import Path

import pytest

from env_adapters.alfworld.games import DATA_FOLDER, FAMILIES, FOLDERS, GAME_FILE, PAPER_COUNTS


@pytest.fixture(scope="session")
def games_root(tmp_path_factory):
    """Three training games and one test game of each family, made once for all tests."""
    pytest.importorskip("alfworld")
    from env_adapters.alfworld.make_data import make_games

    return make_games(tmp_path_factory.mktemp("alfworld") / "games", per_family=3, test_per_family=1, seed=5)


@pytest.fixture
def data(games_root, monkeypatch):
    """The generated games, as the default data folder."""
    monkeypatch.setenv("ALFWORLD_DATA", str(games_root))
    return games_root


def write_games(root: Path, split: str, pairs: list[tuple[str, str]]) -> None:
    """Game files without content."""
    for folder, trial in pairs:
        place = root / DATA_FOLDER / FOLDERS[split] / folder / trial
        place.mkdir(parents=True)
        (place / GAME_FILE).touch()


def paper_pairs(split: str) -> list[tuple[str, str]]:
    """Folder and trial names in the numbers of the paper's Table 8."""
    task_types = {family: task_type for task_type, family in FAMILIES.items()}
    return [
        (f"{task_types[family]}-Mug-None-Desk-{number % 7}", f"trial_T2019090{len(split)}_{number:06d}_000000")
        for family, games in PAPER_COUNTS[split].items()
        for number in range(games)
    ]


@pytest.fixture(scope="session")
def paper_root(tmp_path_factory):
    """A folder with as many (empty) game files as the paper plays, and some that it does not."""
    root = tmp_path_factory.mktemp("paper")
    for split in FOLDERS:
        write_games(root, split, paper_pairs(split))
    write_games(root, "train", [("pick_and_place_with_movable_recep-Egg-Pan-Desk-3", "trial_T20190907_000000_000000")])
    write_games(root, "train", [("pick_heat_then_place_in_recep-EggSliced-None-Desk-3", "trial_T2019_0_0")])
    return root


@pytest.fixture(scope="session")
def download(tmp_path_factory):
    """A folder with more games than the paper plays."""
    root = tmp_path_factory.mktemp("download")
    for split in FOLDERS:
        more = ("look_at_obj_in_light-Mug-None-DeskLamp-301", f"trial_T2018_{len(split)}_1")
        write_games(root, split, [*paper_pairs(split), more])
    return root


@pytest.fixture
def listed_root(download, tmp_path):
    """The same with AgentGym's two lists beside it, which a test may change."""
    (tmp_path / DATA_FOLDER).symlink_to(download / DATA_FOLDER, target_is_directory=True)
    for split, first in {"train": 0, "test": 2420}.items():
        rows = [
            {"item_id": first + number, "task_type": folder, "task_id": trial}
            for number, (folder, trial) in enumerate(reversed(paper_pairs(split)))
        ]
        (tmp_path / f"mappings_{split}.json").write_text(json.dumps(rows))
    return tmp_path
