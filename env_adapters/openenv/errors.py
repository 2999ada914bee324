"""What can go wrong between a client and a server; each message names the address and the remedy."""

from env_adapters import errors
from env_adapters.errors import EnvAdapterError


class OpenEnvError(EnvAdapterError, ConnectionError):
    """A server cannot be reached, refuses to play, went away, or answers what is not OpenEnv's."""


class OpenEnvTimeoutError(OpenEnvError, TimeoutError):
    """A server did not answer in time; the session was dropped."""


class RemoteEnvironmentError(EnvAdapterError):
    """The environment on the server raised an exception that is none of this package's; the server lives on."""


def spoken(error: BaseException) -> str:
    """An exception as one line that any text channel can carry: `"Kind: message"`."""
    text = f"{type(error).__name__}: {error}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def as_here(url: str, said: str) -> EnvAdapterError:
    """The exception to raise here for one spoken there: of the same class where that is one of this package's.

    Args:
        url: the server.
        said: what [`spoken`] made of it.
    """
    name, _, text = said.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, EnvAdapterError):
        return kind(f"{text} (at {url})")
    return RemoteEnvironmentError(f"The environment at {url} raised {said}")
