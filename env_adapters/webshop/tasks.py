"""Task ids and splits: which goals there are to train on and to test on."""

import functools
import random
import re

from env_adapters.errors import UnknownTaskError
from env_adapters.webshop.shop import Shop
from env_adapters.webshop.synthetic import GOALS as SYNTHETIC_GOALS

# Task ids begin with the catalogue they belong to; the first is AgentGym's name for WebShop.
PREFIXES = {"webshop": "real", "synthetic": "synthetic"}
_PREFIX_OF = {data: prefix for prefix, data in PREFIXES.items()}
_TASK_ID = re.compile(r"(webshop|synthetic)_([0-9]{1,9})", re.ASCII)

# The paper's pool and its splits (A.3); another pool is split in proportion.
POOL_SIZE = 6_910
SIZES = {"train": 3_930, "test": 200}
SPLIT_SEED = "the splits of webshop"


def task_id_of(data: str, index: int) -> str:
    """The id of a goal: `"webshop_17"` in a data folder, `"synthetic_17"` in the generated catalogue."""
    return f"{_PREFIX_OF[data]}_{index}"


def parse_task_id(task_id: str) -> tuple[str, int]:
    """Catalogue and goal index of a task id.

    Raises:
        UnknownTaskError: the text is no such id, or the generated catalogue has no goal with that number. How many a
            data folder has is only known once it was read.
    """
    match = _TASK_ID.fullmatch(task_id)
    if match is None:
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but the task ids of 'webshop' are 'webshop_N' (N from 0, a goal of the data "
            f"folder) and 'synthetic_0' to 'synthetic_{SYNTHETIC_GOALS - 1}'."
        )
    data, index = PREFIXES[match[1]], int(match[2])
    if data == "synthetic":
        check_index(task_id, index, SYNTHETIC_GOALS)
    return data, index


def check_index(task_id: str, index: int, count: int) -> None:
    """Raise [`UnknownTaskError`] unless a pool of `count` goals has one with that index."""
    if index >= count:
        prefix = task_id.partition("_")[0]
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but the last goal of that catalogue is '{prefix}_{count - 1}'."
        )


@functools.lru_cache(maxsize=32)
def draw_split(shop: Shop, data: str, split: str) -> tuple[int, ...]:
    """Indices of the goals of `"train"`, `"test"` or `"all"`, ascending.

    In a data folder 4,130 of the 6,910 goals are drawn, at random but always the same: the first 200 drawn are the
    test split, the others the training split, as many as in the paper. In the generated catalogue no product is asked
    for in both splits: goals for every fifth product are kept for testing, and 200 of them drawn.

    Args:
        shop: whose goals.
        data: its catalogue.
        split: one of the three.
    """
    count = len(shop.goals)
    if split == "all":
        return tuple(range(count))
    rng = random.Random(f"{SPLIT_SEED} {data}")
    if data == "synthetic":
        asked = sorted({goal.product.asin for goal in shop.goals})
        kept = set(rng.sample(asked, len(asked) // 5))
        train = [goal.index for goal in shop.goals if goal.product.asin not in kept]
        test = [goal.index for goal in shop.goals if goal.product.asin in kept]
        return tuple(train if split == "train" else sorted(rng.sample(test, SIZES["test"])))
    sizes = {name: max(1, size * count // POOL_SIZE) for name, size in SIZES.items()}
    drawn = rng.sample(range(count), min(count, sum(sizes.values())))
    test_size = sizes["test"]
    return tuple(sorted(drawn[:test_size] if split == "test" else drawn[test_size:]))
