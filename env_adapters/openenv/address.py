"""The name of an environment on other hosts: `openenv:http://a:8000,http://b:8000?action_field=message`."""

import re
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from env_adapters.errors import EnvAdapterError, did_you_mean

SCHEME = "openenv:"
# What may follow a `?`, for servers of other people's environments.
OPTIONS = ("action_field", "observation_field", "protocol")
# A host that failed is tried after the others for so long, in seconds.
AVOID_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed name.

    Attributes:
        name: as it was given; also the value of a dataset's `environment` column.
        urls: base addresses of the hosts, without a slash at the end.
        options: what followed the `?`.
    """

    name: str
    urls: tuple[str, ...]
    options: dict[str, str] = field(default_factory=dict, hash=False)


def parse(name: str) -> Address:
    """Read a name.

    Raises:
        EnvAdapterError: it is not of this form; the message says how it reads.
    """
    how = "write 'openenv:http://host:port', with several hosts 'openenv:http://a:8000,http://b:8000'"
    hosts, _, query = name.removeprefix(SCHEME).partition("?")
    urls = tuple(url.strip().rstrip("/") for url in re.split("[,;]", hosts) if url.strip())
    if not urls:
        raise EnvAdapterError(f"`name` is {name!r}, which names no host; {how}.")
    for url in urls:
        parts = urlsplit(url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            good = False
        if not good:
            raise EnvAdapterError(f"`name` is {name!r}, but {url!r} is no address of a server; {how}.")
        if parts.username is not None:
            raise EnvAdapterError(
                "`name` holds a user or a password, which would end up in datasets and logs; put the token into the "
                "environment variable COPE_TRL_TOKEN instead."
            )
    options = dict(parse_qsl(query))
    for option in options:
        if option not in OPTIONS:
            raise EnvAdapterError(
                f"`name` is {name!r}, but {option!r} is none of the options {list(OPTIONS)}."
                + did_you_mean(option, OPTIONS)
            )
    return Address(name, urls, options)


class Hosts:
    """Spreads the sessions of a process over hosts: the one with the fewest sessions first, one that failed last.

    Args:
        urls: the hosts.
        start: which of them goes first while all are equal; the rank of a process, so that ranks begin apart.
    """

    def __init__(self, urls: tuple[str, ...], start: int = 0) -> None:
        start %= len(urls)
        self._sessions = dict.fromkeys(urls[start:] + urls[:start], 0)
        self._failed: dict[str, float] = {}
        self._lock = threading.Lock()

    def take(self, tried: set[str]) -> str | None:
        """The host for one more session, counted from now on; `None` when all were tried."""
        with self._lock:
            left = [url for url in self._sessions if url not in tried]
            if not left:
                return None
            recently = time.monotonic() - AVOID_SECONDS
            url = min(left, key=lambda url: (self._failed.get(url, recently) > recently, self._sessions[url]))
            self._sessions[url] += 1
            return url

    def give_back(self, url: str, failed: bool = False) -> None:
        """One session less there, because it ended or because it could not begin."""
        with self._lock:
            self._sessions[url] -= 1
            if failed:
                self._failed[url] = time.monotonic()
