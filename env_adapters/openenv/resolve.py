"""From a name to the class that plays what is served there."""

import functools
import os
import threading
from typing import Any

from env_adapters.isolated.proxy import PROTOCOLS
from env_adapters.openenv import wire
from env_adapters.openenv.address import Address, Hosts, parse
from env_adapters.openenv.client import OpenEnvEnv, ServedEnv
from env_adapters.openenv.connection import foreign_tongue
from env_adapters.openenv.describe import ROOT, Description, fetch
from env_adapters.openenv.errors import OpenEnvError
from env_adapters.openenv.foreign import ForeignEnv
from env_adapters.openenv.library import load

_lock = threading.Lock()
# The class attributes that are taken over as the server says them.
_PLAIN = ("instruction", "acknowledgement", "max_turns", "max_turns_eval", "mean_over_families")
_PAIRS = ("score_range", "splits")


def environment_class(name: str) -> type[OpenEnvEnv]:
    """The class that plays what the servers of an address serve; they are asked once in the life of a process.

    Args:
        name: `openenv:http://host:port`, several hosts separated by commas or semicolons.

    Returns:
        A [`ServedEnv`], where the servers were started by `cope-trl envs serve`, else a [`ForeignEnv`].

    Raises:
        OpenEnvError: a server cannot be reached, refuses the token, speaks another protocol or another version of it,
            or the servers serve different environments.
        EnvAdapterError: the name is not of that form.
        MissingDependencyError: openenv-core is not installed.
    """
    with _lock:  # two classes for one name would count sessions apart
        return _made(name)


@functools.cache
def _made(name: str) -> type[OpenEnvEnv]:
    address = parse(name)
    load("openenv.core.generic_client")  # seconds; here, where no deadline runs
    schemas = [_schema(url) for url in address.urls]
    ours = [schema["action"].get("title") == wire.ACTION for schema in schemas]
    described = [fetch(url, ROOT) if own else None for url, own in zip(address.urls, ours, strict=True)]
    for url, schema, said in zip(address.urls, schemas, described, strict=True):
        if (schema, said) != (schemas[0], described[0]):
            raise OpenEnvError(
                f"`name` is {name!r}, but {url} serves another environment than {address.urls[0]}; all hosts of one "
                "address must serve the same, with the same options and from the same version of this package."
            )
    rank = int(os.environ.get("RANK") or 0)
    common = {"name": name, "address": address, "hosts": Hosts(address.urls, start=rank)}
    if described[0] is None:
        return type("ForeignEnv", (ForeignEnv,), {**common, **ForeignEnv.attributes(address, schemas[0])})
    return type("ServedEnv", (ServedEnv,), {**common, **_served(address, described[0])})


def _schema(url: str) -> dict[str, Any]:
    schema = fetch(url, "/schema")
    if not isinstance(schema, dict) or not all(
        isinstance(schema.get(part), dict) for part in ("action", "observation")
    ):
        raise foreign_tongue(url, "it has no action and observation at '/schema'")
    return schema


def _served(address: Address, said: dict[str, Any]) -> dict[str, Any]:
    url = address.urls[0]
    if said.get("version") != wire.VERSION:
        raise OpenEnvError(
            f"The server at {url} serves version {said.get('version')!r} of a text environment, this package plays "
            f"version {wire.VERSION}; install the same cope_trl on both sides."
        )
    if address.options:
        raise OpenEnvError(
            f"`name` is {address.name!r}, but the options {sorted(address.options)} are for servers of other people's "
            "environments; leave them out."
        )
    return {
        "described": Description(url, said),
        "protocol": PROTOCOLS[said["protocol"]],
        **{attribute: said[attribute] for attribute in _PLAIN},
        **{attribute: tuple(said[attribute]) for attribute in _PAIRS},
    }
