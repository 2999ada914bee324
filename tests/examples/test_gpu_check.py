"""The GPU check on a CPU, at tiny sizes: nothing that was measured is lost, and the summary says what was measured."""

import json

import gpu_check
import gpu_parts
import pytest


def test_the_parts_run_and_a_broken_one_stops_none_of_them(tmp_path, monkeypatch, capsys):
    path = tmp_path / "gpu_check.json"
    on_disk = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # as it was, once the test is over

    def broken(report, sizes, seconds):
        on_disk.append(json.loads(path.read_text()))
        report({"mode": "half", "step": {"step/seconds": 1.0}})
        on_disk.append(json.loads(path.read_text()))
        raise OSError("on purpose")

    monkeypatch.setitem(gpu_parts.PARTS, "update_flex", (broken, 60.0))
    names = ["update", "update_flex", "rollout", "train_step"]
    gpu_check.main(["--tiny", "--here", "--budget", "1000", "--output_dir", str(tmp_path), "--parts", *names])
    result = json.loads(path.read_text())
    parts, summary = result["parts"], result["summary"]

    assert {"torch", "trl", "device", "python"} <= set(result["about"])
    assert len(on_disk[0]["parts"]["update"]["modes"]["separate"]["steps"]) == 2  # there while the next part runs
    assert on_disk[1]["parts"]["update_flex"]["modes"]["half"]["steps"] == [{"step/seconds": 1.0}]
    assert "OSError: on purpose" in parts["update_flex"]["error"]
    assert [parts[name]["error"] for name in ("update", "rollout", "train_step")] == [None] * 3
    assert not [mode for part in parts.values() for mode in part["modes"].values() if "error" in mode]

    assert set(summary["update: seconds"]) == {"policy only", "shared prefix", "separate"}
    for figure in ("forecast/loss", "forecast/nll_k0", "forecast/nll_k1", "forecast/nll_k2", "grad_norm"):
        assert summary[f"{figure}: agrees"] == {"separate": True}
    assert summary["entropy: agrees"] == {"policy only": True, "separate": True}
    assert summary["rollout: every episode whole"] == {"kept cache": True, "re-prefilling": True}
    rounds = {name: mode["rounds"][0] for name, mode in parts["rollout"]["modes"].items()}
    assert rounds["kept cache"]["tokens"] == rounds["re-prefilling"]["tokens"]
    schedules = {name: mode["lock_step_reason"] for name, mode in parts["rollout"]["modes"].items()}
    assert schedules == {"kept cache": None, "re-prefilling": "`rollout_schedule` asks for it"}
    assert len(parts["train_step"]["modes"]["train"]["steps"]) == 2
    printed = capsys.readouterr().out
    assert "update_flex  failed: " in printed
    assert "| rollout: every episode whole | kept cache | True |" in printed


def test_what_is_missing_is_said_and_not_begun(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setitem(gpu_parts.PARTS, "rollout", (lambda *_: begun.append("rollout"), 60.0))
    monkeypatch.setitem(gpu_parts.PARTS, "update", (lambda *_: begun.append("update"), 60.0))
    monkeypatch.setitem(gpu_parts.NEEDS, "update", "no_such_package")
    result = gpu_check.check(["update", "rollout"], gpu_parts.TINY, 4.0, tmp_path / "gpu_check.json", here=True)
    assert result["parts"]["update"]["error"] == "no_such_package is not installed"
    assert result["parts"]["rollout"]["error"] == "not begun: the budget of 4 s is used up"
    assert not begun


def test_without_a_gpu_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_parts.torch.cuda, "is_available", lambda: False)
    result = gpu_check.check(["update"], gpu_parts.Sizes(), 100.0, tmp_path / "gpu_check.json", here=True)
    assert "no CUDA device is found; use `--tiny`" in result["parts"]["update"]["error"]


def test_a_mode_that_fails_leaves_the_others():
    reports = []

    def fail(report):
        report({"step": 1})
        raise MemoryError("too large")

    gpu_parts.in_turn(reports.append, {"first": fail, "second": lambda report: report({"step": 2})})
    assert [report["mode"] for report in reports] == ["first", "first", "second"]
    assert "MemoryError: too large" in reports[1]["error"]
    assert reports[2]["step"] == 2


def steps(seconds, loss, norm, memory, rollout=0.5):
    """A warm-up step and two others of a mode, the last of them the fastest."""
    common = {"time/rollout": rollout, "forecast/loss": loss, "grad_norm": norm, "step/cuda_mib": memory}
    return {"steps": [{**common, "step/seconds": took + rollout} for took in (9.0, seconds + 1, seconds)]}


def test_the_summary_by_hand():
    policy = steps(2.0, 0.0, 7.0, 100.0)
    parts = {
        "update": {
            "modes": {
                "policy only": policy,
                "shared prefix": steps(2.5, 8.0, 5.0, 120.0),
                "separate": steps(10.0, 8.004, 5.05, 300.0),
                "failed": {"error": "…"},
            }
        },
        "update_flex": {"modes": {"shared prefix, FlexAttention": steps(1.25, 8.1, 6.0, 110.0)}},
        "rollout": {
            "modes": {
                "kept cache": {"rounds": [{"seconds": 3.0, "whole": True}, {"seconds": 2.0, "whole": True}]},
                "re-prefilling": {"rounds": [{"seconds": 8.0, "whole": False}]},
            }
        },
    }
    summary = gpu_check.summarize(parts, 1e-3)
    flex = "shared prefix, FlexAttention"
    assert summary["update: seconds"] == {"policy only": 2.0, "shared prefix": 2.5, "separate": 10.0, flex: 1.25}
    assert summary["update: over policy only"] == {"shared prefix": 1.25, "separate": 5.0, flex: 0.625}
    assert summary["update: over shared prefix"] == {"policy only": 0.8, "separate": 4.0, flex: 0.5}
    assert summary["update: peak CUDA memory, MiB"] == {
        "policy only": 100.0,
        "shared prefix": 120.0,
        "separate": 300.0,
        flex: 110.0,
    }
    assert summary["rollout: seconds"] == {"kept cache": 2.0, "re-prefilling": 8.0}
    assert summary["rollout: over kept cache"] == {"re-prefilling": 4.0}
    assert summary["rollout: every episode whole"] == {"kept cache": True, "re-prefilling": False}
    # 8.004 is off by 0.05 %, 8.1 by more than 1 %; a norm may be off by 2 %, and the policy's alone is another one.
    off = summary["forecast/loss: relative difference from shared prefix"]
    assert off["separate"] == pytest.approx(0.0005)
    assert off[flex] == pytest.approx(0.0125)
    assert summary["forecast/loss: agrees"]["separate"]
    assert not summary["forecast/loss: agrees"][flex]
    assert summary["grad_norm: agrees"] == {"separate": True, flex: False}
    assert "entropy: agrees" not in summary


def test_the_summary_of_nothing_is_empty():
    assert not any(gpu_check.summarize({}, 1e-3).values())
    assert not any(gpu_check.summarize({"update": {"modes": {"policy only": {"error": "…"}}}}, 1e-3).values())
