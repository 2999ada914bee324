"""Names, lazy imports, third-party entry points."""

import subprocess
import sys
from importlib import metadata

import gymnasium
import pytest

from env_adapters import registry
from env_adapters.errors import EnvAdapterError, MissingDependencyError, UnknownEnvironmentError
from env_adapters.household import HouseholdEnv
from env_adapters.registry import make, register, registered, resolve


@pytest.fixture(autouse=True)
def _own_names(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._BUILT_IN))


@pytest.fixture
def third_party(monkeypatch):
    """Pretend that installed distributions declare these entry points."""

    def declare(**points):
        group = registry.ENTRY_POINT_GROUP
        declared = [metadata.EntryPoint(name, value, group) for name, value in points.items()]
        monkeypatch.setattr(registry.metadata, "entry_points", lambda *, group: declared)

    return declare


class Custom(gymnasium.Env):
    def __init__(self, level=0):
        self.level = level


def test_built_ins():
    assert {"household", "scienceworld"} <= set(registered())
    assert resolve("household") is HouseholdEnv


def test_make_passes_arguments_on():
    env = make("household", size="tiny")
    assert isinstance(env, HouseholdEnv)
    assert env.size == "tiny"


def test_register_a_class_or_a_path():
    register("custom", Custom)
    assert make("custom", level=3).level == 3
    register("path", "env_adapters.household:HouseholdEnv")
    assert resolve("path") is HouseholdEnv
    assert {"custom", "path"} <= set(registered())


def test_a_taken_name_needs_overwrite():
    register("custom", Custom)
    register("custom", Custom)  # the same again is no conflict
    with pytest.raises(EnvAdapterError, match="already stands for 'env_adapters.household:HouseholdEnv'"):
        register("household", Custom)
    register("household", Custom, overwrite=True)
    assert resolve("household") is Custom


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", Custom, "`name` must be a non-empty string, got ''"),
        ("x", "no_colon", "it must read 'package.module:Class'"),
        ("x", "module:", "it must read 'package.module:Class'"),
        ("x", int, "must be a subclass of gymnasium.Env, got <class 'int'>"),
        ("x", 7, "must be a subclass of gymnasium.Env, got 7"),
    ],
)
def test_register_refuses(name, value, message):
    with pytest.raises(EnvAdapterError, match=message):
        register(name, value)
    assert "x" not in registered()


@pytest.mark.parametrize("name", ["houshold", "HOUSEHOLD", None, 7, ["household"]])
def test_unknown_name(name):
    with pytest.raises(UnknownEnvironmentError, match=r"the environments are \[.*'household'"):
        make(name)


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownEnvironmentError, match=r"`name` is 'houshold'.*Did you mean 'household'\?"):
        resolve("houshold")


def test_third_party_environments(third_party):
    third_party(theirs="env_adapters.household:HouseholdEnv", household="somewhere.else:Env")
    assert "theirs" in registered()
    assert registered().count("household") == 1
    assert resolve("theirs") is HouseholdEnv
    assert resolve("household") is HouseholdEnv  # a built-in name cannot be taken over


def test_what_a_name_stands_for_is_missing(third_party):
    third_party(
        no_module="no_such_module_here:Env",
        no_class="env_adapters.household:NoSuchEnv",
        no_env="env_adapters.base:Task",
    )
    with pytest.raises(MissingDependencyError, match=r"'no_module' .* cannot be imported: No module named"):
        make("no_module")
    with pytest.raises(EnvAdapterError, match="'env_adapters.household' has no 'NoSuchEnv'"):
        make("no_class")
    with pytest.raises(EnvAdapterError, match="must be a subclass of gymnasium.Env"):
        make("no_env")


def test_an_adapters_own_error_about_its_dependency_is_kept(monkeypatch, third_party):
    third_party(picky="picky_module:Env")

    def refuse(name):
        raise MissingDependencyError("Java is missing; install it so.")

    monkeypatch.setattr(registry.importlib, "import_module", refuse)
    with pytest.raises(MissingDependencyError, match="^Java is missing; install it so.$"):
        make("picky")


def test_one_environment_does_not_import_another():
    code = (
        "import sys, env_adapters\n"
        "assert 'gymnasium' not in sys.modules\n"
        "env_adapters.make('household').close()\n"
        "heavy = ['scienceworld', 'env_adapters.scienceworld', 'torch', 'trl', 'transformers', 'cope_trl']\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
