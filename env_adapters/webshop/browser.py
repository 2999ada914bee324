"""One shopper's session: what each action does, with all of upstream's peculiarities.

They are kept on purpose: results compare only in the same shop. The ones that matter to an agent are listed in
docs/environments/webshop.md.
"""

import json
import random
from dataclasses import dataclass

from env_adapters.webshop.goals import Goal
from env_adapters.webshop.pages import (
    PAGE_SIZE,
    SUB_PAGES,
    Page,
    Part,
    done_page,
    index_page,
    item_page,
    results_page,
    sub_page,
)
from env_adapters.webshop.products import Product
from env_adapters.webshop.reward import Reward
from env_adapters.webshop.shop import Shop

# The kind of a page is the first of these found anywhere in its address, a query typed by the agent included.
_PAGE_NAMES = ("search_results", "item_page", "item_sub_page", "done")


@dataclass(slots=True)
class Basket:
    """What a session remembers.

    Attributes:
        keywords: words of the last search, split at single spaces.
        number: the page of results shown last.
        asin: the product looked at.
        options: option name → chosen value, in the order of choice.
        visited: products looked at since the index page.
    """

    keywords: list[str]
    number: int
    asin: str | None
    options: dict[str, str]
    visited: set[str]


class Browser:
    """A session that pursues one goal; it begins on the index page.

    Args:
        shop: the shop.
        goal: what to buy.
        strict_options: as in [`~env_adapters.webshop.reward.score`].
    """

    def __init__(self, shop: Shop, goal: Goal, *, strict_options: bool = True) -> None:
        self.shop = shop
        self.goal = goal
        self.strict_options = strict_options
        self.last_reward: Reward | None = None
        # Only for searches that ask for random products; the goal decides, so that an episode can be repeated.
        self._rng = random.Random(goal.index)
        self._home()

    # ---------------------------------------------------------------- what the agent sees

    @property
    def page(self) -> Page:
        """The page shown."""
        return self._page

    @property
    def product(self) -> Product | None:
        """The product looked at, or `None` on the index page and on results."""
        asin = self.basket.asin
        return None if asin is None else self.shop.products[asin]

    @property
    def clickables(self) -> dict[str, Part]:
        """What can be clicked now, by the word to click; upstream's list, search button included."""
        return self._clickables

    def observation(self, rich: bool = False) -> str:
        """The page as text."""
        return self._page.rich_text(self.basket.visited) if rich else self._page.text()

    # ---------------------------------------------------------------- actions

    def act(self, action: str) -> bool:
        """Execute an action; returns whether it was one. A purchase sets `last_reward`."""
        name, argument = parse(action)
        self.last_reward = None
        if name == "search" and argument:
            self.basket.keywords = argument.split(" ")
            self._results(1)
            return True
        if name == "click" and argument in self._clickables and argument != "search":
            self._click(argument, self._clickables[argument])
            return True
        return False

    def _click(self, word: str, part: Part) -> None:
        place = next((name for name in _PAGE_NAMES if name in self._page.url), "")
        if word == "buy now":
            self._buy()
        elif word == "back to search":
            self._home()
        elif word == "next >" and place == "search_results":
            self._results(self.basket.number + 1)
        elif word == "< prev" and place == "search_results":
            self._results(self.basket.number - 1)
        elif word == "< prev" and place == "item_page":
            self._results(self.basket.number)
        elif word.capitalize() in SUB_PAGES:
            self._sub_page(word.capitalize())
        else:
            if part.kind == "link":
                self.basket.asin = part.target
                self.basket.visited.add(part.target)
            elif part.kind == "option":
                self.basket.options[part.target.lower()] = word
            self._item()

    # ---------------------------------------------------------------- pages

    def _show(self, page: Page) -> None:
        self._page = page
        self._clickables = page.clickables()

    def _home(self) -> None:
        self.basket = Basket(keywords=[], number=1, asin=None, options={}, visited=set())
        self._show(index_page(f"/{self.goal.index}", self.goal.text))

    def _results(self, number: int) -> None:
        basket = self.basket
        basket.number, basket.asin, basket.options = number, None, {}
        found = self.shop.find(basket.keywords, self._rng)
        shown = found[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
        url = f"/search_results/{self.goal.index}/{'+'.join(basket.keywords)}/{number}"
        self._show(results_page(url, self.goal.text, number, len(found), shown))

    def _item(self) -> None:
        self._show(item_page(self._url("item_page", json.dumps(self.basket.options)), self.goal.text, self._need()))

    def _sub_page(self, name: str) -> None:
        url = self._url("item_sub_page", f"{name}/{self.basket.options}")
        self._show(sub_page(url, self.goal.text, self._need(), name))

    def _buy(self) -> None:
        product, options = self._need(), self.basket.options
        self.last_reward = self.shop.score(product, self.goal, options, strict_options=self.strict_options)
        url = f"/done/{self.goal.index}/{product.asin}/{options}"
        self._show(done_page(url, product.asin, options, self.last_reward.total))

    def _url(self, name: str, ending: str) -> str:
        basket = self.basket
        return f"/{name}/{self.goal.index}/{basket.asin}/{'+'.join(basket.keywords)}/{basket.number}/{ending}"

    def _need(self) -> Product:
        product = self.product
        assert product is not None, "these pages are reached from a product's page only"
        return product


def parse(action: str) -> tuple[str, str]:
    """Name and argument of an action, `("search", "red shoes")` for `"search[Red shoes]"`.

    The name ends at the last bracket that leaves an argument before the last closing one; text after that is ignored,
    and so are further lines. The argument is lowercased, and empty where the text has no such form. This is upstream's
    greedy pattern `(.+)\\[(.+)\\]`, in linear time.
    """
    line = action.split("\n", 1)[0]
    close = line.rfind("]")
    opening = line.rfind("[", 1, close - 1) if close > 2 else -1
    if opening < 0:
        return action, ""
    return line[:opening], line[opening + 1 : close].lower()
