"""Products: from a row of WebShop's product file to what the shop shows and sells."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from env_adapters.errors import EnvDataError
from env_adapters.webshop.files import MAKE_IT

DEFAULT_PRICE = 100.0
NO_ATTRIBUTES = ("DUMMY_ATTR",)
MAX_ASIN = 10


@dataclass(frozen=True, slots=True)
class Product:
    """One product, as shown and as scored.

    Attributes:
        asin: its id, unique in the catalogue.
        title, description, bullets: its texts, as in the file.
        price_text: the price as shown, `"$9.99"` or `"$5.0 to $9.99"`.
        price: the price that a limit is compared with, in dollars; drawn once where a range is shown.
        options: option name → the values on offer, lower case, in the order of the file.
        attributes: what it is said to be, such as `"easy to clean"`; compared with a goal's.
        category, query, product_category: where it was found, and its path on the site (parts split by `›`).
        instruction, goal_attributes: what goals for this product ask for; `None` and empty where it has none.
    """

    asin: str
    title: str
    description: str
    bullets: tuple[str, ...]
    price_text: str
    price: float
    options: Mapping[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    category: str
    query: str
    product_category: str
    instruction: str | None
    goal_attributes: tuple[str, ...]


def load_products(rows: Sequence[Any], annotations: Mapping[str, Any], rng: random.Random) -> list[Product]:
    """Read products in file order, leaving out ids that are `"nan"`, too long or repeated, as WebShop does.

    Args:
        rows: the product file.
        annotations: the attribute file, by product id.
        rng: draws the price of each product that shows a range, in order.

    Raises:
        EnvDataError: a row lacks something, or is of another kind.
    """
    products: list[Product] = []
    seen: set[str] = set()
    for position, row in enumerate(rows):
        try:
            asin = row["asin"]
            if asin == "nan" or len(asin) > MAX_ASIN or asin in seen:
                continue
            seen.add(asin)
            products.append(_product(row, annotations.get(asin) or {}, rng))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EnvDataError(
                f"Row {position} of the product file of 'webshop' is no product of WebShop's ({error!r}): "
                f"{str(row)[:120]!r}. {MAKE_IT}"
            ) from error
    return products


def _product(row: Mapping[str, Any], annotation: Mapping[str, Any], rng: random.Random) -> Product:
    bullets = row["small_description"]
    prices = _prices(row["pricing"])
    return Product(
        asin=row["asin"],
        title=_text(row["name"]),
        description=_text(row["full_description"]),
        bullets=tuple(map(_text, bullets if isinstance(bullets, list) else [bullets])),
        price_text=f"${prices[0]}" if len(prices) == 1 else f"${prices[0]} to ${prices[1]}",
        price=prices[0] if len(prices) == 1 else rng.uniform(*prices),
        options=_options(row["customization_options"]),
        attributes=tuple(map(_text, annotation.get("attributes") or NO_ATTRIBUTES)),
        category=_text(row["category"]),
        query=row["query"].lower().strip(),
        product_category=_text(row["product_category"]),
        instruction=annotation.get("instruction"),
        goal_attributes=tuple(map(_text, annotation.get("instruction_attributes") or ())),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _prices(pricing: str) -> list[float]:
    """One price, or the two ends of a range: the numbers that follow dollar signs."""
    parts = pricing.split("$")[1:] if pricing else []
    numbers = ["".join(c for c in part if c in "0123456789.") for part in parts]
    return [float(number) for number in numbers[:2]] or [DEFAULT_PRICE]


def _options(options: Any) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(entry["value"].strip().replace("/", " | ").lower() for entry in entries)
        for name, entries in (options or {}).items()
        if entries is not None
    }
