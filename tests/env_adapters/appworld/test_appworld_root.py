"""AppWorld's data root and task lists, which need neither AppWorld nor its interpreter."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from env_adapters.appworld import AppWorldEnv
from env_adapters.appworld.root import (
    DEFAULT_ROOT,
    SPLITS,
    check_task,
    find_root,
    lay_out_for_play,
    lay_out_for_scoring,
    task_ids,
)
from env_adapters.base import Task
from env_adapters.errors import EnvAdapterError, EnvDataError, UnknownSplitError, UnknownTaskError


def make_root(folder: Path, **counts: int) -> Path:
    """A root with empty databases, and the benchmark's numbers of tasks unless other ones are given."""
    data = folder / "data"
    for name in ("datasets", "tasks", "base_dbs", "api_docs/standard"):
        (data / name).mkdir(parents=True)
    for number, (split, size) in enumerate({**SPLITS, **counts}.items()):
        ids = [f"{number}b{scenario:05d}_{variation}" for scenario in range(size) for variation in (1, 2, 3)][:size]
        (data / "datasets" / f"{split}.txt").write_text("\n".join(ids) + "\n")
    for task_id in ("0b00000_1", "3b00001_2"):
        for name in ("dbs", "ground_truth"):
            (data / "tasks" / task_id / name).mkdir(parents=True)
        (data / "tasks" / task_id / "specs.json").write_text("{}")
        (data / "tasks" / task_id / "dbs" / "supervisor.jsonl").write_text("[]")
        (data / "tasks" / task_id / "ground_truth" / "answer.json").write_text("42")
    return folder


@pytest.fixture
def root(tmp_path, monkeypatch):
    made = make_root(tmp_path / "root")
    monkeypatch.setenv("APPWORLD_ROOT", str(made))
    return made


@pytest.mark.filterwarnings("error")
def test_splits_of_the_paper(root):
    assert {split: len(AppWorldEnv.tasks(split)) for split in AppWorldEnv.splits} == {
        "train": 90,
        "dev": 57,
        "test_normal": 168,
        "test_challenge": 417,
    }
    first, second, third, fourth = AppWorldEnv.tasks("train")[:4]
    assert first == Task("appworld", "0b00000_1", "0b00000", "train")
    assert (second.family, third.family, fourth.family) == ("0b00000", "0b00000", "0b00001")
    assert all(task.split == "test_normal" for task in AppWorldEnv.tasks("test_normal"))
    with pytest.raises(UnknownSplitError, match="`split` is 'test'"):
        AppWorldEnv.tasks("test")


def test_the_paper_turn_limits():
    assert (AppWorldEnv.max_turns, AppWorldEnv.max_turns_eval) == (30, 30)
    assert (AppWorldEnv.protocol.name, AppWorldEnv.protocol.layout) == ("code", "list")


def test_a_root_given_by_argument_wins_over_the_variable(root, tmp_path, monkeypatch):
    other = make_root(tmp_path / "other", train=89)
    with pytest.warns(UserWarning, match="has 90 tasks, but .* lists 89: this is not the benchmark's data"):
        assert len(AppWorldEnv.tasks("train", root=str(other))) == 89
    assert len(AppWorldEnv.tasks("train")) == 90
    monkeypatch.delenv("APPWORLD_ROOT")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(EnvDataError, match="the default data root"):
        find_root()
    assert str(DEFAULT_ROOT) == "~/.cache/cope_trl/appworld"


def test_a_root_with_more_tasks_than_the_benchmark_is_refused(tmp_path):
    with pytest.raises(EnvDataError, match="holds 58 tasks, but the split 'dev' has 57"):
        AppWorldEnv.tasks("dev", root=make_root(tmp_path / "r", dev=58))


@pytest.mark.parametrize("name", ["datasets", "tasks", "base_dbs", "api_docs"])
def test_what_is_missing_is_named_with_the_command(root, name):
    (root / "data" / name).rename(root / "moved")
    with pytest.raises(
        EnvDataError, match=rf"data/{name} is missing. Download it once .*`cope-trl envs install appworld"
    ):
        AppWorldEnv.tasks("train")


def test_a_split_file_that_is_missing_or_wrong(root):
    path = root / "data" / "datasets" / "dev.txt"
    for text, message in {"a_1\nb_2\na_1": "a task twice", "a_1\n../b_2": "'../b_2', which is no task id"}.items():
        path.write_text(text)
        with pytest.raises(EnvDataError, match=message):
            AppWorldEnv.tasks("dev")
    path.unlink()
    with pytest.raises(EnvDataError, match="no list of the split 'dev'"):
        AppWorldEnv.tasks("dev")


@pytest.mark.filterwarnings("ignore:AppWorld's split")
def test_lists_are_read_again_when_they_change(root):
    path = root / "data" / "datasets" / "dev.txt"
    path.write_text("# \n" if False else "a1_1:tagged\n\n  b2_3  \n")
    assert task_ids(root, "dev") == ("a1_1", "b2_3")
    path.write_text("c4_1")
    assert task_ids(root, "dev") == ("c4_1",)


def test_known_and_unknown_task_ids(root):
    AppWorldEnv.check_task_id("0b00000_1")
    AppWorldEnv.check_task_id("3b00001_2")
    with pytest.raises(UnknownTaskError, match="'0b00000_9', but .* Did you mean '0b00000_1'"):
        AppWorldEnv.check_task_id("0b00000_9")


@given(st.text(max_size=30) | st.sampled_from(["../tasks/0b00000_1", "0b00000_1/", ".", "", "0b00000_1\n", "٣_1"]))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_text_leads_out_of_the_root(root, text):
    if text not in ("0b00000_1", "3b00001_2"):
        with pytest.raises(UnknownTaskError):
            check_task(root, text)


def test_the_root_for_play_holds_no_ground_truth(root, tmp_path):
    play = tmp_path / "play"
    lay_out_for_play(root, "0b00000_1", play)
    assert (play / "data/tasks/0b00000_1/dbs/supervisor.jsonl").read_text() == "[]"
    assert (play / "data/tasks/0b00000_1/specs.json").is_file()
    assert sorted(path.name for path in (play / "data").iterdir()) == ["api_docs", "base_dbs", "tasks"]
    assert [path.name for path in (play / "data/tasks").iterdir()] == ["0b00000_1"]
    # Followed through every link, too.
    assert not [path for path in play.rglob("*") if "ground_truth" in path.resolve().parts]
    score = tmp_path / "score"
    lay_out_for_scoring(root, play, score)
    assert (score / "data/tasks/0b00000_1/ground_truth/answer.json").read_text() == "42"
    with pytest.raises(EnvDataError, match="'0b99999_1'.*cannot be read"):
        lay_out_for_play(root, "0b99999_1", tmp_path / "other")


def test_listing_tasks_imports_and_starts_nothing(root):
    code = (
        "import subprocess, sys\n"
        "subprocess.Popen = None\n"
        "from env_adapters.appworld import AppWorldEnv as E\n"
        "E(); E.tasks('train'); E.check_task_id('0b00000_1')\n"
        "bad = {'appworld', 'torch', 'transformers', 'trl', 'cope_trl'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize(
    "options", [{"code_timeout": 0}, {"memory_mb": 10}, {"max_output_chars": True}, {"file_mb": 1.5}]
)
def test_numbers_out_of_range(options):
    name, value = next(iter(options.items()))
    with pytest.raises(EnvAdapterError, match=f"`{name}` is {value}"):
        AppWorldEnv(**options)
