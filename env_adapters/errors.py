"""Exceptions of the environment boundary; each message names the argument, the value received and the remedy."""

import difflib
from collections.abc import Iterable


class EnvAdapterError(Exception):
    """Base class of everything this package raises on purpose."""


class UnknownEnvironmentError(EnvAdapterError, ValueError):
    """No adapter is registered under the name that was asked for."""


class UnknownTaskError(EnvAdapterError, ValueError):
    """The environment has no task with that id."""


class UnknownSplitError(EnvAdapterError, ValueError):
    """The environment has no split with that name."""


class EnvContractError(EnvAdapterError):
    """`check_env` found that an environment breaks the contract; the message says where."""


class MissingDependencyError(EnvAdapterError, ImportError):
    """A package or program the environment needs is not installed."""


class EnvDataError(EnvAdapterError, OSError):
    """The data files an environment plays from are missing, damaged, or of another version."""


class EpisodeStateError(EnvAdapterError, RuntimeError):
    """`step` was called before `reset`, after the end of an episode, or after `close`."""


# Wrong names and missing programs do not get better by going on: raised, where other errors only fail an episode.
USER_MISTAKES = (UnknownEnvironmentError, UnknownTaskError, MissingDependencyError)


def did_you_mean(value: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    close = difflib.get_close_matches(str(value), list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
