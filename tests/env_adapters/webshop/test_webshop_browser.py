"""Pages and clicks: upstream's peculiarities one by one, on a small shop of its own."""

import json
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("nltk")
pytest.importorskip("rapidfuzz")

from env_adapters.webshop.browser import Browser, parse
from env_adapters.webshop.expert import next_action
from env_adapters.webshop.goals import Goal
from env_adapters.webshop.pages import Page, Part, done_page, sub_page
from env_adapters.webshop.products import Product
from env_adapters.webshop.shop import MAX_RESULTS, Shop

LAMP = Product(
    asin="B000000000",
    title="Zeta lamp",
    description="A lamp.",
    bullets=("bright",),
    price_text="$20.0",
    price=20.0,
    options={"color": ("red", "blue"), "style": ("blue", "description", "next >", "a [b]")},
    attributes=("bright",),
    category="garden",
    query="lamps",
    product_category="Home › Lamps",
    instruction="find a lamp",
    goal_attributes=("bright",),
)
PRODUCTS = [LAMP, *(replace(LAMP, asin=f"B{i:09}", title=f"lamp {i}", options={}) for i in range(1, 26))]


@pytest.fixture
def browser():
    return Browser(Shop(PRODUCTS, []), Goal(7, LAMP, "find a lamp", {"color": "red"}, 40.0))


def play(browser: Browser, *actions: str) -> list[bool]:
    return [browser.act(action) for action in actions]


# ------------------------------------------------------------------------------------------------------------ actions


@settings(max_examples=500)
@given(st.text(alphabet="ac[]\n \u2028é", max_size=14) | st.text(max_size=14))
def test_actions_are_read_as_upstream_reads_them(action):
    match = re.match(r"(.+)\[(.+)\]", action)
    assert parse(action) == ((match[1], match[2].lower()) if match else (action, ""))


@pytest.mark.parametrize("unit", ["[", "]", "[]", "[a", "a]", "search[", "\n["])
def test_any_action_is_read_in_linear_time(unit):
    name, argument = parse(unit * (1_000_000 // len(unit)))
    assert len(name) + len(argument) <= 1_000_000


@pytest.mark.parametrize(
    "action",
    [
        "", "search", "search[]", "search[", "Search[x]", " search[x]", "think[x]", "click[]", "click[search]",
        "click[buy now]", "click[B000000000]", "search[a\nb]", "click[ red]",
    ],
)  # fmt: skip
def test_other_text_does_nothing(browser, action):
    before = browser.observation(), browser.page.url
    assert play(browser, action) == [False]
    assert (browser.observation(), browser.page.url) == before
    assert browser.last_reward is None


def test_search_works_from_every_page(browser):
    assert all(play(browser, "search[lamp]", "click[b000000001]", "search[zeta] please"))
    assert browser.page.url == "/search_results/7/zeta/1"
    assert list(browser.clickables) == ["back to search", "next >", "b000000000"]
    assert all(play(browser, "click[B000000000]", "click[description]", "search[x  Y]"))
    assert browser.page.url == "/search_results/7/x++y/1"
    assert "Page 1 (Total results: 0)" in browser.observation()


def test_pages_of_results(browser):
    play(browser, "search[lamp]")
    first = list(browser.clickables)
    assert len(first) == 12
    assert "< prev" not in first
    assert all(play(browser, "click[next >]", "click[next >]"))
    assert len(browser.clickables) == 3 + 6
    assert all(play(browser, "click[next >]", "click[next >]"))
    assert browser.observation().endswith("Page 5 (Total results: 26) [SEP] < Prev [SEP] Next >")
    assert all(play(browser, *["click[< prev]"] * 4))
    assert list(browser.clickables) == first


def test_leaving_a_product_forgets_the_options(browser):
    play(browser, "search[zeta]", "click[B000000000]", "click[red]")
    assert browser.page.url.endswith('/B000000000/zeta/1/{"color": "red"}')
    play(browser, "click[features]")
    assert browser.page.url == "/item_sub_page/7/B000000000/zeta/1/Features/{'color': 'red'}"
    play(browser, "click[< prev]")
    assert browser.basket.options == {"color": "red"}
    play(browser, "click[< prev]")
    assert (browser.basket.options, browser.product) == ({}, None)
    assert "[clicked button] B000000000 [clicked button_]" in browser.observation(rich=True)
    play(browser, "click[back to search]", "search[zeta]")
    assert "[button] B000000000 [button_]" in browser.observation(rich=True)


def test_a_value_under_two_names(browser):
    """Only the later one can be clicked; both are marked."""
    play(browser, "search[zeta]", "click[b000000000]", "click[blue]")
    assert browser.basket.options == {"style": "blue"}
    text = browser.observation(rich=True)
    assert text.startswith("You have clicked blue.\nYou have clicked blue.\nInstruction:\n")
    assert text.count("  [clicked button] blue [clicked button_]\n") == 2
    assert list(browser.clickables)[6:] == ["red", "blue", "next >", "a [b]"]


def test_values_named_like_buttons(browser):
    play(browser, "search[zeta]", "click[b000000000]")
    assert browser.clickables["description"].kind == "option"
    assert play(browser, "click[description]") == [True]
    assert browser.observation().endswith("< Prev [SEP] A lamp.")
    assert play(browser, "click[< prev]", "click[next >]") == [True, True]
    assert browser.basket.options == {"style": "next >"}
    assert play(browser, "click[a [b]]") == [False]


def test_a_query_can_misroute_the_way_back(browser):
    """The kind of a page is read off its address, which holds the query."""
    play(browser, "search[zeta search_results]", "click[b000000000]", "click[< prev]")
    assert browser.page.url == "/search_results/7/zeta+search_results/0"
    assert browser.observation().endswith("Page 0 (Total results: 1) [SEP] Next >")
    assert play(browser, "click[next >]") == [True]
    assert "b000000000" in browser.clickables
    play(browser, "search[zeta item_page]", "click[b000000000]", "click[description]", "click[< prev]")
    assert browser.page.url == "/search_results/7/zeta+item_page/1"
    play(browser, "search[zeta done]", "click[b000000000]", "click[description]", "click[< prev]")
    assert browser.page.url.startswith("/item_page/7/B000000000/")


def test_after_a_purchase(browser):
    play(browser, "search[zeta]", "click[b000000000]", "click[red]", "click[Buy Now]")
    assert browser.last_reward.total == 1.0
    assert (browser.clickables, browser.page.search_bar) == ({}, False)
    assert play(browser, "click[buy now]", "click[back to search]", "search[lamp 3]") == [False, False, True]
    assert browser.last_reward is None
    play(browser, "click[b000000003]", "click[buy now]")
    assert browser.last_reward.total == pytest.approx(2 / 3)


def test_searches_of_another_kind(browser):
    play(browser, "search[<c> garden]")
    assert "Total results: 26" in browser.observation()
    play(browser, "search[<q> lamps]")
    assert "Total results: 26" in browser.observation()
    for action in ("search[<c>]", "search[<a>]", "search[<a> bright]", "search[<c> x]", "search[<q> x]"):
        assert play(browser, action) == [True]
        assert "Total results: 0" in browser.observation()


def test_random_results_are_the_same_in_every_episode(browser):
    def episode():
        new = Browser(browser.shop, browser.goal)
        return [(new.act(action), new.observation()) for action in ("search[<r>]", "click[next >]", "search[<r> x]")]

    seen = episode()
    assert seen == episode()
    assert len({observation for _, observation in seen}) == 3
    assert "Total results: 26" in seen[0][1]
    many = [replace(LAMP, asin=f"C{i:09}") for i in range(80)]
    assert len(Shop(many, []).find(["<r>"], browser._rng)) == MAX_RESULTS == 50


def test_the_expert_leafs_through_results():
    """A product on the second page, reached from before it and from behind it."""
    products = [replace(LAMP, asin=f"B{i:09}", title="lamp", options={"color": ("red",)}) for i in range(26)]
    goal = Goal(0, products[15], "find a lamp", {"color": "red"}, 40.0)
    browser = Browser(Shop(products, [goal]), goal)
    for expected in ("search[lamp]", "click[next >]", "click[b000000015]"):
        assert next_action(browser) == expected
        assert browser.act(expected)
    play(browser, "click[back to search]", "search[lamp]", "click[next >]", "click[next >]")
    for expected in ("click[< prev]", "click[b000000015]"):
        assert next_action(browser) == expected
        assert browser.act(expected)
    play(browser, "click[features]")
    for expected in ("click[< prev]", "click[red]", "click[buy now]"):
        assert next_action(browser) == expected
        assert browser.act(expected)
    assert browser.last_reward.total == 1.0


def test_the_expert_leaves_other_products():
    goal = Goal(0, LAMP, "find a lamp", {"color": "red"}, 40.0)
    browser = Browser(Shop(PRODUCTS, [goal]), goal)
    play(browser, "search[lamp 3]", "click[b000000003]", "click[description]")
    assert next_action(browser) == "click[back to search]"
    play(browser, "search[zzz]")
    assert next_action(browser) == "click[back to search]"


def test_the_expert_skips_what_cannot_be_chosen():
    """A value of a later name as well, one named like a button, one with brackets."""
    options = {"color": ("blue",), "style": ("blue",), "scent": ("description",), "grade": ("a [b]",), "size": ("5",)}
    lamp = replace(LAMP, options=options)
    goal = Goal(0, lamp, "find a lamp", {name: values[0] for name, values in options.items()}, 40.0)
    browser = Browser(Shop([lamp], [goal]), goal)
    path = []
    while browser.last_reward is None and len(path) < 9:
        path.append(next_action(browser))
        assert browser.act(path[-1])
    assert path == ["search[lamp]", "click[b000000000]", "click[blue]", "click[5]", "click[buy now]"]
    assert 0 < browser.last_reward.total < 1


def test_without_a_query_there_is_no_expert():
    lamp = replace(LAMP, instruction="the", title="!!")
    goal = Goal(0, lamp, "find it", {}, 40.0)
    assert next_action(Browser(Shop([lamp], [goal]), goal)) is None


# -------------------------------------------------------------------------------------------------------------- pages


def test_blank_text():
    parts = [Part("text", text) for text in ("a ", "", " ", "\n", " \n ", "\u00a0", "\tb")]
    page = Page("/", parts)
    assert page.text() == "a [SEP]  [SEP]  [SEP] b"
    assert page.rich_text(set()) == "a \n \n\u00a0\n\tb\n"


def test_sub_pages():
    product = replace(LAMP, description="", bullets=("one", "", " ", "two"))
    head = "Instruction: [SEP] i [SEP] Back to Search [SEP] < Prev"
    assert sub_page("/", "i", product, "Description").text() == head
    assert sub_page("/", "i", product, "Reviews").text() == head
    assert sub_page("/", "i", product, "Features").text() == f"{head} [SEP] one [SEP]  [SEP] two"
    assert sub_page("/", "i", product, "Attributes").text() == f"{head} [SEP] bright"


def test_clickables_are_buttons_then_links_then_values():
    parts = [Part("option", "red", "a"), Part("link", "B1", "B1"), Part("button", "Next >"), Part("option", "b1", "c")]
    page = Page("/", parts)
    assert list(page.clickables()) == ["next >", "b1", "red"]
    assert page.clickables()["b1"].kind == "option"


def test_only_values_that_the_address_spells_out_are_marked():
    options = [Part("option", value, "name") for value in ("red", "rosé", 'the "best"', "blue")]
    url = f"/item_page/0/B1/x/1/{json.dumps({part.text: part.text for part in options[:3]})}"
    text = Page(url, options).rich_text(set())
    assert text.splitlines() == [
        "You have clicked red.",
        "  [clicked button] red [clicked button_]",
        "  [button] rosé [button_]",
        '  [button] the "best" [button_]',
        "  [button] blue [button_]",
    ]


def test_options_on_the_last_page_are_safe_in_html():
    text = done_page("/", "B1", {"size": "<5>", "color": "kids' & é"}, 0.25).text()
    assert r'options [SEP] {"color": "kids\u0027 \u0026 \u00e9", "size": "\u003c5\u003e"} [SEP] attrs' in text
    assert text.endswith("Your score (min 0.0, max 1.0) [SEP] 0.25 [SEP] Reward Details [SEP] None")
