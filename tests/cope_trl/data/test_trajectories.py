import os
from dataclasses import fields, replace

import datasets
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cope_trl.data.trajectories import (
    FEATURES,
    TrajectoryWriter,
    dataset_to_trajectories,
    read_trajectories,
    trajectories_to_dataset,
)
from cope_trl.errors import DataError
from cope_trl.types import TaskRef, Trajectory, Turn

FULL = Trajectory(
    task=TaskRef("fake", "train-3", "heat"),
    prompt_ids=(1, 2, 3),
    completion_ids=(4, 5, 6, 151_645),
    completion_mask=(1, 1, 0, 1),
    turns=(
        Turn(
            2,
            3,
            5,
            "Thought: näh\nAction: look",
            "look",
            "look",
            False,
            False,
            "You see\n a lamp. 🔥",
            0.25,
            {"n": 1, "kind": ["a"]},
        ),
        Turn(6, 6, 7, "?", invalid=True),
    ),
    logprobs=(-0.1, -1 / 3, 0.0, -1e-9),
    layout="turns",
    success=True,
    score=62.5,
    truncated=True,
    failed=True,
    error="RuntimeError: broke",
    first_observation="A room.",
    environment_seconds=0.125,
)
BARE = Trajectory(task=TaskRef("fake", "1"), prompt_ids=(1,), completion_ids=(2,), completion_mask=(1,))


def test_the_columns_are_the_fields():
    expected = {f.name for f in fields(Trajectory)} - {"task"} | {f.name for f in fields(TaskRef)}
    assert set(FEATURES) == expected
    assert set(FEATURES["turns"].feature) == {f.name for f in fields(Turn)}


@pytest.mark.parametrize("trajectories", [[FULL, BARE], [BARE], [BARE, FULL, FULL], []])
def test_round_trip(trajectories):
    dataset = trajectories_to_dataset(trajectories)
    assert dataset.features == FEATURES
    assert dataset_to_trajectories(dataset) == trajectories


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
floats = st.floats(allow_nan=False)
turns = st.builds(
    Turn,
    history_end=st.integers(0, 2**40),
    start=st.integers(0, 9),
    end=st.integers(0, 9),
    reply=texts,
    action=texts,
    target=texts,
    invalid=st.booleans(),
    is_call=st.booleans(),
    observation=texts,
    score=floats,
)
id_tuples = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Trajectory,
        task=st.builds(TaskRef, texts, texts, texts),
        prompt_ids=id_tuples,
        completion_ids=id_tuples,
        completion_mask=st.lists(st.integers(0, 1), max_size=5).map(tuple),
        turns=st.lists(turns, max_size=3).map(tuple),
        logprobs=st.none() | st.lists(floats, max_size=5).map(tuple),
        layout=st.sampled_from(["list", "turns"]),
        success=st.booleans(),
        score=floats,
        error=st.none() | texts,
        first_observation=texts,
    )
)
def test_any_trajectory_round_trips(trajectory):
    assert dataset_to_trajectories(trajectories_to_dataset([trajectory])) == [trajectory]


def test_a_missing_column_is_named():
    dataset = trajectories_to_dataset([FULL]).remove_columns(["turns", "score"])
    with pytest.raises(DataError, match="no column 'turns', 'score'"):
        dataset_to_trajectories(dataset)


def test_shards_are_read_back_in_order(tmp_path):
    writer = TrajectoryWriter(tmp_path / "new" / "folder")
    second = replace(BARE, task=TaskRef("fake", "2"))
    writer.write([second], step=10)
    writer.write([FULL], step=2, rank=1)
    path = writer.write([BARE], step=2, rank=0)
    assert path.name == "step-00000002-rank-00000.parquet"
    assert read_trajectories(writer.folder) == [BARE, FULL, second]


def test_load_dataset_reads_the_shards_with_their_types(tmp_path):
    writer = TrajectoryWriter(tmp_path / "shards")
    writer.write([BARE], step=1)  # has no turn and no log-probability, so types cannot be guessed from it
    writer.write([], step=1, rank=1)
    writer.write([FULL], step=2)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(writer.folder / "*.parquet"), split="train", cache_dir=str(tmp_path / "cache")
    )
    assert loaded.features == FEATURES
    assert dataset_to_trajectories(loaded) == [BARE, FULL]


def test_running_a_step_again_replaces_its_shard(tmp_path):
    TrajectoryWriter(tmp_path).write([FULL, FULL], step=3)
    TrajectoryWriter(tmp_path).write([BARE], step=3)
    assert read_trajectories(tmp_path) == [BARE]
    assert TrajectoryWriter(tmp_path).write([], step=3) is None
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_dies_leaves_the_old_shard(tmp_path, monkeypatch):
    writer = TrajectoryWriter(tmp_path)
    writer.write([BARE], step=1)

    def die(*args):
        raise OSError("the machine went down")

    monkeypatch.setattr(os, "replace", die)
    with pytest.raises(OSError, match="went down"):
        writer.write([FULL], step=1)
    monkeypatch.undo()
    assert read_trajectories(tmp_path) == [BARE]
    writer.write([FULL], step=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-rank-00000.parquet"]


def test_a_folder_without_shards_is_named(tmp_path):
    with pytest.raises(DataError, match="holds no trajectory shard"):
        read_trajectories(tmp_path)
