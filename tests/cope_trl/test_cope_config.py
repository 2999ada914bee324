"""The configuration: what it adds, what it changes, and what it refuses."""

import math
from dataclasses import fields

import pytest
import yaml
from support import make_config
from trl import GRPOConfig, TrlParser

from cope_trl.cope_config import CoPEConfig
from cope_trl.errors import ConfigError

NEW = {
    "forecast_coef": 0.01,
    "forecast_horizon": 2,
    "forecast_gate": "success",
    "forecast_group_norm": True,
    "forecast_task_weight": "uniform",
    "forecast_reduction": "mean",
    "forecast_skip_invalid": False,
    "forecast_max_windows": None,
    "forecast_update": "joint",
    "forecast_lr_scale": 1.0,
    "forecast_engine": "auto",
    "forecast_batch_size": None,
    "forecast_grad_norm_steps": 25,
    "max_turns": None,
    "max_turns_eval": None,
    "max_tokens_per_turn": 512,
    "max_prompt_length": None,
    "environment_timeout": 120.0,
    "max_concurrent_episodes": None,
    "rollout_schedule": "auto",
    "profile": False,
    "save_trajectories": True,
    "success_threshold": 1.0,
}
CHANGED = {
    "max_completion_length": 8192,
    "loss_type": "grpo",
    "beta": 0.001,
    "use_bias_correction_kl": False,
    "entropy_coef": 0.001,
    "vllm_importance_sampling_correction": False,
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant",
}


def defaults(cls):
    return {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(cls)}


def test_new_fields_and_their_defaults():
    ours, theirs = defaults(CoPEConfig), defaults(GRPOConfig)
    assert {name: value for name, value in ours.items() if name not in theirs} == NEW
    assert theirs.keys() <= ours.keys()


def test_changed_defaults_are_exactly_these():
    ours, theirs = defaults(CoPEConfig), defaults(GRPOConfig)
    assert {name: ours[name] for name in theirs if ours[name] != theirs[name]} == CHANGED


def test_the_same_differences_are_left_after_construction(tmp_path):
    common = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    ours, theirs = CoPEConfig(**common), GRPOConfig(**common)
    differing = {f.name for f in fields(GRPOConfig) if getattr(ours, f.name) != getattr(theirs, f.name)}
    assert differing == CHANGED.keys()


def test_the_docstring_tells_every_field():
    text = CoPEConfig.__doc__
    described, changed = text.split("Changed defaults:")
    for name, default in NEW.items():
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert f"        {name} (" in described, name
        entry = described.split(f"        {name} (")[1].split("\n")[0]
        assert entry.endswith(f"*optional*, defaults to `{shown}`):"), name
    for name, default in CHANGED.items():
        assert f"        {name}: " in changed, name
        assert f"{default}" in changed.split(f"        {name}: ")[1].split("\n")[0], name
    for field in fields(CoPEConfig):
        if field.name in {**NEW, **CHANGED}:
            assert field.metadata["help"], field.name


BAD = [
    *[(name, value) for name in ("forecast_coef", "forecast_lr_scale") for value in (-0.5, math.nan, None)],
    *[(name, value) for name in ("forecast_horizon", "forecast_grad_norm_steps") for value in (-1, None)],
    *[
        (name, value)
        for name in (
            "forecast_gate",
            "forecast_task_weight",
            "forecast_reduction",
            "forecast_update",
            "forecast_engine",
        )
        for value in ("Success", "", None)
    ],
    *[
        (name, value)
        for name in ("forecast_max_windows", "forecast_batch_size", "max_turns", "max_turns_eval", "max_prompt_length")
        for value in (0, -3)
    ],
    *[(name, value) for name in ("max_tokens_per_turn", "max_completion_length") for value in (0, -1, None)],
    *[("environment_timeout", value) for value in (0, -1.0, math.nan)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_one_error_with_field_and_value(tmp_path, name, value):
    with pytest.raises(ConfigError) as refused:
        make_config(tmp_path, **{name: value})
    message = str(refused.value)
    assert message.startswith(f"`{name}` is {value!r}; it must be ")
    others = (NEW.keys() | CHANGED.keys()) - {name, "per_device_train_batch_size"}
    assert not any(f"`{other}` is" in message for other in others)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forecast_coef", 0),
        ("forecast_horizon", 0),
        ("forecast_lr_scale", 0.0),
        ("forecast_grad_norm_steps", 0),
        ("forecast_max_windows", 1),
        ("forecast_batch_size", 1),
        ("max_turns", 1),
        ("max_turns_eval", 1),
        ("max_tokens_per_turn", 1),
        ("max_completion_length", 1),
        ("max_prompt_length", 1),
        ("environment_timeout", 0.01),
        *[("forecast_gate", v) for v in ("success", "mixed", "all")],
        *[("forecast_task_weight", v) for v in ("uniform", "failure_rate")],
        *[("forecast_reduction", v) for v in ("mean", "sum")],
        *[("forecast_update", v) for v in ("joint", "separate")],
        *[("forecast_engine", v) for v in ("auto", "shared_prefix", "separate")],
    ],
)
def test_the_edges_are_allowed(tmp_path, name, value):
    assert getattr(make_config(tmp_path, **{name: value}), name) == value


def test_an_error_names_what_is_allowed(tmp_path):
    with pytest.raises(ConfigError, match=r"\['success', 'mixed', 'all'\]"):
        make_config(tmp_path, forecast_gate="none")
    with pytest.raises(ConfigError, match=r"at least 0 \(0 turns forecasting off\)"):
        make_config(tmp_path, forecast_coef=-1)


def test_the_group_must_divide_the_batch(tmp_path):
    with pytest.raises(ConfigError, match=r"`num_generations` is 3, which does not divide `generation_batch_size`=4"):
        make_config(tmp_path, num_generations=3)
    assert make_config(tmp_path, num_generations=2).generation_batch_size == 4


def test_errors_that_are_not_ours_pass_through(tmp_path):
    with pytest.raises(ValueError, match="at least 2 generations") as refused:
        make_config(tmp_path, num_generations=1)
    assert not isinstance(refused.value, ConfigError)


def test_liger_and_a_shared_prefix_exclude_each_other():
    """Checked on a bare object: the kernels need not be installed."""

    def check(**changes):
        config = CoPEConfig.__new__(CoPEConfig)
        vars(config).update(defaults(CoPEConfig), use_liger_kernel=True, **changes)
        config._check_own_fields()

    for engine in ("auto", "shared_prefix"):
        with pytest.raises(ConfigError, match=rf"`use_liger_kernel` is True with `forecast_engine`='{engine}'"):
            check(forecast_engine=engine)
    check(forecast_engine="separate")
    check(forecast_coef=0)


# ---------------------------------------------------------------- YAML and the command line

WRITTEN = {
    "forecast_coef": 0.05,
    "forecast_horizon": 4,
    "forecast_gate": "mixed",
    "forecast_group_norm": False,
    "forecast_task_weight": "failure_rate",
    "forecast_reduction": "sum",
    "forecast_skip_invalid": True,
    "forecast_max_windows": 8,
    "forecast_update": "separate",
    "forecast_lr_scale": 0.5,
    "forecast_engine": "separate",
    "forecast_batch_size": 3,
    "forecast_grad_norm_steps": 0,
    "max_turns": 20,
    "max_turns_eval": 30,
    "max_tokens_per_turn": 256,
    "max_prompt_length": 2048,
    "environment_timeout": 60.0,
    "save_trajectories": False,
    "success_threshold": 0.5,
    "max_concurrent_episodes": 16,
    "rollout_schedule": "lock_step",
    "profile": True,
    "max_completion_length": 4096,
    "loss_type": "dapo",
    "beta": 0.0,
    "use_bias_correction_kl": True,
    "entropy_coef": 0.0,
    "vllm_importance_sampling_correction": True,
    "weight_decay": 0.0,
    "lr_scheduler_type": "linear",
}
MACHINE = {"use_cpu": True, "bf16": False}


def parse(arguments):
    (config,) = TrlParser((CoPEConfig,)).parse_args_and_config(arguments)
    return config


def test_every_value_of_the_round_trip_differs_from_its_default():
    assert WRITTEN.keys() == NEW.keys() | CHANGED.keys()
    assert all(WRITTEN[name] != value for name, value in {**NEW, **CHANGED}.items())


def test_yaml_round_trip(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), **MACHINE, **WRITTEN}))
    config = parse(["--config", str(path)])
    assert {name: getattr(config, name) for name in WRITTEN} == WRITTEN
    # What it writes down itself is read back as the same configuration.
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump({name: config.to_dict()[name] for name in ["output_dir", *MACHINE, *WRITTEN]}))
    assert {name: getattr(parse(["--config", str(again)]), name) for name in WRITTEN} == WRITTEN


def test_command_line_round_trip(tmp_path):
    arguments = ["--output_dir", str(tmp_path)]
    for name, value in {**MACHINE, **WRITTEN}.items():
        arguments += [f"--{name}", str(value)]
    config = parse(arguments)
    assert {name: getattr(config, name) for name in WRITTEN} == WRITTEN
    for name, value in WRITTEN.items():
        assert type(getattr(config, name)) is type(value) or name == "lr_scheduler_type", name


def test_the_command_line_comes_before_the_file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), **MACHINE, "forecast_coef": 0.05, "max_turns": 7}))
    config = parse(["--config", str(path), "--forecast_coef", "0.2"])
    assert (config.forecast_coef, config.max_turns) == (0.2, 7)


def test_a_bad_value_in_a_file_is_the_same_error(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"output_dir": str(tmp_path), **MACHINE, "forecast_horizon": -2}))
    with pytest.raises(ConfigError, match="`forecast_horizon` is -2; it must be at least 0"):
        parse(["--config", str(path)])


def test_help_names_every_new_option(capsys):
    with pytest.raises(SystemExit):
        parse(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name}" in shown for name in NEW)


@pytest.mark.parametrize(
    ("evaluation", "batch", "fits"), [(3, 4, False), (None, 6, False), (1, 3, True), (2, 4, True)]
)
def test_groups_of_an_evaluation_must_fit_its_batch(tmp_path, evaluation, batch, fits):
    settings = {
        "output_dir": str(tmp_path),
        **MACHINE,
        "eval_strategy": "steps",
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "per_device_eval_batch_size": batch,
        "num_generations_eval": evaluation,
    }
    if fits:
        assert CoPEConfig(**settings).num_generations_eval == evaluation
        return
    with pytest.raises(ConfigError, match=f"`num_generations_eval` is {evaluation} .*1 always fits"):
        CoPEConfig(**settings)
