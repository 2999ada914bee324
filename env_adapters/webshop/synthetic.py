"""The generated catalogue: products that look like WebShop's, in WebShop's own file format, made in memory.

It is drawn with nothing but `random.Random(str).random()`, whose sequence Python guarantees across versions, so it is
the same catalogue everywhere and an id always stands for the same goal.
"""

import random
import string
from collections.abc import Sequence
from typing import Any, TypeVar

from env_adapters.webshop.synthetic_kinds import BRANDS, DEPARTMENTS, UNCOUNTED, Department

T = TypeVar("T")

PER_KIND = 9
# Goals that come of it, so that ids can be checked without making it; a test counts them.
GOALS = 1475
_ASIN_LETTERS = "0123456789BCDFGHJKLMNPQRSTVWXYZ"
# Most values an option comes in.
_MOST_VALUES = {"color": 4, "size": 3}
_INSTRUCTIONS = (
    "i am looking for {described}",
    "i need {described} for {use}, and {it} should be {second}",
    "find me {described} that {is_} also {second}",
    "i want to buy {named} for {use}. {it} should be {first}",
)


def generate_files() -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Contents of the product file and of the attribute file, as WebShop has them."""
    dice = _Dice("the products of a shop that never was")
    rows: list[dict[str, Any]] = []
    annotations: dict[str, dict[str, Any]] = {}
    titles: set[str] = set()
    for department in DEPARTMENTS:
        for noun in department.kinds:
            made = 0
            while made < PER_KIND:
                row, annotation = _product(dice, department, noun)
                if row["name"] not in titles and row["asin"] not in annotations:
                    titles.add(row["name"])
                    annotations[row["asin"]] = annotation
                    rows.append(row)
                    made += 1
    return dice.sample(rows, len(rows)), annotations


class _Dice:
    """Random draws that are the same in every Python version."""

    def __init__(self, seed: str) -> None:
        self._next = random.Random(seed).random

    def below(self, count: int) -> int:
        return int(self._next() * count)

    def pick(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        rest = list(options)
        return [rest.pop(self.below(len(rest))) for _ in range(count)]


def _product(dice: _Dice, department: Department, noun: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One row of the product file and what the attribute file says of it."""
    own, uses = department.kinds[noun]
    brand, use = dice.pick(BRANDS), dice.pick(uses)
    features = dice.sample((*own, *department.features), 4)
    first, second, third, fourth = features
    low = department.price[0] + dice.below(department.price[1] - department.price[0])
    high = low + 1 + dice.below(1 + low // 2)
    row = {
        "name": string.capwords(f"{brand} {first} {noun} for {use}, {second}"),
        "full_description": (
            f"Made by {brand} with {use} in mind: {noun}, {first}, {second}, {third} and {fourth}. Suits "
            f"{dice.pick([other for other in uses if other != use])} too."
        ),
        "pricing": f"${low}.99 - ${high}.49" if dice.below(3) == 0 else f"${low}.{dice.pick(('00', '49', '95'))}",
        "images": [f"https://img.invalid/{noun.replace(' ', '-')}.jpg"],
        "product_category": f"{department.path} › {string.capwords(noun)}",
        "average_rating": "",
        "small_description": [
            f"{first.capitalize()} {noun}",
            *(f"{feature.capitalize()}, as tested by {brand}" for feature in (second, third, fourth)),
            f"For {', '.join(uses)}",
        ],
        "customization_options": {
            name.title(): [{"value": string.capwords(value), "is_selected": False, "url": None} for value in values]
            for name, values in _options(dice, department).items()
        },
        "asin": "B0" + "".join(dice.pick(_ASIN_LETTERS) for _ in range(8)),
        "category": department.category,
        "query": noun,
        "page": 1,
    }
    annotation: dict[str, Any] = {"attributes": features}
    if dice.below(4):  # a product in four is only sold, asked for by nobody
        annotation |= _instruction(dice, noun, use, dice.sample(features, 2))
    return row, annotation


def _instruction(dice: _Dice, noun: str, use: str, wanted: Sequence[str]) -> dict[str, Any]:
    """An instruction, and which of two features it asks for."""
    plural = noun.endswith("s")
    article = "" if plural or noun in UNCOUNTED else "a "
    text = dice.pick(_INSTRUCTIONS).format(
        described=f"{_an(article, wanted[0])} {noun}",
        named=_an(article, noun),
        use=use,
        it="they" if plural else "it",
        is_="are" if plural else "is",
        first=wanted[0],
        second=wanted[1],
    )
    return {"instruction": text, "instruction_attributes": [feature for feature in wanted if feature in text]}


def _an(article: str, words: str) -> str:
    vowel = words[0] in "aeiou" and not words.startswith("usda")
    return f"{'an ' if article and vowel else article}{words}"


def _options(dice: _Dice, department: Department) -> dict[str, list[str]]:
    options = {}
    for name, values in department.options:
        chosen = dice.sample(values, min(len(values), 2 + dice.below(_MOST_VALUES.get(name, 3) - 1)))
        options[name] = sorted(chosen, key=values.index)
    return {} if dice.below(10) == 0 else options  # some products come in one form only
