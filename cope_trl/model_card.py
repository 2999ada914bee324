"""The card of a trained model: what TRL writes, and what it cannot know: environments, forecasting, success.

Text and plain values in, text out; `base_trainer.py` says when.
"""

import functools
import importlib.metadata
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from packaging.requirements import Requirement

from cope_trl.evaluation.plots import success_curve
from env_adapters import registry
from env_adapters.errors import EnvAdapterError

DISTRIBUTION = "cope_trl"
PICTURE = "assets/success_curve.png"
# What TRL's template says where the model did not come from the Hub.
NO_BASE_MODEL = "This model is a fine-tuned version of [None](https://huggingface.co/None)"
LOCAL_BASE_MODEL = "This model is a fine-tuned version of one that is not on the Hub"

_FORECASTING = {
    "forecast_coef": "λ, weight of the forecasting loss",
    "forecast_horizon": "K, largest future offset",
    "forecast_gate": "trajectories forecast from",
    "forecast_group_norm": "divided by the successes of the group",
    "forecast_task_weight": "weight of a task",
    "forecast_reduction": "reduction over tokens and windows",
    "forecast_skip_invalid": "actions without effect left out of the targets",
    "forecast_max_windows": "windows a trajectory, at most",
    "forecast_update": "update",
}
_POLICY = {
    "num_generations": "rollouts a task",
    "generation_batch_size": "rollouts a batch",
    "num_iterations": "updates with each batch (μ)",
    "learning_rate": "learning rate",
    "beta": "KL coefficient",
    "entropy_coef": "entropy coefficient",
    "temperature": "sampling temperature",
    "max_turns": "turns of an episode (None: the environment's own limit)",
    "max_tokens_per_turn": "tokens of a turn",
    "max_completion_length": "tokens of an episode after its prompt",
    "seed": "seed",
}


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card says beyond TRL's own.

    Attributes:
        args: the [`~cope_trl.CoPEConfig`].
        forecast_coef: λ in force.
        environments: names of the environments.
        step: optimizer steps done.
        log_history: `trainer.state.log_history`.
        citations: BibTeX entries to add, by what they are of.
        repository: Hub id of the model, or `None`.
        trajectories: whether the folder holds the training episodes.
    """

    args: Any
    forecast_coef: float
    environments: Sequence[str]
    step: int
    log_history: Sequence[Mapping[str, Any]]
    citations: Mapping[str, str]
    repository: str | None = None
    trajectories: bool = False


def complete_card(folder: str | os.PathLike[str], facts: CardFacts) -> None:
    """Add to the card that TRL wrote into a folder, and draw the picture it shows.

    Args:
        folder: where `README.md` is.
        facts: what to add.
    """
    path = Path(folder) / "README.md"
    card = ModelCard.load(path)
    first, *others = dict.fromkeys(card.data.tags or ["generated_from_trainer"])
    card.data.tags = [first, *sorted(others)]  # in an order that does not change from save to save
    picture = bool(success_of(facts.log_history))
    if picture:
        success_curve(facts.log_history, Path(folder) / PICTURE)
    card.text = complete_text(card.text, facts, picture)
    card.save(path)


def complete_text(text: str, facts: CardFacts, picture: bool) -> str:
    """The text of a card with the sections added.

    Args:
        text: TRL's, without the metadata.
        facts: what to add.
        picture: whether [`PICTURE`] is there to be shown.
    """
    opening, *sections = text.split("\n## ")
    bodies = {section.split("\n", 1)[0].strip(): section.split("\n", 1)[1] for section in sections}
    known = [name for name in facts.environments if name in registry.registered()]
    if "Quick start" in bodies and known and len(known) == len(facts.environments):
        bodies["Quick start"] = _quick_start(facts.repository or "path/to/this/folder", known)
    procedure = bodies.get("Training procedure", "").strip("\n")
    method, heading, versions = procedure.partition("### Framework versions")
    added = [_success(facts, picture), _forecasting(facts), _policy(facts), _environments(facts)]
    own = f"\n\n- CoPE for TRL: {_version(DISTRIBUTION)}\n" + versions.lstrip("\n") if heading else ""
    parts = ["\n" + re.sub(r"\n{3,}", "\n\n", method.strip()), *filter(None, added), heading + own]
    bodies["Training procedure"] = "\n\n".join(parts) + "\n"
    cited = "".join(f"\n\nCite {name} as:\n\n```bibtex\n{entry}\n```" for name, entry in facts.citations.items())
    bodies["Citations"] = bodies.get("Citations", "").rstrip() + cited + "\n"
    opening = opening.replace(NO_BASE_MODEL, LOCAL_BASE_MODEL)
    return "\n## ".join([opening, *(f"{title}\n{body}" for title, body in bodies.items())])


def success_of(log_history: Iterable[Mapping[str, Any]], key: str = "episode/success") -> list[tuple[int, float]]:
    """(optimizer step, success rate) of everything that was logged under a key."""
    return [
        (int(entry.get("step", 0)), float(entry[key]))
        for entry in log_history
        if isinstance(entry.get(key), int | float) and math.isfinite(entry[key])
    ]


def packages_of(environment: str) -> dict[str, str]:
    """Installed packages an environment comes from and plays with, with their versions.

    They are those of the extra of the same name, and the distribution that holds its class. None for an environment
    that the registry does not know.
    """
    try:
        module = registry.resolve(environment).__module__
    except EnvAdapterError:
        return {}
    top = module.split(".")[0]
    homes = (DISTRIBUTION,) if top in (DISTRIBUTION, "env_adapters") else _distributions().get(top, ())
    found = {}
    for name in (*homes, *_extra(environment)):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # an optional part of it
            continue
    return found


@functools.cache
def _distributions() -> Mapping[str, Sequence[str]]:
    """Distributions by the modules they install; reads the files of all of them."""
    return importlib.metadata.packages_distributions()


@functools.cache
def _extra(name: str) -> tuple[str, ...]:
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(
        found.name for found in requirements if found.marker is not None and found.marker.evaluate({"extra": name})
    )


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _table(first: str, second: str, rows: Iterable[tuple[str, Any]]) -> str:
    lines = [f"| {first} | {second} |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]
    return "\n".join(lines)


def _quick_start(model: str, environments: Sequence[str]) -> str:
    lines = [f"cope-trl eval --model {model} --environment {name}" for name in environments]
    return "\nPlay episodes with it and count the successes:\n\n```bash\n" + "\n".join(lines) + "\n```\n"


def _success(facts: CardFacts, picture: bool) -> str:
    curve = success_of(facts.log_history)
    if not curve:
        return ""
    (first_step, first), (last_step, last) = curve[0], curve[-1]
    lines = [
        f"Success rate of the training episodes: {first:.1%} as logged at step {first_step}, {last:.1%} at step "
        f"{last_step}."
    ]
    evaluated = success_of(facts.log_history, "eval_episode/success")
    if evaluated:
        lines.append(f"Of the evaluation episodes: {evaluated[-1][1]:.1%} at step {evaluated[-1][0]}.")
    if picture:
        lines.append(f"\n![Success rate over the optimizer steps]({PICTURE})")
    if facts.trajectories:
        lines.append("\nEvery training episode is in [trajectories](./trajectories), as Parquet.")
    return "### Success\n\n" + "\n".join(lines)


def _forecasting(facts: CardFacts) -> str:
    if not facts.forecast_coef:
        return "### Forecasting\n\nNone: `forecast_coef` was 0, so this is plain GRPO."
    values = {name: getattr(facts.args, name) for name in _FORECASTING}
    values["forecast_coef"] = facts.forecast_coef
    if values["forecast_update"] == "separate":
        values["forecast_update"] = f"separate, at {facts.args.forecast_lr_scale:g} times the policy's learning rate"
    rows = ((f"`{name}`: {_FORECASTING[name]}", value) for name, value in values.items())
    horizon = facts.args.forecast_horizon
    text = (
        "On its own successful episodes the model also learned to forecast the next actions from every point it "
        f"passed through, up to {horizon + 1} each. At inference nothing changes."
    )
    return f"### Forecasting\n\n{text}\n\n{_table('setting', 'value', rows)}"


def _policy(facts: CardFacts) -> str:
    rows = [(f"`{name}`: {label}", getattr(facts.args, name)) for name, label in _POLICY.items()]
    return "### Policy\n\n" + _table("setting", "value", [("optimizer steps", facts.step), *rows])


def _environments(facts: CardFacts) -> str:
    if not facts.environments:
        return ""
    rows = []
    for name in facts.environments:
        packages = ", ".join(f"{package} {version}" for package, version in packages_of(name).items())
        rows.append((f"`{name}`", packages or "of the training script"))
    return "### Environments\n\n" + _table("environment", "packages", rows)
