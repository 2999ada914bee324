"""Episodes on disk: one shard a step and rank, whatever the order they are played in."""

from pathlib import Path

from cope_trl.data.recorder import TrajectoryRecorder
from cope_trl.data.trajectories import read_trajectories
from cope_trl.types import TaskRef, Trajectory


def episodes(*names):
    return [Trajectory(TaskRef("e", name), (1, 2), (3,), (1,), score=0.5) for name in names]


def shards(folder):
    return sorted(path.name for path in Path(folder).glob("*.parquet"))


def names(folder):
    return [trajectory.task.task_id for trajectory in read_trajectories(folder)]


def test_batches_of_one_step_share_a_shard(tmp_path):
    recorder = TrajectoryRecorder(str(tmp_path), 0)
    recorder.record("train", 0, episodes("a", "b"))
    assert names(tmp_path) == ["a", "b"]  # already on disk
    recorder.record("train", 0, episodes("c"))
    recorder.record("train", 4, episodes("d"))
    recorder.record("train", 4, episodes("e"))
    assert len(shards(tmp_path)) == 2
    assert names(tmp_path) == ["a", "b", "c", "d", "e"]
    assert read_trajectories(tmp_path) == episodes("a", "b", "c", "d", "e")


def test_evaluation_in_the_middle_of_a_step_disturbs_nothing(tmp_path):
    recorder = TrajectoryRecorder(str(tmp_path), 0)
    recorder.record("eval", 0, episodes("x"))
    recorder.record("train", 0, episodes("a"))
    recorder.record("eval", 0, episodes("y"))
    recorder.record("train", 0, episodes("b"))
    assert names(tmp_path) == ["a", "b"]
    assert names(tmp_path / "eval") == ["x", "y"]


def test_ranks_do_not_write_over_each_other(tmp_path):
    for rank in (1, 0):
        TrajectoryRecorder(str(tmp_path), rank).record("train", 3, episodes(f"r{rank}"))
    assert len(shards(tmp_path)) == 2
    assert names(tmp_path) == ["r0", "r1"]


def test_a_step_run_again_after_a_resume_replaces_its_shard(tmp_path):
    before = TrajectoryRecorder(str(tmp_path), 0)
    for step in (0, 1, 2):
        before.record("train", step, episodes(f"old{step}"))
    after = TrajectoryRecorder(str(tmp_path), 0)
    after.record("train", 2, episodes("new2"))
    assert names(tmp_path) == ["old0", "old1", "new2"]


def test_what_was_recorded_is_not_changed_later(tmp_path):
    recorder, batch = TrajectoryRecorder(str(tmp_path), 0), episodes("a")
    recorder.record("train", 0, batch)
    batch.extend(episodes("z"))
    recorder.record("train", 0, episodes("b"))
    assert names(tmp_path) == ["a", "b"]


def test_a_folder_is_made_only_when_something_is_recorded(tmp_path):
    recorder = TrajectoryRecorder(str(tmp_path / "out"), 0)
    assert not (tmp_path / "out").exists()
    recorder.record("train", 0, episodes("a"))
    assert not (tmp_path / "out" / "eval").exists()
    recorder.record("train", 1, [])
    assert len(shards(tmp_path / "out")) == 1
