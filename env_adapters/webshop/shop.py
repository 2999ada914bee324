"""The shop: one for each catalogue in a process, shared by all environments and their threads."""

import logging
import os
import random
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from env_adapters.errors import EnvAdapterError, EnvDataError, did_you_mean
from env_adapters.webshop import reward
from env_adapters.webshop.files import ATTRIBUTES, MAKE_IT, PRODUCTS, data_root, need_file, read_json, read_nouns
from env_adapters.webshop.goals import SEED, Goal, make_goals
from env_adapters.webshop.index import SearchIndex
from env_adapters.webshop.nouns import guess_nouns
from env_adapters.webshop.products import Product, load_products

DATA = ("real", "synthetic")
MAX_RESULTS = 50

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_real: dict[Path, "Shop"] = {}
_synthetic: list["Shop"] = []


class Shop:
    """Products, goals and search. Nothing in it changes after it was built, so threads share it freely.

    Args:
        products: the catalogue, in order.
        goals: the goal pool, in order of the goals' ids.
        nouns: nouns of the titles by product id; guessed where one is missing.
    """

    def __init__(
        self, products: Sequence[Product], goals: Sequence[Goal], nouns: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        self.products = {product.asin: product for product in products}
        self.goals = goals
        known = nouns or {}
        self.nouns: dict[str, Sequence[str]] = {
            asin: known[asin] if asin in known else guess_nouns(product.title)
            for asin, product in self.products.items()
        }
        self._index: SearchIndex | None = None
        self._index_lock = threading.Lock()

    @property
    def index(self) -> SearchIndex:
        """The search index, built at first use: listing tasks needs none."""
        if self._index is None:
            with self._index_lock:
                if self._index is None:
                    self._index = SearchIndex({asin: _document(p) for asin, p in self.products.items()})
        return self._index

    def find(self, keywords: Sequence[str], rng: random.Random) -> list[Product]:
        """Products that a search shows, over all pages.

        The first keyword may ask for something else than a full-text search: `<r>` for 50 random products, `<c>` for a
        category, `<q>` for the products of a query. Where upstream crashes (`<a>`, and `<c>` without a category)
        nothing is found.

        Args:
            keywords: what was typed, split at single spaces.
            rng: draws the random products.
        """
        products = list(self.products.values())
        first, rest = keywords[0], keywords[1:]
        if first == "<r>":
            return rng.sample(products, min(MAX_RESULTS, len(products)))
        if first == "<a>":
            return []
        if first == "<c>":
            return [product for product in products if rest and product.category == rest[0]]
        if first == "<q>":
            query = " ".join(rest).strip()
            return [product for product in products if product.query == query]
        return [self.products[asin] for asin, _ in self.index.search(" ".join(keywords), MAX_RESULTS)]

    def score(
        self, product: Product, goal: Goal, options: Mapping[str, str], *, strict_options: bool = True
    ) -> reward.Reward:
        """The reward of buying a product with these options; see [`~env_adapters.webshop.reward.score`]."""
        return reward.score(
            product,
            goal,
            options,
            nouns=self.nouns[product.asin],
            goal_nouns=self.nouns[goal.product.asin],
            strict_options=strict_options,
        )


def open_shop(data: str | None = None, root: str | os.PathLike[str] | None = None) -> Shop:
    """The shop of a catalogue, built the first time it is asked for.

    Args:
        data: `"synthetic"` for the generated catalogue; `"real"` or `None` for the one in the data folder.
        root: the data folder, see [`~env_adapters.webshop.files.data_root`].

    Raises:
        EnvAdapterError: `data` is something else.
        EnvDataError: the data folder lacks something, or something in it is damaged.
    """
    check_data(data)
    with _lock:
        if data == "synthetic":
            if not _synthetic:
                _synthetic.append(_build_synthetic())
            return _synthetic[0]
        folder = data_root(root).resolve()
        if folder not in _real:
            _real[folder] = _build_real(folder)
        return _real[folder]


def opened_shop(data: str, root: str | os.PathLike[str] | None = None) -> Shop | None:
    """The shop of a catalogue if it was built already; builds nothing."""
    if data == "synthetic":
        return _synthetic[0] if _synthetic else None
    return _real.get(data_root(root).resolve())


def check_data(data: str | None) -> None:
    """Raise [`EnvAdapterError`] unless `data` names a catalogue or is `None`."""
    if data is not None and data not in DATA:
        raise EnvAdapterError(
            f"`data` is {data!r}, but 'webshop' has the catalogues {list(DATA)} (None stands for 'real')."
            + did_you_mean(str(data), DATA)
        )


def _build_real(folder: Path) -> Shop:
    products_path, attributes_path = need_file(folder, PRODUCTS), need_file(folder, ATTRIBUTES)
    nouns = read_nouns(folder)
    shop = _build(read_json(products_path, list), read_json(attributes_path, dict), nouns)
    if not shop.goals:
        raise EnvDataError(
            f"The files {PRODUCTS!r} and {ATTRIBUTES!r} in {str(folder)!r} give no goal: no product of the one has an "
            f"instruction in the other. {MAKE_IT}"
        )
    if nouns is None:
        logger.warning(
            "%s holds no %s: nouns of product titles are guessed by a word list, which can change the reward of "
            "buying a product of another kind. `cope-trl envs make-data webshop` with spaCy installed writes them.",
            folder,
            "nouns_*.json",
        )
    return shop


def _build_synthetic() -> Shop:
    from env_adapters.webshop.synthetic import generate_files

    return _build(*generate_files(), nouns=None)


def _build(
    rows: Sequence[object], annotations: Mapping[str, object], nouns: Mapping[str, Sequence[str]] | None
) -> Shop:
    # Generators of its own: whatever a program did with the global one, an id stands for the same goal.
    products = load_products(rows, annotations, random.Random(SEED))
    return Shop(products, make_goals(products, random.Random(SEED), random.Random(SEED)), nouns)


def _document(product: Product) -> str:
    """What the search reads of a product."""
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    first_bullet = product.bullets[0] if product.bullets else ""
    return f"{product.title} {product.description} {first_bullet} {options}".lower()
