"""Environments by name: `make("household")`.

Nothing is imported before it is asked for, so an environment whose dependency is missing never stands in the way of
another. Installed distributions add environments through the entry-point group `cope_trl.environments`.
"""

import importlib
from importlib import metadata
from typing import Any

import gymnasium

from env_adapters.errors import EnvAdapterError, MissingDependencyError, UnknownEnvironmentError, did_you_mean

ENTRY_POINT_GROUP = "cope_trl.environments"

_BUILT_IN = {
    "alfworld": "env_adapters.alfworld:AlfWorldEnv",
    "appworld": "env_adapters.appworld:AppWorldEnv",
    "household": "env_adapters.household:HouseholdEnv",
    "scienceworld": "env_adapters.scienceworld:ScienceWorldEnv",
    "tau2": "env_adapters.tau2:Tau2Env",
    "webshop": "env_adapters.webshop:WebShopEnv",
}
# What a name with a colon stands for depends on all of it: the function makes the class from the whole name.
_SCHEMES = {"openenv": "env_adapters.openenv.resolve:environment_class"}
_registered: dict[str, str | type[Any]] = dict(_BUILT_IN)


def register(name: str, entry_point_or_class: str | type[Any], *, overwrite: bool = False) -> None:
    """Make an environment available under a name, for the life of this process.

    Args:
        name: the name, also the value of a dataset's `environment` column.
        entry_point_or_class: the class, or `"package.module:Class"`, imported at first use.
        overwrite: whether a name that is already taken may be given to another class.

    Raises:
        EnvAdapterError: the name is empty or taken, or the second argument is neither of the two.
    """
    if not isinstance(name, str) or not name:
        raise EnvAdapterError(f"`name` must be a non-empty string, got {name!r}.")
    if isinstance(entry_point_or_class, str):
        module, colon, attribute = entry_point_or_class.partition(":")
        if not (module and colon and attribute):
            raise EnvAdapterError(
                f"`entry_point_or_class` is {entry_point_or_class!r}, but it must read 'package.module:Class'."
            )
    else:
        _check_class(name, entry_point_or_class)
    if not overwrite and _registered.get(name, entry_point_or_class) != entry_point_or_class:
        raise EnvAdapterError(
            f"`name` is {name!r}, which already stands for {_registered[name]!r}; choose another name, or pass "
            "`overwrite=True`."
        )
    _registered[name] = entry_point_or_class


def registered() -> list[str]:
    """Names of all environments, those of installed third-party distributions included, sorted."""
    return sorted({*_registered, *(point.name for point in _third_party())})


def resolve(name: str) -> type[Any]:
    """The environment class behind a name, imported now.

    Args:
        name: a name from [`registered`], or `openenv:` and the address of a server.

    Returns:
        A subclass of `gymnasium.Env`, in most cases of [`~env_adapters.base.TextEnv`].

    Raises:
        UnknownEnvironmentError: no environment has that name.
        MissingDependencyError: its module needs something that is not installed.
        EnvAdapterError: what the name stands for is not a Gymnasium environment class, or nothing at that address.
    """
    found = _registered.get(name) if isinstance(name, str) else None
    if found is None:
        # What this process registered comes first: an installed distribution cannot take over a built-in name.
        found = next((point.value for point in _third_party() if point.name == name), None)
    if found is None and isinstance(name, str) and (maker := _SCHEMES.get(name.partition(":")[0])) and ":" in name:
        made: type[Any] = _load(name, maker)(name)
        return made
    if found is None:
        names = registered()
        raise UnknownEnvironmentError(
            f"`name` is {name!r}, but the environments are {names}.{did_you_mean(name, names)} Add your own with "
            f"`env_adapters.register` or the entry-point group {ENTRY_POINT_GROUP!r}."
        )
    if isinstance(found, str):
        found = _load(name, found)
        _check_class(name, found)
    return found


def make(name: str, **kwargs: Any) -> gymnasium.Env[str, str]:
    """Make an environment.

    Args:
        name: a name from [`registered`], or `openenv:` and the address of a server.
        **kwargs: passed to the environment's constructor.

    Returns:
        A new environment; call `reset` on it first.
    """
    environment: gymnasium.Env[str, str] = resolve(name)(**kwargs)
    return environment


def _third_party() -> list[metadata.EntryPoint]:
    return list(metadata.entry_points(group=ENTRY_POINT_GROUP))


def _load(name: str, entry_point: str) -> Any:
    module_name, _, attribute = entry_point.partition(":")
    try:
        module = importlib.import_module(module_name)
    except EnvAdapterError:
        raise  # the adapter says itself what is missing, and how to get it
    except ImportError as error:
        raise MissingDependencyError(
            f"The environment {name!r} ({entry_point}) cannot be imported: {error}. Install what it needs."
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise EnvAdapterError(
            f"The environment {name!r} stands for {entry_point!r}, but {module_name!r} has no {attribute!r}."
        ) from error


def _check_class(name: str, found: Any) -> None:
    if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
        raise EnvAdapterError(f"The environment {name!r} must be a subclass of gymnasium.Env, got {found!r}.")
