"""The game list: the paper's split, AgentGym's ids, one clear error for every folder that is not what it should be."""

import json
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from env_adapters.alfworld import AlfWorldEnv
from env_adapters.alfworld.games import MANIFEST, data_root, game_list
from env_adapters.errors import EnvDataError, UnknownSplitError, UnknownTaskError

ROOT = Path(__file__).parents[3]
# Paper, Table 8, written down once more.
TRAIN = {"pick": 672, "look": 196, "clean": 448, "heat": 321, "cool": 394, "pick2": 389}
TEST = {"pick": 46, "look": 19, "clean": 37, "heat": 25, "cool": 28, "pick2": 45}


def test_a_folder_with_the_papers_games_is_the_papers_split(paper_root):
    train, test = (AlfWorldEnv.tasks(split, root=paper_root) for split in ("train", "test"))
    assert (len(train), len(test)) == (2420, 200)
    assert Counter(task.family for task in train) == TRAIN
    assert Counter(task.family for task in test) == TEST
    assert [task.task_id for task in (*train, *test)] == [f"alfworld_{number}" for number in range(2620)]
    assert {task.split for task in train} == {"train"}
    with pytest.raises(UnknownSplitError, match="'valid_train'.*'train', 'test'"):
        AlfWorldEnv.tasks("valid_train", root=paper_root)


def test_ids_number_the_sorted_folders(paper_root):
    games = game_list(paper_root)
    for split in ("train", "test"):
        names = [(game.folder, game.trial) for game in games.split(split)]
        assert names == sorted(names)
    assert games.games[0].family == "look"  # the first of the task types in alphabetical order
    assert games.find("2420").file(paper_root).parts[-4:-2] == ("valid_train", games.find("2420").folder)
    assert games.find("2419").file(paper_root).parts[-4] == "train"


def test_agentgyms_lists_name_the_games_and_their_numbers(listed_root):
    games = game_list(listed_root)
    rows = {row["item_id"]: row for name in ("train", "test")
            for row in json.loads((listed_root / f"mappings_{name}.json").read_text())}  # fmt: skip
    assert [(game.index, game.folder, game.trial) for game in games.games] == [
        (number, row["task_type"], row["task_id"]) for number, row in sorted(rows.items())
    ]
    assert (len(games.split("train")), len(games.split("test"))) == (2420, 200)


@pytest.mark.parametrize("task_id", ["alfworld_17", "17", "00017"])
def test_forms_of_an_id(paper_root, task_id):
    games = game_list(paper_root)
    game = games.find(task_id)
    assert game.task_id == "alfworld_17"
    assert games.find(f"{game.folder}_{game.trial}") is game


@pytest.mark.parametrize(
    "task_id", ["alfworld_2620", "2620", "99999999", "look_at_obj_in_light-Mug-None-DeskLamp-1_trial_T1"]
)
def test_ids_of_games_that_are_not_there(paper_root, monkeypatch, task_id):
    monkeypatch.setenv("ALFWORLD_DATA", str(paper_root))
    with pytest.raises(UnknownTaskError, match="'alfworld_0' to 'alfworld_2619'") as caught:
        AlfWorldEnv.check_task_id(task_id)
    assert repr(task_id) in str(caught.value)


@pytest.mark.parametrize("task_id", ["", "-1", "17.0", "alfworld_", "sciworld_17", "٣", "9" * 5000, "../x_trial_1"])
def test_text_that_is_no_id_needs_no_data(monkeypatch, tmp_path, task_id):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nothing"))
    with pytest.raises(UnknownTaskError, match="read 'alfworld_17', '17', or") as caught:
        AlfWorldEnv.check_task_id(task_id)
    assert repr(task_id) in str(caught.value)


def test_checking_ids_is_cheap(paper_root, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(paper_root))
    AlfWorldEnv.check_task_id("0")
    start = time.process_time()
    for number in range(2620):
        AlfWorldEnv.check_task_id(f"alfworld_{number}")
    assert time.process_time() - start < 2.0


def test_the_list_is_read_again_when_it_changes(listed_root):
    before = game_list(listed_root)
    assert game_list(str(listed_root)) is before
    rows = json.loads((listed_root / "mappings_train.json").read_text())
    rows[0]["item_id"], rows[1]["item_id"] = rows[1]["item_id"], rows[0]["item_id"]
    (listed_root / "mappings_train.json").write_text(json.dumps(rows, indent=1))
    after = game_list(listed_root)
    assert after.games[:2] != before.games[:2]
    assert after.games[0].trial == before.games[1].trial


# ------------------------------------------------------------------------------------------ folders that are not right


def message(root: Path) -> str:
    with pytest.raises(EnvDataError) as caught:
        game_list(root)
    return str(caught.value)


def test_no_data(tmp_path):
    said = message(tmp_path / "nothing")
    assert str(tmp_path / "nothing") in said
    assert "`alfworld-download`" in said
    assert "`cope-trl envs make-data alfworld`" in said


def test_where_data_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_root() == tmp_path / ".cache" / "alfworld"
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "set"))
    assert data_root() == tmp_path / "set"
    assert data_root("~/given") == tmp_path / "given"


def test_another_number_of_games_names_both_and_the_remedy(listed_root):
    for split in ("train", "test"):
        (listed_root / f"mappings_{split}.json").unlink()
    said = message(listed_root)
    assert "Found 2421 train (672 pick, 197 look," in said
    assert "201 test (46 pick, 20 look," in said
    assert "needed 2420 train (672 pick, 196 look, 448 clean, 321 heat, 394 cool, 389 pick2)" in said
    assert "mappings_train.json and mappings_test.json" in said
    assert "`alfworld-download`" in said


def test_one_list_alone(listed_root):
    (listed_root / "mappings_test.json").unlink()
    assert "mappings_test.json' is missing beside the other list" in message(listed_root)


def test_a_list_that_is_not_the_papers(listed_root):
    path = listed_root / "mappings_test.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:-1]))
    assert "199 test" in message(listed_root)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[{", "cannot be read as JSON"),
        ('[{"item_id": 1}]', "must list games with the keys 'task_type' and 'task_id'"),
        ("7", "must list games with the keys"),
        ('[{"task_type": "../../etc", "task_id": "trial_1"}]', "no game of a known family"),
        ('[{"task_type": "fly-Mug-None-Desk-1", "task_id": "trial_1"}]', "no game of a known family"),
    ],
)
def test_a_damaged_list(listed_root, content, says):
    (listed_root / "mappings_train.json").write_text(content)
    assert says in message(listed_root)


def test_a_listed_game_without_a_file(listed_root):
    rows = json.loads((listed_root / "mappings_train.json").read_text())
    rows[5]["task_id"] = "trial_T2018_9_9"
    (listed_root / "mappings_train.json").write_text(json.dumps(rows))
    said = message(listed_root)
    assert said.startswith("1 of 2620 games have no file")
    assert f"{rows[5]['task_type']}/trial_T2018_9_9/game.tw-pddl" in said
    assert "`alfworld-download`" in said


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[]", "no list of games of format 1"),
        ('{"format": 2, "train": [], "test": []}', "no list of games of format 1"),
        ('{"format": 1, "train": [{"folder": 3}], "test": []}', "must list games with the keys 'folder' and 'trial'"),
    ],
)
def test_a_manifest_of_another_kind(tmp_path, content, says):
    (tmp_path / "json_2.1.1").mkdir()
    (tmp_path / MANIFEST).write_text(content)
    assert says in message(tmp_path)


def test_a_game_listed_twice(tmp_path):
    (tmp_path / "json_2.1.1").mkdir()
    row = {"folder": "look_at_obj_in_light-Mug-None-DeskLamp-301", "trial": "trial_T2018_1_1"}
    (tmp_path / MANIFEST).write_text(json.dumps({"format": 1, "train": [row], "test": [row]}))
    assert "name 1 games twice" in message(tmp_path)


def test_listing_imports_no_engine(paper_root):
    code = (
        "import sys; from env_adapters.alfworld import AlfWorldEnv as E; E(); E.tasks('train', root=sys.argv[1]);"
        "bad = {'alfworld', 'textworld', 'fast_downward', 'torch', 'transformers'} & set(sys.modules);"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code, str(paper_root)], check=True, cwd=ROOT)
