"""The reward of a purchase: the share of what was asked for that the product has, times how near its kind is."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from env_adapters.webshop.goals import Goal
from env_adapters.webshop.products import Product

MATCH = 85
CATEGORY_SEPARATOR = "›"
# Title score where the wanted title has no noun.
NO_NOUNS = 0.2
_COLOR_WORDS = (
    "alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel "
    "camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac copper coral cranberry "
    "cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape graphite grass gray green grey "
    "heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight "
    "mint mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow "
    "red rose royal rust sand sapphire seashell silver skull slate steel stone stonewash sunflower tan taupe teal "
    "tiger turquoise violet walnut wheat white wine yellow"
)
# An option that contains one of these words is compared as that word alone, the first that fits.
COLORS = tuple(_COLOR_WORDS.split())
# What `thefuzz` removes before it compares.
_NO_LATIN_1 = dict.fromkeys(range(128, 256))


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and what it is made of, under upstream's names.

    Attributes:
        total: the reward, 0 to 1.
        r_type: factor for the kind of product: 1, 0.5, 0.1 or 0.
        r_att, r_option, r_price: share of the attributes found and of the options chosen, and whether the price is
            within the limit; `r_option` is `None` where none was asked for.
        w_att, w_option, w_price: their weights, which add up to 1.
        query_match, category_match, title_score: what `r_type` is decided by.
    """

    total: float
    r_type: float
    r_att: float
    w_att: float
    query_match: bool
    category_match: bool
    title_score: float
    r_option: float | None
    w_option: float | None
    r_price: bool
    w_price: float

    def components(self) -> dict[str, float | bool]:
        """Everything but the total, without what does not apply."""
        return {name: value for name, value in asdict(self).items() if name != "total" and value is not None}


def score(
    product: Product,
    goal: Goal,
    options: Mapping[str, str],
    *,
    nouns: Sequence[str],
    goal_nouns: Sequence[str],
    strict_options: bool = True,
) -> Reward:
    """The reward of buying a product.

    Args:
        product: what was bought.
        goal: what was asked for.
        options: the chosen value of each option.
        nouns, goal_nouns: nouns of the two titles.
        strict_options: compare options as upstream does, which some right choices cannot satisfy; `False` compares
            name and value.
    """
    r_type, query_match, category_match, title_score = _type_reward(product, goal, nouns, goal_nouns)
    found = _attributes_found(product, goal.attributes)
    wanted = len(goal.options)
    chosen = _options_as_upstream(options, goal) if strict_options else _options_by_value(options, goal)
    affordable = product.price <= goal.price_upper
    parts = len(goal.attributes) + wanted + 1
    return Reward(
        total=(found + chosen + affordable) / parts * r_type,
        r_type=r_type,
        r_att=found / len(goal.attributes) if goal.attributes else 0.0,
        w_att=len(goal.attributes) / parts,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
        r_option=chosen / wanted if wanted else None,
        w_option=wanted / parts if wanted else None,
        r_price=affordable,
        w_price=1 / parts,
    )


def similar(first: str, second: str) -> bool:
    """Whether two texts share their words, in any order: `thefuzz.fuzz.token_set_ratio(...) > 85`."""
    from rapidfuzz import fuzz, utils  # at first use: tasks are listed without it

    ratio = fuzz.token_set_ratio(
        first.translate(_NO_LATIN_1), second.translate(_NO_LATIN_1), processor=utils.default_process
    )
    return round(ratio) > MATCH


def _type_reward(
    product: Product, goal: Goal, nouns: Sequence[str], goal_nouns: Sequence[str]
) -> tuple[float, bool, bool, float]:
    wanted = goal.product
    query_match = product.query == wanted.query
    category_match = len(_path(product.product_category) & _path(wanted.product_category)) >= 2
    title_score = len(set(nouns) & set(goal_nouns)) / len(goal_nouns) if goal_nouns else NO_NOUNS
    if title_score == 0:
        factor = 0.0
    elif title_score < 0.1:
        factor = 0.1
    else:
        factor = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    return factor, query_match, category_match, title_score


def _path(product_category: str) -> set[str]:
    return {part.strip() for part in product_category.split(CATEGORY_SEPARATOR)}


def _attributes_found(product: Product, wanted: Iterable[str]) -> int:
    texts = (product.title.lower(), " ".join(product.bullets).lower(), product.description.lower())
    return sum(
        any(similar(attribute, goal) for attribute in product.attributes) or any(goal in text for text in texts)
        for goal in wanted
    )


def _options_as_upstream(options: Mapping[str, str], goal: Goal) -> int:
    """Upstream compares the chosen value, reduced to a colour word it contains, with the pair of name and value.

    The pair becomes a colour word only if its value is exactly one. Hence a right `"standard"`, which contains
    `"tan"`, never counts, and any chosen value may satisfy any option asked for.
    """
    chosen = [next((color for color in COLORS if color in value), value) for value in options.values()]
    asked = [next((color for color in COLORS if color in pair), str(pair)) for pair in goal.options.items()]
    return sum(any(similar(value, pair) for value in chosen) for pair in asked)


def _options_by_value(options: Mapping[str, str], goal: Goal) -> int:
    return sum(options.get(name) == value for name, value in goal.options.items())
