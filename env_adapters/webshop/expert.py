"""A scripted shopper that knows the product: the next good action from any page, whoever played before."""

import functools
import re

from env_adapters.webshop.browser import Browser, parse
from env_adapters.webshop.pages import PAGE_SIZE, SUB_PAGES
from env_adapters.webshop.shop import MAX_RESULTS, Shop

# A query that ranks the product worse is not used while there is another: leafing through results costs turns.
GOOD_RANK = 20
_WORD = re.compile(r"[^\W_][\w'.-]*")
_FILLER_WORDS = (
    "i am looking for need want find me get buy to a an the that is are also it they should be with and in of some "
    "something would like im i'm show please which has have my on as"
)
_FILLER = frozenset(_FILLER_WORDS.split())
# Words that do something else than choosing an option value of that name.
_TAKEN = {"search", "buy now", "back to search", "< prev", *(name.lower() for name in SUB_PAGES)}


def next_action(browser: Browser) -> str | None:
    """The next action towards the product a goal was written for; `None` where no search finds it."""
    wanted = browser.goal.product.asin
    if browser.product is not None and browser.product.asin == wanted:
        return _on_product(browser)
    shown = browser.clickables.get(wanted.lower())
    if shown is not None and shown.kind == "link":
        return f"click[{wanted.lower()}]"
    found = find_query(browser.shop, browser.goal.index)
    if found is None:
        return None
    query, rank = found
    if browser.page.search_bar:
        return f"search[{query}]"
    if browser.product is None and browser.basket.keywords == query.split(" "):
        return "click[next >]" if browser.basket.number <= rank // PAGE_SIZE else "click[< prev]"
    return "click[back to search]"


@functools.lru_cache(maxsize=1 << 14)
def find_query(shop: Shop, index: int) -> tuple[str, int] | None:
    """A query that finds a goal's product, and the product's rank in the results, from 0.

    Words of the instruction come first: a shopper who does not know the product can be taught those.
    """
    product = shop.goals[index].product
    best: tuple[str, int] | None = None
    for text, skipped in ((product.instruction or "", _FILLER), (product.title, frozenset())):
        query = " ".join(word for word in _WORD.findall(text.lower()) if word not in skipped)
        ids = [asin for asin, _ in shop.index.search(query, MAX_RESULTS)]
        if product.asin not in ids:
            continue
        rank = ids.index(product.asin)
        if rank < GOOD_RANK:
            return query, rank
        if best is None or rank < best[1]:
            best = query, rank
    return best


def _on_product(browser: Browser) -> str:
    if "buy now" not in browser.clickables:  # one of its sub pages
        return "click[< prev]"
    for name, value in browser.goal.options.items():
        part = browser.clickables.get(value)
        # Shown under two names, a value is clicked for the later one only; and a button of that name comes first.
        choosable = part is not None and part.kind == "option" and part.target.lower() == name and value not in _TAKEN
        if choosable and browser.basket.options.get(name) != value and parse(f"click[{value}]") == ("click", value):
            return f"click[{value}]"
    return "click[buy now]"
