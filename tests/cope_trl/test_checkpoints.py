"""What a checkpoint holds and says, without a trainer."""

import json
import pickle

import numpy as np
import pytest
import torch
from support import make_config

from cope_trl import checkpoints
from cope_trl.checkpoints import RunState, differences, is_whole, last_whole, resolve, settings_of, write_settings
from cope_trl.errors import ConfigError
from cope_trl.metrics import RunningMeans


def make_checkpoint(folder, step, state='{"global_step": 1}'):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    if state is not None:
        (path / "trainer_state.json").write_text(state)
    return path


def test_a_checkpoint_is_whole_once_its_last_file_is(tmp_path):
    assert is_whole(make_checkpoint(tmp_path, 1))
    assert not is_whole(make_checkpoint(tmp_path, 2, '{"global_step"'))
    assert not is_whole(make_checkpoint(tmp_path, 3, None))
    assert not is_whole(tmp_path / "checkpoint-4")
    checkpoints.begin_writing(tmp_path / "checkpoint-1")
    checkpoints.begin_writing(tmp_path / "checkpoint-4")
    assert not is_whole(tmp_path / "checkpoint-1")


def test_the_latest_whole_checkpoint_is_found_by_number(tmp_path, caplog):
    assert last_whole(tmp_path) is None
    for step in (9, 100, 20):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 110, "")
    (tmp_path / "checkpoint-best").mkdir()
    assert last_whole(tmp_path) == tmp_path / "checkpoint-100"
    assert "checkpoint-110 was not written to its end" in caplog.text
    assert last_whole(tmp_path / "nowhere") is None


@pytest.mark.parametrize("nothing", [None, False, "", "false", "False", "none"])
def test_nothing_to_resume_from(nothing, tmp_path):
    assert resolve(nothing, tmp_path) is None


@pytest.mark.parametrize("latest", [True, "true", "True"])
def test_true_is_the_latest_whole_one(latest, tmp_path):
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        resolve(latest, tmp_path)
    path = make_checkpoint(tmp_path, 5)
    assert resolve(latest, tmp_path) == str(path)


def test_a_path_must_be_a_whole_checkpoint(tmp_path):
    path, broken = make_checkpoint(tmp_path, 5), make_checkpoint(tmp_path, 6, "{")
    assert resolve(str(path), "elsewhere") == str(path)
    with pytest.raises(ConfigError, match=r"checkpoint-6.* written to its end .*latest whole one .*checkpoint-5"):
        resolve(str(broken), "elsewhere")
    with pytest.raises(ConfigError, match="Give the path of one"):
        resolve(str(tmp_path / "deep" / "checkpoint-1"), "elsewhere")


def test_what_differs_is_told_and_what_changes_nothing_is_not(tmp_path):
    made = settings_of(make_config(tmp_path, forecast_horizon=2, max_turns=5), processes=2)
    write_settings(tmp_path, made)
    assert differences(tmp_path, made) == []
    same = make_config(
        tmp_path, max_turns=5, forecast_engine="separate", forecast_grad_norm_steps=3, learning_rate=1.0
    )
    assert differences(tmp_path, settings_of(same, 2)) == []
    other = make_config(tmp_path, forecast_horizon=1, forecast_coef=0.5, beta=0.5)
    assert sorted(differences(tmp_path, settings_of(other, 1))) == [
        "`beta` was 0.0 and is now 0.5",
        "`forecast_coef` was 0.01 and is now 0.5",
        "`forecast_horizon` was 2 and is now 1",
        "`max_turns` was 5 and is now None",
        "`processes` was 2 and is now 1",
    ]


def test_a_checkpoint_of_another_trainer_or_version_says_nothing_it_does_not_know(tmp_path):
    settings = settings_of(make_config(tmp_path), 1)
    assert differences(tmp_path, settings) == []
    (tmp_path / checkpoints.SETTINGS_FILE).write_text(json.dumps({"beta": 0.0, "gone": 3}))
    assert differences(tmp_path, settings) == []


def test_the_state_comes_back_as_it_was(tmp_path):
    buffer = [{"ids": torch.arange(6).view(2, 3), "logps": None, "weight": torch.tensor(0.5)} for _ in range(2)]
    metrics = {"train": {"reward": [0.5, float("nan")], "num_tokens": [12]}, "eval": {}}
    state = RunState(7, buffer, {"train": {"episode/success": (1.5, 2.0)}}, metrics)
    state.save(tmp_path, rank=3)
    assert RunState.load(tmp_path, 0, torch.device("cpu")) is None
    loaded = RunState.load(tmp_path, 3, torch.device("cpu"))
    assert loaded.micro_batches == 7
    assert torch.equal(loaded.buffer[1]["ids"], buffer[1]["ids"])
    assert loaded.buffer[0]["logps"] is None
    assert loaded.means["train"]["episode/success"] == (1.5, 2.0)
    assert str(loaded.metrics) == str(metrics)


class Calls:
    """Unpickled, it calls `print`."""

    def __reduce__(self):
        return print, ("called",)


def test_a_state_that_would_run_code_is_refused(tmp_path, capsys):
    RunState(0, [{"ids": Calls()}]).save(tmp_path, 0)
    with pytest.raises(pickle.UnpicklingError):
        RunState.load(tmp_path, 0, torch.device("cpu"))
    assert capsys.readouterr().out == ""


def test_values_of_reward_functions_become_plain_numbers(tmp_path):
    plain = checkpoints.plain_metrics({"mine": [np.float64(0.25), torch.tensor(2.0)], "num_tokens": [3]})
    assert plain == {"mine": [0.25, 2.0], "num_tokens": [3]}
    assert all(type(value) in (int, float) for values in plain.values() for value in values)
    RunState(0, None, {}, {"train": plain}).save(tmp_path, 0)
    assert RunState.load(tmp_path, 0, torch.device("cpu")).metrics == {"train": plain}


def test_running_means_go_on_from_where_they_were():
    before, after = RunningMeans(2), RunningMeans(1)
    for means in (before, after):
        means.add("time/rollout", 3.0)
    before.add("episode/success", 1.0)
    before.add("forecast/nll_k2", 4.0, 2.0)
    sums = checkpoints.sums_of(before)
    assert sums == {"time/rollout": (3.0, 1.0), "episode/success": (1.0, 1.0), "forecast/nll_k2": (4.0, 2.0)}
    after.add("episode/turns", 9.0)
    checkpoints.restore_sums(after, sums)  # a mean of offset 2 has no place where the horizon is 1
    after.add("episode/success", 0.0)
    assert after.flush() == {"time/rollout": 3.0, "episode/success": 0.5}
