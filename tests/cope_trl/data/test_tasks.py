import json

import datasets
import gymnasium
import pytest

from cope_trl.data.tasks import check_dataset, load_tasks, read_ids
from cope_trl.errors import DataError
from env_adapters import registry
from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import UnknownEnvironmentError, UnknownSplitError, UnknownTaskError
from env_adapters.protocols import ReActText


class Lights(TextEnv):
    """Ten training tasks of two families, three test tasks of one."""

    name = "lights"
    protocol = ReActText()
    instruction = "Switch the lights on."
    acknowledgement = "OK."

    @classmethod
    def tasks(cls, split, *, offset=0):
        cls.check_split(split)
        numbers = range(10) if split == "train" else range(10, 13)
        family = ("red", "green")
        return [Task(cls.name, f"{cls.name}_{i + offset}", family[i % 2 if i < 10 else 0], split) for i in numbers]

    def _begin(self, task_id, seed):
        return "It is dark."

    def _act(self, action):
        return Outcome("It is bright.", success=True, done=True)


class Bells(Lights):
    name = "bells"
    instruction = "Ring the bells."
    acknowledgement = None


class Other(gymnasium.Env):
    """A Gymnasium environment without a task list."""


@pytest.fixture(autouse=True)
def fake_environments(monkeypatch):
    for name, environment in {"lights": Lights, "bells": Bells, "other": Other}.items():
        monkeypatch.setitem(registry._registered, name, environment)


def numbers(dataset):
    return [int(task_id.rpartition("_")[2]) for task_id in dataset["task_id"]]


def test_a_split_in_the_order_of_the_environment():
    dataset = load_tasks("lights")
    assert dataset.column_names == ["prompt", "environment", "task_id", "family"]
    assert numbers(dataset) == list(range(10))
    assert dataset[1] == {
        "prompt": [
            {"role": "user", "content": "Switch the lights on."},
            {"role": "assistant", "content": "OK."},
        ],
        "environment": "lights",
        "task_id": "lights_1",
        "family": "green",
    }
    assert numbers(load_tasks("lights", "test")) == [10, 11, 12]


def test_shuffling_depends_on_the_seed_only():
    first, again, other = (numbers(load_tasks("lights", shuffle_seed=seed)) for seed in (5, 5, 6))
    assert first == again != other
    assert sorted(first) == list(range(10)) != first


def test_families_and_limit():
    assert numbers(load_tasks("lights", families=["green"], limit=2)) == [1, 3]
    drawn = load_tasks("lights", limit=4, shuffle_seed=0)
    assert numbers(drawn) == numbers(load_tasks("lights", shuffle_seed=0))[:4]


def test_several_environments():
    dataset = load_tasks(["lights", "bells"], limit=3)
    assert dataset["environment"][:] == ["lights"] * 3 + ["bells"] * 3
    assert dataset[5]["prompt"] == [{"role": "system", "content": "Ring the bells."}]
    mixed = load_tasks(["lights", "bells"], shuffle_seed=1)
    assert set(mixed["environment"][:10]) == {"lights", "bells"}
    assert len(mixed) == 20


def test_the_embedded_household():
    train, test = load_tasks("household"), load_tasks("household", "test")
    assert len(train) >= 1000
    assert not set(train["task_id"]) & set(test["task_id"])
    assert len(set(train["family"])) == 6
    first = train[0]
    again = load_tasks("household", ids=[test[5]["task_id"], first["task_id"]])
    assert again.to_list() == [test[5], first]
    small = load_tasks("household", size="tiny", families=["look"], limit=3)
    assert small["family"][:] == ["look"] * 3


def test_agentgym_ids_of_scienceworld(tmp_path):
    pytest.importorskip("scienceworld")
    path = tmp_path / "sciworld_test.json"
    path.write_text(json.dumps([{"item_id": "sciworld_4000"}, {"item_id": "sciworld_17"}]))
    assert load_tasks("scienceworld", ids=path)["task_id"][:] == ["sciworld_4000", "sciworld_17"]
    assert [len(load_tasks("scienceworld", split)) for split in ("train", "test")] == [2120, 200]


def test_options_reach_the_environment():
    assert numbers(load_tasks("lights", "test", offset=100)) == [110, 111, 112]
    with pytest.raises(DataError, match=r"option 'offsets'.*\['offset'\]. Did you mean 'offset'"):
        load_tasks("lights", offsets=100)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"item_id": "lights_11", "conversations": []}, {"item_id": "lights_4"}, {"item_id": "lights_7"}]),
        json.dumps(["lights_11", "lights_4", "lights_7"]),
        "lights_11\nlights_4\r\n\nlights_7\n",
        '{"item_id": "lights_11"}\n{"item_id": "lights_4"}\n{"item_id": "lights_7"}\n',
    ],
)
def test_an_id_file_gives_its_own_order_across_splits(tmp_path, text):
    path = tmp_path / "ids.json"
    path.write_text(text)
    assert numbers(load_tasks("lights", ids=path)) == [11, 4, 7]
    assert numbers(load_tasks("lights", ids=str(path), limit=2)) == [11, 4]


def test_ids_as_a_list_keep_repetitions():
    assert numbers(load_tasks("lights", ids=["lights_3", "lights_3", "lights_1"])) == [3, 3, 1]


def test_one_id_in_a_file(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text('{"item_id": "lights_2"}')
    assert read_ids(path) == ["lights_2"]


def test_unknown_ids_are_counted():
    with pytest.raises(UnknownTaskError, match=r"'lights_99', which is no task of 'lights' \(2 of 3 ids") as caught:
        load_tasks("lights", ids=["lights_1", "lights_99", "sciworld_17"])
    assert "'lights_0'" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no task id"),
        ("[]", "holds no task id"),
        ('[{"item": "lights_1"}]', "entry 0 of .* is None"),
        ('["lights_1", 7]', "entry 1 of .* is 7"),
        ("{broken", "which is no task"),
    ],
)
def test_bad_id_files(tmp_path, text, message):
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_tasks("lights", ids=path)


def test_id_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"missing\.json', which cannot be read"):
        load_tasks("lights", ids=tmp_path / "missing.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(DataError, match="cannot be read as a text file"):
        load_tasks("lights", ids=tmp_path / "binary")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "light"}, UnknownEnvironmentError, "Did you mean 'lights'"),
        ({"name": "lights", "split": "tset"}, UnknownSplitError, "Did you mean 'test'"),
        ({"name": "lights", "split": "tset", "ids": ["lights_1"]}, UnknownSplitError, "Did you mean 'test'"),
        ({"name": "lights", "families": ["gren"]}, DataError, "'gren'.*Did you mean 'green'"),
        ({"name": "lights", "limit": 11}, DataError, "`limit` is 11, but only 10 tasks"),
        ({"name": "lights", "families": ["red"], "limit": 6}, DataError, "only 5 tasks"),
        ({"name": "lights", "limit": 0}, DataError, "`limit` is 0"),
        ({"name": []}, DataError, "empty list"),
        ({"name": ["lights", "bells"], "ids": ["lights_1"]}, DataError, "belong to one environment"),
        ({"name": "other"}, DataError, "lists no tasks"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        load_tasks(**arguments)


def test_a_dataset_with_what_is_needed_passes():
    dataset = load_tasks("lights")
    check_dataset(dataset)
    check_dataset(dataset.to_iterable_dataset())
    check_dataset({"a": dataset, "b": dataset})
    check_dataset(
        datasets.IterableDataset.from_generator(lambda: iter(dataset))
    )  # columns unknown before the first row


def test_missing_columns_are_named_with_the_remedy():
    dataset = datasets.Dataset.from_dict({"prompt": ["a"], "answer": ["b"]})
    with pytest.raises(DataError, match="`train_dataset` has no column 'environment', 'task_id'.*load_tasks"):
        check_dataset(dataset)
    with pytest.raises(DataError, match=r"`eval_dataset\['b'\]` has no column 'prompt'"):
        check_dataset({"b": load_tasks("lights").remove_columns("prompt")}, "eval_dataset")
    with pytest.raises(DataError, match="`train_dataset` is empty"):
        check_dataset(dataset.select([]))
    with pytest.raises(DataError, match="no column 'environment'"):
        check_dataset(datasets.IterableDataset.from_generator(lambda: iter([{"prompt": "a", "task_id": "b"}])))
