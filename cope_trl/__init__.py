"""CoPE for TRL: GRPO on multi-turn language-agent episodes, with action forecasting.

The public names are loaded on first use, so that `import cope_trl` (and the command's `--help`) costs no import of
torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> module that defines it.
_HOME = {
    "CoPEConfig": "cope_trl.cope_config",
    "CoPETrainer": "cope_trl.cope_trainer",
    "load_tasks": "cope_trl.data.tasks",
    "check_dataset": "cope_trl.data.tasks",
    "TrajectoryWriter": "cope_trl.data.trajectories",
    "trajectories_to_dataset": "cope_trl.data.trajectories",
    "dataset_to_trajectories": "cope_trl.data.trajectories",
    "read_trajectories": "cope_trl.data.trajectories",
    "forecast_dataset": "cope_trl.data.forecasts",
    "forecast_windows": "cope_trl.forecast.windows",
    "summarize": "cope_trl.evaluation.metrics",
    "results_table": "cope_trl.evaluation.metrics",
    "results_markdown": "cope_trl.evaluation.metrics",
    "learning_curve": "cope_trl.evaluation.plots",
    "ForecastWindow": "cope_trl.types",
    "Layout": "cope_trl.types",
    "TaskRef": "cope_trl.types",
    "Trajectory": "cope_trl.types",
    "Turn": "cope_trl.types",
    "CoPEError": "cope_trl.errors",
    "ConfigError": "cope_trl.errors",
    "DataError": "cope_trl.errors",
    "RolloutError": "cope_trl.errors",
    "TemplateError": "cope_trl.errors",
}

# Written out for type checkers and editors, which cannot follow `_HOME`; a test holds the two together.
if TYPE_CHECKING:
    from cope_trl.cope_config import CoPEConfig
    from cope_trl.cope_trainer import CoPETrainer
    from cope_trl.data.forecasts import forecast_dataset
    from cope_trl.data.tasks import check_dataset, load_tasks
    from cope_trl.data.trajectories import (
        TrajectoryWriter,
        dataset_to_trajectories,
        read_trajectories,
        trajectories_to_dataset,
    )
    from cope_trl.errors import ConfigError, CoPEError, DataError, RolloutError, TemplateError
    from cope_trl.evaluation.metrics import results_markdown, results_table, summarize
    from cope_trl.evaluation.plots import learning_curve
    from cope_trl.forecast.windows import forecast_windows
    from cope_trl.types import ForecastWindow, Layout, TaskRef, Trajectory, Turn

__all__ = [
    "__version__",
    "CoPEConfig",
    "CoPETrainer",
    "load_tasks",
    "check_dataset",
    "TrajectoryWriter",
    "trajectories_to_dataset",
    "dataset_to_trajectories",
    "read_trajectories",
    "forecast_dataset",
    "forecast_windows",
    "summarize",
    "results_table",
    "results_markdown",
    "learning_curve",
    "ForecastWindow",
    "Layout",
    "TaskRef",
    "Trajectory",
    "Turn",
    "CoPEError",
    "ConfigError",
    "DataError",
    "RolloutError",
    "TemplateError",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value  # the next access skips this function
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOME))
