"""Pages of the shop, as lists of parts; what an agent reads of them, and what it can click."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from env_adapters.webshop.products import Product

SEPARATOR = " [SEP] "
PAGE_SIZE = 10
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")

Kind = Literal["text", "button", "link", "option"]


@dataclass(frozen=True, slots=True)
class Part:
    """One piece of a page: text, a button, a link to a product, or a value of an option.

    Attributes:
        kind: which of them.
        text: what is read, spaces included.
        target: the product of a link, the option name of a value.
    """

    kind: Kind
    text: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class Page:
    """A page as it is shown.

    Attributes:
        url: its address within the shop. Upstream reads off it what kind of page this is, and which values are
            chosen, so whatever the agent wrote into it has an effect.
        parts: its content, from top to bottom.
        search_bar: whether it has a search bar.
    """

    url: str
    parts: Sequence[Part]
    search_bar: bool = False

    def clickables(self) -> dict[str, Part]:
        """What can be clicked, by the word to click: buttons, then links, then values, each in page order.

        Of two parts with the same word the later one is clicked, at the place of the first.
        """
        found: dict[str, Part] = {}
        for kind in ("button", "link", "option"):
            for part in self.parts:
                if part.kind == kind:
                    found[part.text if kind == "option" else part.text.lower()] = part
        return found

    def text(self) -> str:
        """WebShop's plain observation: all parts, separated by `[SEP]`."""
        return SEPARATOR.join(text.strip() for part in self.parts if (text := _visible(part.text)) is not None)

    def rich_text(self, visited: frozenset[str] | set[str]) -> str:
        """WebShop's other observation: a line a part, with buttons marked, and marked otherwise once clicked.

        Args:
            visited: ids of products whose page was opened.
        """
        lines, clicked = [], []
        for part in self.parts:
            text = _visible(part.text)
            if text is None:
                continue
            if part.kind == "button":
                lines.append(f"[button] {text} [button_]")
            elif part.kind == "link":
                state = "clicked button" if part.target in visited else "button"
                lines.append(f"\n[{state}] {text} [{state}_]")
            elif part.kind == "option":
                chosen = f'"{text}"' in self.url
                state = "clicked button" if chosen else "button"
                lines.append(f"  [{state}] {text} [{state}_]")
                if chosen:
                    clicked.append(f"You have clicked {text}.")
            else:
                lines.append(text)
        return "".join(f"{line}\n" for line in [*reversed(clicked), *lines])


def _visible(text: str) -> str | None:
    """What an HTML parser leaves of a text: blank text goes if it has a line break, else it becomes one space."""
    if text.strip(" \t\n\f\r"):
        return text
    return None if not text or "\n" in text else " "


def _texts(*texts: str) -> list[Part]:
    return [Part("text", text) for text in texts]


_BACK = Part("button", "Back to Search")
_PREVIOUS = Part("button", "< Prev")
_NEXT = Part("button", "Next >")


def index_page(url: str, instruction: str) -> Page:
    """The start: the instruction and a search bar."""
    return Page(url, [*_texts("WebShop", "Instruction: ", instruction), Part("button", "Search")], search_bar=True)


def results_page(url: str, instruction: str, number: int, total: int, products: Sequence[Product]) -> Page:
    """One page of search results."""
    parts = [*_texts("Instruction:", instruction), _BACK, Part("text", f"Page {number} (Total results: {total})")]
    parts += [_PREVIOUS, _NEXT] if number > 1 else [_NEXT]
    for product in products:
        parts += [Part("link", product.asin, product.asin), *_texts(product.title, product.price_text)]
    return Page(url, parts)


def item_page(url: str, instruction: str, product: Product) -> Page:
    """A product with its options and the buy button."""
    parts = [*_texts("Instruction:", instruction), _BACK, _PREVIOUS]
    for name, values in product.options.items():
        parts.append(Part("text", name))
        parts += [Part("option", value, name) for value in values]
    parts += _texts(product.title, f"Price: {product.price_text}", "Rating: N.A.")
    parts += [Part("button", name) for name in (*SUB_PAGES[:3], "Buy Now")]
    return Page(url, parts)


def sub_page(url: str, instruction: str, product: Product, name: str) -> Page:
    """Description, features, reviews (there are none) or attributes of a product.

    No button leads to the attributes, but an option value of that name does.
    """
    body: Sequence[str] = ()
    if name == "Description":
        body = [product.description]
    elif name == "Features":
        body = [f" {bullet}" if bullet else "" for bullet in product.bullets]
    elif name == "Attributes":
        body = product.attributes
    return Page(url, [*_texts("Instruction:", instruction), _BACK, _PREVIOUS, *_texts(*body)])


def done_page(url: str, asin: str, options: Mapping[str, str], reward: float) -> Page:
    """What follows a purchase. Upstream fills hardly any of its fields; its spelling is kept."""
    texts = ["Thank you for shopping with us!", "Your code: ", "None", " (Paste it in your MTurk interface.)"]
    texts += ["Purchased", "asin", asin, "options", _json_in_html(options)]
    for field in ("attrs", "category", "query", "product category"):
        texts += [field, "None"]
    texts += ["Target", "asin", "options", "attrs", "price upper", "instuction text", "category"]  # codespell:ignore
    texts += ["product category", "query", "Goal ", "None", "Reward", "Your score (min 0.0, max 1.0)", str(reward)]
    return Page(url, _texts(*texts, "Reward Details ", "None"))


def _json_in_html(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    for character in "<>&'":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
