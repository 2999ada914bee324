"""Products and goals from WebShop's files, their random draws, and the generated catalogue."""

import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from env_adapters.errors import EnvDataError
from env_adapters.webshop import WebShopEnv
from env_adapters.webshop.goals import NO_LIMIT, make_goals
from env_adapters.webshop.nouns import guess_nouns
from env_adapters.webshop.products import load_products
from env_adapters.webshop.synthetic import GOALS, generate_files

ROOT = Path(__file__).parents[3]
ROW = {
    "asin": "B000000001",
    "name": "A Lamp",
    "full_description": "It shines.",
    "small_description": ["bright", "warm"],
    "pricing": "$20.0",
    "customization_options": {"Color": [{"value": " Red/Blue "}, {"value": "Green"}], "Size": None},
    "category": "garden",
    "query": " Lamps ",
    "product_category": "Home › Lamps",
}
WANTED = {"attributes": ["bright"], "instruction": "find a lamp", "instruction_attributes": ["bright"]}


def load(*rows, **annotations):
    return load_products([{**ROW, **row} for row in rows], annotations, random.Random(233))


def goals_of(products):
    return make_goals(products, random.Random(233), random.Random(233))


def test_a_row():
    (product,) = load({}, B000000001=WANTED)
    assert product.options == {"color": ("red | blue", "green")}
    assert (product.query, product.price_text, product.price) == ("lamps", "$20.0", 20.0)
    assert (product.attributes, product.goal_attributes) == (("bright",), ("bright",))
    (product,) = load({"small_description": "one text", "customization_options": ""})
    assert (product.bullets, product.options, product.attributes) == (("one text",), {}, ("DUMMY_ATTR",))
    assert product.instruction is None


def test_rows_that_are_left_out():
    rows = [{"asin": "nan"}, {"asin": "B0000000010"}, {"name": "first"}, {"name": "again"}, {"asin": "B2"}]
    assert [(product.asin, product.title) for product in load(*rows)] == [("B000000001", "first"), ("B2", "A Lamp")]


@pytest.mark.parametrize(
    ("pricing", "text", "low", "high"),
    [
        ("", "$100.0", 100, 100),
        (None, "$100.0", 100, 100),
        ("$1,299", "$1299.0", 1299, 1299),
        ("$5 - $9.50", "$5.0 to $9.5", 5, 9.5),
        ("from $5 $6 $7", "$5.0 to $6.0", 5, 6),
        ("12.99", "$100.0", 100, 100),
    ],
)
def test_prices(pricing, text, low, high):
    (product,) = load({"pricing": pricing})
    assert product.price_text == text
    assert low <= product.price <= high


@pytest.mark.parametrize(
    "broken",
    [
        {"name": None},
        {"pricing": "$"},
        {"pricing": 5},
        {"small_description": [3]},
        {"customization_options": {"Color": [{}]}},
        {"customization_options": [1]},
        {"asin": 7},
        {"query": None},
    ],
)
def test_broken_rows_are_named(broken):
    with pytest.raises(EnvDataError, match="Row 1 of the product file of 'webshop'.*make-data webshop"):
        load({"asin": "B1"}, broken)
    with pytest.raises(EnvDataError, match="Row 0"):
        load_products(["text"], {}, random.Random(0))


def test_goals_are_all_combinations_of_options():
    values = {"Size": ["S", "L"], "Color": ["Red", "Green", "Blue"]}
    options = {name: [{"value": value} for value in listed] for name, listed in values.items()}
    products = load({"customization_options": options}, {"asin": "B2"}, B000000001=WANTED)
    goals = goals_of(products)
    assert [goal.index for goal in goals] == list(range(6))
    found = Counter(tuple(goal.options.items()) for goal in goals)
    expected = itertools.product(["red", "green", "blue"], ["s", "l"])
    assert found == Counter((("color", color), ("size", size)) for color, size in expected)
    assert len({goal.price_upper for goal in goals}) == 1
    limit = goals[0].price_upper
    assert limit in (40, 50, 60)  # the larger of two among 30, 40, 50, 60
    for goal in goals:
        color, size = goal.options["color"], goal.options["size"]
        assert (
            goal.text == f"find a lamp with color: {color}, and size: {size}, and price lower than {limit:.2f} dollars"
        )


def test_goals_without_options_or_limit():
    products = load({"customization_options": None, "pricing": "$985"}, B000000001=WANTED)
    (goal,) = goals_of(products)
    assert (goal.text, goal.price_upper, goal.options) == ("find a lamp", NO_LIMIT, {})
    assert goals_of(load({"customization_options": {"Size": []}}, B000000001=WANTED)) == []


@given(st.integers(0, 10_000), st.integers(0, 2**32))
def test_limits_are_above_the_price(cents, seed):
    products = load({"pricing": f"${cents / 10}", "customization_options": None}, B000000001=WANTED)
    (goal,) = make_goals(products, random.Random(seed), random.Random(seed))
    assert goal.price_upper > products[0].price
    assert goal.price_upper == NO_LIMIT or goal.price_upper - products[0].price <= 40


def test_nouns_without_a_tagger():
    assert guess_nouns("Women's Lamp with 3 Lamps for the U.S., X2") == ["women", "lamp", "lamps", "u", "x2"]


# ------------------------------------------------------------------------------------------- the generated catalogue


def test_generated_catalogue(shop):
    assert len(shop.products) == 360
    assert len(shop.goals) == GOALS == 1475
    assert {p.category for p in shop.products.values()} == {"beauty", "electronics", "fashion", "garden", "grocery"}
    assert len({p.title for p in shop.products.values()}) == 360
    assert len({p.query for p in shop.products.values()}) == 40
    assert {name for p in shop.products.values() for name in p.options} >= {"color", "size", "length", "scent"}
    for product in shop.products.values():
        assert len(product.bullets) == 5
        assert len(product.attributes) == 4
        assert set(product.goal_attributes) <= set(product.attributes)
        assert (product.instruction is None) == (not product.goal_attributes)
        assert 5 <= product.price < 700


def test_generated_catalogue_never_changes(shop):
    text = "\n".join(f"{goal.product.asin} {goal.text} {goal.price_upper}" for goal in shop.goals)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "5c5b9cc115b9dfe0"
    digests = [
        hashlib.sha256(" ".join(t.task_id for t in WebShopEnv.tasks(split, data="synthetic")).encode()).hexdigest()[
            :16
        ]
        for split in ("train", "test")
    ]
    assert digests == ["84db72859b0fe1a2", "5dc07b047f37070b"]


def test_generated_files_are_in_the_format_of_webshop():
    rows, annotations = generate_files()
    assert json.loads(json.dumps(rows)) == rows
    assert {row["asin"] for row in rows} == set(annotations)
    assert all(len(row["asin"]) == 10 for row in rows)


def test_every_option_of_every_generated_goal_matters(shop):
    """Only the options asked for give 1: none may be left out, and no other value of the product passes."""
    pytest.importorskip("rapidfuzz")
    for goal in shop.goals:
        assert shop.score(goal.product, goal, goal.options).total == 1.0
        for name in goal.options:
            others = [value for value in goal.product.options[name] if value != goal.options[name]]
            for value in others:
                assert shop.score(goal.product, goal, {**goal.options, name: value}).total < 1.0
            rest = {key: value for key, value in goal.options.items() if key != name}
            assert shop.score(goal.product, goal, rest).total < 1.0


def test_splits_of_the_generated_catalogue_share_no_product(shop):
    train, test, pool = (WebShopEnv.tasks(split, data="synthetic") for split in ("train", "test", "all"))
    assert (len(train), len(test), len(pool)) == (1202, 200, 1475)
    asked = [
        {shop.goals[int(task.task_id.removeprefix("synthetic_"))].product.asin for task in tasks}
        for tasks in (train, test)
    ]
    assert not asked[0] & asked[1]
    assert len(asked[1]) > 40
    assert {task.family for task in test} == {task.family for task in train}


# --------------------------------------------------------------------------------------------------------- randomness


def test_the_global_generator_is_left_alone(folder):
    """Neither read nor moved: not by building shops, not by playing, random results included."""
    code = (
        "import random, sys; random.seed(int(sys.argv[1])); before = random.getstate()\n"
        "from env_adapters.webshop import WebShopEnv\n"
        "from env_adapters.webshop.shop import open_shop\n"
        "import hashlib\n"
        "text = ''\n"
        f"for data, root in (('synthetic', None), ('real', {str(folder)!r})):\n"
        "    text += str([(g.text, g.product.price) for g in open_shop(data, root).goals])\n"
        "    text += str([WebShopEnv.tasks(split, data=data, root=root) for split in WebShopEnv.splits])\n"
        f"env = WebShopEnv('synthetic', {str(folder)!r})\n"
        "for task_id in ('synthetic_3', 'webshop_3'):\n"
        "    text += env.reset(options={'task_id': task_id})[0]\n"
        "    text += ''.join(env.step('Action: ' + a)[0] for a in ('search[<r>]', 'click[next >]', 'search[lamp]'))\n"
        "assert random.getstate() == before\n"
        "print(hashlib.sha256(text.encode()).hexdigest())\n"
    )
    pytest.importorskip("nltk")
    outputs = {
        subprocess.run([sys.executable, "-c", code, seed], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for seed in "12"
    }
    assert len(outputs) == 1
