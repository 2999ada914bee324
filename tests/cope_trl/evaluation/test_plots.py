import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cope_trl.evaluation import plots
from cope_trl.evaluation.plots import learning_curve


@pytest.fixture
def panels(monkeypatch):
    """Headings and labels of the panels that were drawn, by way of the figure that was saved."""
    seen = {}
    save = Figure.savefig

    def spy(figure, *args, **kwargs):
        for axis in figure.axes:
            if axis.get_title(loc="left"):
                drawn = {line.get_label(): line for line in axis.lines if not line.get_label().startswith("_")}
                seen[axis.get_title(loc="left")] = drawn
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", spy)
    return seen


def history(steps):
    return [
        {
            "step": step,
            "loss": 0.1,
            "episode/success": step / steps,
            "episode/turns": 20.0 - step,
            "forecast/loss": 1 / step,
            "forecast/nll_k0": 0.5,
            "forecast/nll_k1": 0.7,
        }
        for step in range(1, steps + 1)
    ]


def test_every_metric_has_its_panel(tmp_path, panels):
    log = [*history(30), {"step": 30, "eval_episode/success": 0.9, "eval_runtime": 2.0}]
    path = learning_curve(log, tmp_path / "deep" / "curve.png", title="Run")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert {heading: sorted(lines) for heading, lines in panels.items()} == {
        "Success rate": ["eval", "training"],
        "Turns an episode": ["training"],
        "Forecast loss": ["training"],
        "Forecast NLL by offset k": ["k=0", "k=1"],
    }
    success = panels["Success rate"]["eval"]
    assert (list(success.get_xdata()), list(success.get_ydata())) == ([30.0], [0.9])


def test_the_strong_line_is_the_running_mean(tmp_path, panels):
    learning_curve(history(4), tmp_path / "curve.png", window=2)
    assert list(panels["Success rate"]["training"].get_ydata()) == pytest.approx([0.25, 0.375, 0.625, 0.875])


@pytest.mark.parametrize("steps", [1, 2])
def test_short_histories(tmp_path, panels, steps):
    learning_curve(history(steps), tmp_path / "curve.png")
    assert len(panels["Success rate"]["training"].get_xdata()) == steps


def test_missing_and_broken_values_are_left_out(tmp_path, panels):
    log = [
        {"step": 1, "episode/success": 0.5, "forecast/loss": float("nan")},
        {"step": 2, "episode/success": None},
        {"step": 3, "episode/success": 0.7},
        {"train_runtime": 12.0},
    ]
    learning_curve(log, tmp_path / "curve.png")
    assert list(panels) == ["Success rate"]
    assert list(panels["Success rate"]["training"].get_xdata()) == [1.0, 3.0]


def test_a_step_that_is_logged_again_replaces_itself(tmp_path, panels):
    log = [{"step": step, "episode/success": value} for step, value in ((1, 0.1), (2, 0.2), (2, 0.4))]
    learning_curve(log, tmp_path / "curve.png", window=1)
    assert list(panels["Success rate"]["training"].get_ydata()) == [0.1, 0.4]


def test_a_history_without_metrics_still_gives_a_picture(tmp_path, panels):
    path = learning_curve([], tmp_path / "curve")
    assert path == tmp_path / "curve.png"
    assert path.stat().st_size > 0
    assert panels == {}


def test_offsets_are_ordered_as_numbers():
    log = [{"step": 1, **{f"forecast/nll_k{k}": float(k) for k in (10, 2, 0)}}]
    assert list(plots._series(log, r"forecast/nll_k(\d+)")) == ["k=0", "k=2", "k=10"]


def test_matplotlib_is_loaded_on_use_and_without_global_state(tmp_path):
    code = (
        "import sys; from cope_trl.evaluation.plots import learning_curve; assert 'matplotlib' not in sys.modules;"
        "learning_curve([], sys.argv[1]); assert 'matplotlib.pyplot' not in sys.modules"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "curve.png")], check=True, cwd=root)
