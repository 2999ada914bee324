"""`cope-trl train`: tasks, (optionally) an agent built on the spot, evaluation, training, evaluation, what to keep."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset
from rich.console import Console
from transformers import PrinterCallback
from transformers.trainer_callback import ProgressCallback
from trl import ModelConfig, TrlParser, get_peft_config, get_quantization_config

from cope_trl.checkpoints import last_whole, read_resume
from cope_trl.cope_config import CoPEConfig
from cope_trl.cope_trainer import CoPETrainer
from cope_trl.data.tasks import load_tasks
from cope_trl.errors import ConfigError
from cope_trl.evaluation.metrics import results_table, summarize
from cope_trl.evaluation.plots import learning_curve
from cope_trl.local_agent.warm_start import WarmStartArguments, warm_start
from cope_trl.scripts.progress import CompactProgress, evaluation_bar
from cope_trl.scripts.results import write_results
from env_adapters import registry


@dataclass
class CoPEScriptArguments:
    """
    Arguments of the training script.

    Args:
        environment (`str`, *optional*, defaults to `"household"`):
            Registry name of the environment, or several with commas between.
        environment_options (`dict` or `str`, *optional*):
            Options of the task list, for example `{"size": "tiny"}`.
        split, test_split (`str`, *optional*, defaults to `"train"` and `"test"`):
            Splits to train on and to evaluate on.
        ids (`str`, *optional*):
            Id file of the training tasks, in the AgentGym format or one id a line.
        num_tasks (`int`, *optional*):
            Train on this many tasks of the split.
        eval_tasks (`int`, *optional*, defaults to `0`):
            Evaluate on this many test tasks before and after training; 0 does not evaluate, -1 takes all.
        eval_repeats (`int`, *optional*, defaults to `1`):
            Episodes of each of them.
    """

    environment: str = field(default="household", metadata={"help": "Environment, or several with commas between."})
    environment_options: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Options of the task list, as JSON."}
    )
    split: str = field(default="train", metadata={"help": "Split to train on."})
    test_split: str = field(default="test", metadata={"help": "Split to evaluate on."})
    ids: str | None = field(default=None, metadata={"help": "Id file of the training tasks."})
    num_tasks: int | None = field(default=None, metadata={"help": "Train on this many tasks."})
    eval_tasks: int = field(default=0, metadata={"help": "Test tasks to evaluate on; -1 takes all."})
    eval_repeats: int = field(default=1, metadata={"help": "Episodes of each test task."})

    def __post_init__(self) -> None:
        if isinstance(self.environment_options, str):
            try:
                self.environment_options = json.loads(self.environment_options)
            except json.JSONDecodeError as error:
                raise ConfigError(
                    f"`environment_options` is {self.environment_options!r}, which is no JSON object: {error}. Write "
                    'for example \'{"size": "tiny"}\'.'
                ) from error

    @property
    def names(self) -> list[str]:
        """Environment names."""
        return [name.strip() for name in self.environment.split(",") if name.strip()]

    def tasks(self, split: str, limit: int | None = None, ids: str | None = None) -> Dataset:
        """Tasks of a split."""
        names = self.names
        options = self.environment_options if isinstance(self.environment_options, dict) else {}
        return load_tasks(names[0] if len(names) == 1 else names, split, limit=limit, ids=ids, **options)


def parse(argv: list[str]) -> tuple[CoPEScriptArguments, WarmStartArguments, CoPEConfig, ModelConfig]:
    """Read `--config file.yaml` and the command line into the four groups of arguments."""
    parser = TrlParser((CoPEScriptArguments, WarmStartArguments, CoPEConfig, ModelConfig), prog="cope-trl train")
    try:
        return parser.parse_args_and_config(argv, fail_with_unknown_args=True)
    except (ValueError, OSError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{error} (`cope-trl train --help` lists every argument)") from error


def main(argv: list[str]) -> Path:
    """Train; returns the output folder."""
    script, warm, args, model_args = parse(argv)
    console = Console(stderr=False)
    # Names are checked, and data is loaded, before anything expensive.
    train_dataset = script.tasks(script.split, script.num_tasks, script.ids)
    test_dataset = None
    if script.eval_tasks:
        test_dataset = script.tasks(script.test_split, None if script.eval_tasks < 0 else script.eval_tasks)
        test_dataset = test_dataset.select(
            [i % len(test_dataset) for i in range(len(test_dataset) * script.eval_repeats)]
        )
    model = model_args.model_name_or_path or _local_agent(script.names[0], train_dataset, warm, args, console)
    args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(args.model_init_kwargs or {}),
    }
    trainer = CoPETrainer(
        model=model,
        args=args,
        train_dataset=train_dataset,
        eval_dataset=test_dataset if args.eval_strategy != "no" else None,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    for shown in (ProgressCallback, PrinterCallback):
        trainer.remove_callback(shown)
    if not args.disable_tqdm:
        trainer.add_callback(CompactProgress)
    folder = Path(args.output_dir)
    resume = _checkpoint(args.resume_from_checkpoint, folder, console)
    results: dict[str, Any] = {}
    if test_dataset is not None:
        known = _measured_before(folder) if resume else None
        results["before"] = known or _evaluate(trainer, test_dataset, "before training")
        if trainer.is_world_process_zero():
            write_results(folder, results)
    trainer.train(resume_from_checkpoint=resume)
    if test_dataset is not None:
        results["after"] = _evaluate(trainer, test_dataset, "after training")
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        title = f"{script.environment}, {script.test_split} split, before → after training"
        _report(folder, trainer.state.log_history, results, title, console)
    if args.push_to_hub:
        trainer.push_to_hub()
    trainer.close()
    return folder


def _checkpoint(asked: str | bool | None, folder: Path, console: Console) -> str | None:
    """The checkpoint to resume from: the path asked for, or by "true" the latest whole one, if there is any."""
    resume = read_resume(asked)
    if not isinstance(resume, bool):
        return resume
    if not resume:
        return None
    # A job that is killed and started again by the same command has no checkpoint yet the first time.
    last = last_whole(folder)
    console.print(f"Resuming from [bold]{last}[/bold]." if last else "No checkpoint yet; starting from the beginning.")
    return None if last is None else str(last)


def _measured_before(folder: Path) -> dict[str, Any] | None:
    """What the run measured before training, where it was killed after that."""
    path = folder / "results.json"
    return json.loads(path.read_text(encoding="utf-8")).get("before") if path.exists() else None


def _local_agent(name: str, tasks: Dataset, warm: WarmStartArguments, args: CoPEConfig, console: Console) -> str:
    if not warm.warm_start:
        raise ConfigError(
            "`model_name_or_path` is None: name the model to train (a path or a Hub id), or set `warm_start` to true "
            "to build a tiny one on the spot."
        )
    folder = Path(args.output_dir) / "warm_start"
    built = (folder / "training_args.bin").exists()  # the file that is saved last
    if args.world_size > 1 and not built:
        raise ConfigError(
            f"`warm_start` runs in one process, but {args.world_size} were launched. Run once with one process, then "
            f"pass `model_name_or_path={folder}`."
        )
    if built:
        console.print(f"Starting from the agent in [bold]{folder}[/bold] (delete it to build another).")
        return str(folder)
    console.print("Building a tiny agent and cloning the scripted expert's noisy demonstrations.")
    turns = args.max_turns or registry.resolve(name).max_turns
    return str(
        warm_start(
            warm,
            folder,
            environment=name,
            task_ids=[row["task_id"] for row in tasks if row["environment"] == name],
            max_turns=turns,
            horizon=args.forecast_horizon,
            seed=args.seed,
            disable_tqdm=bool(args.disable_tqdm),
        )
    )


def _evaluate(trainer: CoPETrainer, dataset: Dataset, label: str) -> dict[str, Any]:
    shown = trainer.is_world_process_zero() and not trainer.args.disable_tqdm
    bar, advance = evaluation_bar(len(dataset), f"Evaluating {label}", shown)
    with bar:
        return dict(summarize(trainer.evaluate_tasks(dataset, advance)))


def _report(
    folder: Path, history: list[dict[str, Any]], results: dict[str, Any], title: str, console: Console
) -> None:
    if any("episode/success" in entry for entry in history):
        console.print(f"Learning curve: {learning_curve(history, folder / 'learning_curve.png')}")
    if results:
        write_results(folder, results)
        console.print(results_table(results["before"], results["after"], title=title))
    console.print(f"Model, trajectories and logs: {folder}")
