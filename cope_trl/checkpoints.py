"""What a checkpoint holds beside the Trainer's own files, which checkpoints are whole, and what differs on a resume.

Pure: paths and plain values in, plain values out; `base_trainer.py` says when. The Trainer writes `trainer_state.json`
after everything else, so a checkpoint in which that file can be read is whole.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from cope_trl.errors import ConfigError
from cope_trl.metrics import RunningMeans

logger = logging.getLogger(__name__)

SETTINGS_FILE = "cope_settings.json"
STATE_FILE = "cope_state_{rank}.pt"

# Settings that shape what is sampled, buffered and learned from. How a forecast is computed is not among them.
_COMPARED = (
    "seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "steps_per_generation",
    "num_generations",
    "num_iterations",
    "beta",
    "loss_type",
    "scale_rewards",
    "temperature",
    "max_turns",
    "max_tokens_per_turn",
    "max_prompt_length",
    "max_completion_length",
    "success_threshold",
)
_ONLY_HOW = ("forecast_engine", "forecast_batch_size", "forecast_grad_norm_steps")
_CHECKPOINT = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


@dataclass(slots=True)
class RunState:
    """What one process has in memory between two optimizer steps, and the Trainer does not save.

    Attributes:
        micro_batches: forward and backward passes so far; where the run stands inside a batch of rollouts.
        buffer: the batch of rollouts as TRL holds it, a dict of tensors each micro-batch; `None` where the next step
            rolls out anyway.
        means: numerator and denominator of each running mean since the last log, by mode.
        metrics: TRL's own lists of values since the last log, by mode.
    """

    micro_batches: int
    buffer: list[dict[str, Any]] | None = None
    means: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    metrics: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def save(self, checkpoint: str | os.PathLike[str], rank: int) -> None:
        """Write this process's file into a checkpoint."""
        values = {name: getattr(self, name) for name in self.__slots__}
        torch.save(values, Path(checkpoint) / STATE_FILE.format(rank=rank))

    @classmethod
    def load(cls, checkpoint: str | os.PathLike[str], rank: int, device: torch.device) -> "RunState | None":
        """Read this process's file, tensors onto `device`; `None` where the checkpoint has none."""
        path = Path(checkpoint) / STATE_FILE.format(rank=rank)
        if not path.exists():
            return None
        state = cls(**torch.load(path, map_location="cpu", weights_only=True))
        state.buffer = send_to_device(state.buffer, device)
        return state


def sums_of(means: RunningMeans) -> dict[str, tuple[float, float]]:
    """Numerator and denominator of every mean that something was added to."""
    pairs = zip(means.names, *means._sums.tolist(), strict=True)
    return {name: (total, count) for name, total, count in pairs if count}


def restore_sums(means: RunningMeans, sums: Mapping[str, tuple[float, float]]) -> None:
    """Replace what was added to the means by these numerators and denominators; names no longer kept are left out."""
    means.flush()
    for name in means.names:
        if name in sums:
            means.add(name, *sums[name])


def plain_metrics(metrics: Mapping[str, Sequence[Any]]) -> dict[str, list[float]]:
    """TRL's lists of values as plain numbers, which are read back without unpickling anything else."""
    return {
        name: [value if isinstance(value, int) else float(value) for value in values]
        for name, values in metrics.items()
    }


def settings_of(args: Any, processes: int) -> dict[str, Any]:
    """Settings to compare on a resume, as JSON values.

    Args:
        args: a [`~cope_trl.CoPEConfig`].
        processes: number of processes.
    """
    own = [item.name for item in fields(args) if item.name.startswith("forecast_") and item.name not in _ONLY_HOW]
    chosen = {name: getattr(args, name) for name in (*own, *_COMPARED)}
    # As they will be read again: an enumeration as its value, a tuple as a list.
    settings: dict[str, Any] = json.loads(json.dumps({**chosen, "processes": processes}, default=str))
    return settings


def write_settings(checkpoint: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Write the settings a checkpoint was made with into it."""
    (Path(checkpoint) / SETTINGS_FILE).write_text(json.dumps(settings, indent=2), encoding="utf-8")


def differences(checkpoint: str | os.PathLike[str], settings: Mapping[str, Any]) -> list[str]:
    """What differs between a checkpoint's settings and these, one line each; none where it says nothing of its own."""
    path = Path(checkpoint) / SETTINGS_FILE
    if not path.exists():
        return []
    saved = json.loads(path.read_text(encoding="utf-8"))
    return [
        f"`{name}` was {saved[name]!r} and is now {value!r}"
        for name, value in settings.items()
        if name in saved and saved[name] != value
    ]


def is_whole(checkpoint: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint was written to its end."""
    try:
        with open(Path(checkpoint) / TRAINER_STATE_NAME, encoding="utf-8") as file:
            json.load(file)
    except (OSError, ValueError):
        return False
    return True


def begin_writing(checkpoint: str | os.PathLike[str]) -> None:
    """Make a checkpoint that is about to be written over count as not whole until it is."""
    (Path(checkpoint) / TRAINER_STATE_NAME).unlink(missing_ok=True)


def last_whole(folder: str | os.PathLike[str]) -> Path | None:
    """The latest whole checkpoint of a run; later ones that a killed run left half-written are named in a warning."""
    root = Path(folder)
    found = [(int(match.group(1)), path) for path in root.glob("*") if (match := _CHECKPOINT.fullmatch(path.name))]
    for _, path in sorted(found, reverse=True):
        if is_whole(path):
            return path
        logger.warning("%s was not written to its end and is passed over.", path)
    return None


def read_resume(value: str | bool | None) -> str | bool:
    """`resume_from_checkpoint` as a path or a bool; a command line knows words only."""
    return {"": False, "none": False, "false": False, "true": True}.get(str(value or "").lower(), value or False)


def resolve(resume: str | bool | None, folder: str | os.PathLike[str]) -> str | None:
    """Path of the checkpoint to resume from.

    Args:
        resume: a path, `True` for the latest whole checkpoint of the run, or `None` or `False`; or such a word.
        folder: the run's `output_dir`.

    Raises:
        ConfigError: there is no such checkpoint, or it is not whole.
    """
    resume = read_resume(resume)
    if resume is False:
        return None
    if resume is True:
        last = last_whole(folder)
        if last is None:
            raise ConfigError(
                f"`resume_from_checkpoint` is True, but {os.fspath(folder)!r} holds no whole checkpoint. Start "
                "without it, and set `save_strategy` and `save_steps` so that there will be one."
            )
        return str(last)
    if not is_whole(resume):
        other = last_whole(Path(resume).parent)
        raise ConfigError(
            f"`resume_from_checkpoint` is {resume!r}, which is no checkpoint that was written to its end (no readable "
            f"{TRAINER_STATE_NAME}). "
            + (f"The latest whole one beside it is {str(other)!r}." if other else "Give the path of one.")
        )
    return resume
