"""WebShop, the shopping site in text: search, click options, buy what an instruction asks for. No server, no Java.

The adapter is imported at first use: neither the package nor its data maker needs what a shop needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env_adapters.webshop.env import WebShopEnv

__all__ = ["WebShopEnv"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from env_adapters.webshop.env import WebShopEnv

    return WebShopEnv


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
