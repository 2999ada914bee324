"""The house rules that no linter knows: who may import or know whom, how long a module and a function may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_adapters.registry import registered

ROOT = Path(__file__).parents[1]
PACKAGES = ("cope_trl", "env_adapters")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
MODULES = [path.relative_to(ROOT).as_posix() for path in FILES]

MAX_MODULE_LINES = 300
MAX_FUNCTION_LINES = 60  # the docstring not counted

# What everybody may know of the environments: the contract, not any one of them.
ENVIRONMENT_CONTRACT = ("base", "errors", "protocols", "registry", "checker", "isolated")
ENVIRONMENTS = [
    f"env_adapters.{path.stem}"
    for path in sorted((ROOT / "env_adapters").iterdir())
    if not path.name.startswith("_")
    and path.stem not in ENVIRONMENT_CONTRACT
    and (path.is_dir() or path.suffix == ".py")
]
LOSSES = ["cope_trl.forecast.loss", "cope_trl.objectives"]
CONFIG = ["cope_trl.cope_config"]
TRAINER = ["cope_trl.cope_trainer"]

# Path prefix -> modules it must not import, not even for type annotations.
FORBIDDEN_IMPORTS = {
    "env_adapters/": ["torch", "trl", "transformers", "cope_trl"],
    "cope_trl/types.py": ["torch", "trl", "transformers", "datasets", "env_adapters"],
    "cope_trl/errors.py": ["torch", "trl", "transformers", "datasets", "env_adapters"],
    "cope_trl/rollout/": [*LOSSES, *CONFIG, *TRAINER, *ENVIRONMENTS],
    "cope_trl/forecast/windows.py": ["torch", "trl", "transformers", "env_adapters", *CONFIG, *TRAINER],
    "cope_trl/forecast/prompts.py": ["torch", "trl", "transformers", "env_adapters", *CONFIG, *TRAINER],
    "cope_trl/forecast/loss.py": ["trl", "transformers", "env_adapters", "cope_trl.chat", *CONFIG, *TRAINER],
    "cope_trl/objectives/": ["trl", "transformers", "env_adapters", "cope_trl.chat", *CONFIG, *TRAINER],
    "cope_trl/data/": ["torch", "trl", "transformers", *CONFIG, *TRAINER, *ENVIRONMENTS],
    "cope_trl/cope_config.py": ["env_adapters", "cope_trl.rollout", "cope_trl.chat", *TRAINER],
    "cope_trl/cope_trainer.py": ENVIRONMENTS,
}
# Path prefix of the files in which no environment may be named.
NAMELESS = ("cope_trl/rollout/", "cope_trl/forecast/", "cope_trl/cope_config.py", "cope_trl/cope_trainer.py")
ENVIRONMENT_NAMES = {*registered(), "alfworld", "appworld", "household", "scienceworld", "tau2", "webshop"}
LOSS_ARITHMETIC = {"log_softmax", "softmax", "cross_entropy", "nll_loss", "logsumexp", "kl_div"}


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / module).read_text(encoding="utf-8"), filename=module)


def imports(module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports; of `from a import b` both `a` and `a.b`."""
    package = module.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)


def belongs(name: str, to: str) -> bool:
    return name == to or name.startswith(f"{to}.")


def docstrings(tree: ast.AST) -> set[int]:
    """Identities of the string constants that are docstrings (also those that document an attribute)."""
    return {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_layers(module):
    rules = [forbidden for prefix, forbidden in FORBIDDEN_IMPORTS.items() if module.startswith(prefix)]
    broken = {
        f"{module}:{line} imports {name}"
        for forbidden in rules
        for line, name in imports(module)
        for rule in forbidden
        if belongs(name, rule) and not module.startswith(rule.replace(".", "/"))
    }
    assert not broken


@pytest.mark.parametrize("module", [module for module in MODULES if module.startswith(NAMELESS)])
def test_no_environment_is_named(module):
    tree = parse(module)
    prose = docstrings(tree)
    named = {
        f"{module}:{node.lineno} says {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ENVIRONMENT_NAMES and id(node) not in prose
    }
    assert not named


def test_the_trainer_holds_no_loss_arithmetic():
    used = {
        f"line {node.lineno}: {name}"
        for node in ast.walk(parse("cope_trl/cope_trainer.py"))
        if (name := getattr(node, "attr", getattr(node, "id", ""))) in LOSS_ARITHMETIC
    }
    assert not used


def test_the_config_loads_no_model():
    loaded = [
        f"line {line}: {name}"
        for line, name in imports("cope_trl/cope_config.py")
        if belongs(name, "transformers.models") or name.split(".")[-1].startswith(("AutoModel", "AutoTokenizer"))
    ]
    assert not loaded


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_stay_short(module):
    source = (ROOT / module).read_text(encoding="utf-8")
    lines = source.count("\n")
    assert lines <= MAX_MODULE_LINES, f"{module} has {lines} lines; split it by role"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            first = node.body[0]
            if ast.get_docstring(node) is not None:
                length -= first.end_lineno - first.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{module}:{node.lineno} `{node.name}` has {length} lines"


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_costs_no_torch():
    run(
        "import sys, cope_trl, cope_trl.evaluation.plots\n"
        "from cope_trl import Trajectory, ConfigError, forecast_windows, summarize\n"
        "assert 'CoPETrainer' in dir(cope_trl)\n"
        "heavy = {'torch', 'trl', 'transformers', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_environments_need_none_of_the_training_stack():
    names = [module.removesuffix(".py").replace("/", ".") for module in MODULES if module.startswith("env_adapters/")]
    run(
        "import sys, importlib\n"
        f"for name in {[name.removesuffix('.__init__') for name in names]!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'trl', 'transformers', 'cope_trl'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )


def test_both_packages_are_typed():
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_every_folder_with_code_is_a_package():
    missing = {str(path.parent.relative_to(ROOT)) for path in FILES if not (path.parent / "__init__.py").exists()}
    assert not missing  # setuptools would leave it out of a wheel
