"""Goals: the instructions that WebShop writes itself, every combination of a product's options (paper A.3)."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from env_adapters.webshop.products import Product

SEED = 233
# Price limits that an instruction may name; one above everything where it names none.
LIMITS = tuple(10.0 * i for i in range(1, 100))
NO_LIMIT = 1_000_000.0


@dataclass(frozen=True, slots=True)
class Goal:
    """What to buy.

    Attributes:
        index: position in the pool; the number in the task id.
        product: the product it was written for; another one may satisfy it too.
        text: the instruction.
        options: option name → value asked for.
        price_upper: the highest price allowed, in dollars.
    """

    index: int
    product: Product
    text: str
    options: Mapping[str, str]
    price_upper: float

    @property
    def attributes(self) -> tuple[str, ...]:
        """Attributes asked for."""
        return self.product.goal_attributes


def make_goals(products: Sequence[Product], rng: random.Random, order: random.Random) -> list[Goal]:
    """All goals, in the order of their ids.

    Args:
        products: the catalogue, in order.
        rng: draws one price limit a product, shared by its goals.
        order: shuffles the goals; WebShop seeds it with 233, whatever came before.
    """
    drafts = []
    for product in products:
        if product.instruction is None:
            continue
        limits = [limit for limit in LIMITS if limit > product.price][:4]
        upper = max(rng.sample(limits, 2)) if len(limits) >= 2 else NO_LIMIT
        ending = "" if upper == NO_LIMIT else f", and price lower than {upper:.2f} dollars"
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            options = dict(zip(names, values, strict=True))
            wanted = ", and ".join(f"{name}: {value}" for name, value in options.items())
            text = f"{product.instruction}{f' with {wanted}' if wanted else ''}{ending}"
            drafts.append((product, text, options, upper))
    order.shuffle(drafts)
    return [Goal(index, *draft) for index, draft in enumerate(drafts)]
