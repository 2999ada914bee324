"""Who rolls out, and what contradicts it."""

import pytest
from datasets import Dataset, IterableDataset

from cope_trl.drivers import OWN, SINGLE_TURN, find_driver
from cope_trl.errors import ConfigError

NAMED = Dataset.from_list([{"prompt": "x", "environment": "count", "task_id": "1"}])
BARE = Dataset.from_list([{"prompt": "x", "answer": "4"}])


def find(dataset=NAMED, environments=None, reward_funcs=None, success_fn=None, **loops):
    return find_driver(loops, environments, dataset, reward_funcs, success_fn)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_an_argument_of_trls(name):
    assert find(**{name: [print]}) == name
    assert find(BARE, reward_funcs=len, success_fn=len, **{name: [print]}) == name


def test_rows_that_name_environments():
    assert find() == OWN
    assert find(reward_funcs=len) == OWN
    assert find(tools=[]) == OWN
    assert find(BARE) == OWN  # the missing columns are then named


def test_rows_that_name_none():
    assert find(BARE, reward_funcs=len) == SINGLE_TURN
    assert find(IterableDataset.from_generator(lambda: iter([{"prompt": "x"}])), reward_funcs=len) == SINGLE_TURN
    assert find(BARE, reward_funcs=len, environments={"count": len}) == OWN


def test_half_a_row_is_not_a_single_turn():
    assert find(NAMED.remove_columns("task_id"), reward_funcs=len) == OWN
    assert find(NAMED.remove_columns("environment"), reward_funcs=len) == OWN


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_two_ways_at_once(name):
    with pytest.raises(ConfigError, match=f"`environments` and `{name}` are both given.*Pass one of them"):
        find(environments={"count": len}, **{name: [print]})


def test_success_fn_with_environments():
    with pytest.raises(ConfigError, match="`success_fn` is given"):
        find(success_fn=len)
