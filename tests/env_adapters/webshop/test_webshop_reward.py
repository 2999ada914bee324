"""Rewards: each component, the factor for the kind of product, both comparisons of options."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("rapidfuzz")

from env_adapters.webshop.goals import Goal
from env_adapters.webshop.products import Product
from env_adapters.webshop.reward import COLORS, score, similar

SHOE = Product(
    asin="B000000001",
    title="Zeta Running Shoe",
    description="Light and quick. Vegan Friendly.",
    bullets=("Rubber sole", "Comes in a box"),
    price_text="$30.0",
    price=30.0,
    options={"color": ("red", "navy blue"), "size": ("7", "8")},
    attributes=("rubber sole", "machine washable"),
    category="fashion",
    query="running shoes",
    product_category="Clothing › Women › Shoes",
    instruction="find shoes",
    goal_attributes=("rubber sole", "vegan friendly"),
)
NOUNS = ["zeta", "running", "shoe"]
CHOSEN = {"color": "red", "size": "7"}


def goal(options=CHOSEN, upper=40.0, product=SHOE):
    return Goal(0, product, "text", options, upper)


def reward(product=SHOE, wanted=None, options=CHOSEN, nouns=NOUNS, goal_nouns=NOUNS, **kwargs):
    return score(product, wanted or goal(), options, nouns=nouns, goal_nouns=goal_nouns, **kwargs)


def test_all_found():
    result = reward()
    assert result.total == 1.0
    assert result.components() == {
        "r_type": 1.0,
        "r_att": 1.0,
        "w_att": 0.4,
        "query_match": True,
        "category_match": True,
        "title_score": 1.0,
        "r_option": 1.0,
        "w_option": 0.4,
        "r_price": True,
        "w_price": 0.2,
    }


def test_a_part_is_missing():
    assert reward(options={"color": "red"}).total == pytest.approx(4 / 5)
    assert reward(options={}).total == pytest.approx(3 / 5)
    assert reward(wanted=goal(upper=29.0)).total == pytest.approx(4 / 5)
    assert reward(wanted=goal(upper=30.0)).total == 1.0
    bare = replace(SHOE, description="", attributes=("DUMMY_ATTR",), bullets=("x",))
    assert reward(product=bare).total == pytest.approx(3 / 5)
    without = reward(wanted=goal(options={}), options={})
    assert (without.total, without.r_option, without.w_option) == (1.0, None, None)
    assert "r_option" not in without.components()


@pytest.mark.parametrize("where", ["title", "description", "bullets", "attributes"])
def test_an_attribute_is_found_anywhere(where):
    empty = replace(SHOE, title="t", description="d", bullets=("b",), attributes=("DUMMY_ATTR",))
    wanted = goal(product=replace(SHOE, goal_attributes=("hand made",)))
    assert reward(product=empty, wanted=wanted).r_att == 0.0
    value = "It is Hand Made here"
    there = replace(empty, **{where: value if where in ("title", "description") else (value,)})
    assert reward(product=there, wanted=wanted).r_att == 1.0


@pytest.mark.parametrize(
    ("same_query", "same_path", "shared", "factor"),
    [
        (True, True, 3, 1.0),
        (True, False, 3, 1.0),
        (False, True, 3, 1.0),
        (False, False, 3, 1.0),  # title score 0.3
        (False, False, 2, 0.5),  # exactly 0.2 is not enough
        (True, False, 2, 1.0),
        (False, False, 1, 0.5),
        (True, True, 1, 1.0),
        (True, True, 0, 0.0),
    ],
)
def test_the_kind_of_product(same_query, same_path, shared, factor):
    wanted_nouns = [f"noun{i}" for i in range(10)]
    other = replace(
        SHOE,
        query=SHOE.query if same_query else "lamps",
        product_category="Home ›  Women ›Shoes " if same_path else "Home › Shoes",
    )
    result = reward(product=other, nouns=wanted_nouns[:shared], goal_nouns=wanted_nouns)
    assert (result.query_match, result.category_match) == (same_query, same_path)
    assert result.title_score == shared / 10
    assert result.r_type == factor
    assert result.total == factor


def test_few_shared_nouns_and_none_at_all():
    assert reward(nouns=["a"], goal_nouns=[*"abcdefghijk"]).r_type == 0.1
    assert reward(nouns=["a"], goal_nouns=["a", "a", "b"]).title_score == 1 / 3  # repetitions count below only
    no_nouns = reward(nouns=["a"], goal_nouns=[])
    assert (no_nouns.title_score, no_nouns.r_type) == (0.2, 1.0)
    assert reward(product=replace(SHOE, query="x", product_category="y"), nouns=["a"], goal_nouns=[]).r_type == 0.5


@pytest.mark.parametrize(
    ("chosen", "asked", "upstream", "by_value"),
    [
        ({"color": "navy blue"}, {"color": "navy blue"}, 1, 1),
        ({"color": "sky blue"}, {"color": "navy blue"}, 1, 0),  # both are blue
        ({"style": "standard"}, {"style": "standard"}, 0, 1),  # contains "tan", so it is compared as that
        ({"scent": "tan"}, {"color": "tan"}, 1, 0),  # any option may satisfy any other
        ({"size": "6.5"}, {"size": "6.5"}, 1, 1),
        ({"size": "6"}, {"size": "6.5"}, 1, 0),  # its words are among those of "size 6 5"
        ({"kind": "size"}, {"size": "8"}, 1, 0),  # the name is compared too
        ({"size": "7"}, {"size": "8"}, 0, 0),
        ({}, {"size": "8"}, 0, 0),
        ({"item": "crème"}, {"item": "crème"}, 1, 1),
    ],
)
def test_options(chosen, asked, upstream, by_value):
    wanted = goal(options=asked)
    assert reward(wanted=wanted, options=chosen).r_option == upstream
    assert reward(wanted=wanted, options=chosen, strict_options=False).r_option == by_value


def test_colors():
    assert len(COLORS) == len(set(COLORS)) == 102
    assert list(COLORS) == sorted(COLORS)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("easy to clean", "clean easy to", True),
        ("rubber sole", "sole", True),
        ("8 ounce", "12 ounce", False),
        ("é", "e", False),
        ("né", "n", True),  # characters 128 to 255 are removed first
        ("", "", False),
        ("water-proof!", "WATER proof", True),
    ],
)
def test_similar(first, second, expected):
    assert similar(first, second) is expected
    assert similar(second, first) is expected


TEXT = st.text(alphabet="abc xyz-7é'", max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(TEXT, TEXT, max_size=3), st.dictionaries(TEXT, TEXT, max_size=3), st.booleans(), st.floats(1, 60)
)
def test_rewards_stay_in_range_and_add_up(chosen, asked, strict, upper):
    result = reward(wanted=goal(options=asked, upper=upper), options=chosen, strict_options=strict)
    parts = result.w_att + (result.w_option or 0) + result.w_price
    assert parts == pytest.approx(1)
    total = (
        result.w_att * result.r_att + (result.w_option or 0) * (result.r_option or 0) + result.w_price * result.r_price
    )
    assert result.total == pytest.approx(result.r_type * total)
    assert 0 <= result.total <= 1
