"""Which rule decides, what it is given, and what it may answer."""

import logging

import numpy as np
import pytest
import torch

from cope_trl.errors import ConfigError
from cope_trl.rollout.success import SuccessRule


class World:
    def __init__(self, success):
        self.success = success


class Mute:
    pass


def decide(rule, environment=None, total=0.0):
    return rule({"goal": 1}, "done", environment, {"steady": total}, total)


def test_the_function_comes_first():
    rule = SuccessRule(lambda row, completion, environment, rewards: (row, completion, rewards) == GIVEN)
    assert decide(rule, World(False), 0.25)


GIVEN = ({"goal": 1}, "done", {"steady": 0.25})


@pytest.mark.parametrize("word", [True, False])
def test_the_environments_word_comes_second(word):
    assert decide(SuccessRule(), World(word), total=1.0 - word) is word


@pytest.mark.parametrize(("total", "expected"), [(1.0, True), (0.99, False), (2.0, True), (float("nan"), False)])
@pytest.mark.parametrize("environment", [None, Mute()])
def test_the_total_reward_comes_last(environment, total, expected):
    assert decide(SuccessRule(), environment, total) is expected


@pytest.mark.parametrize("value", [np.bool_(True), torch.tensor(True), np.array(True)])
def test_booleans_of_other_libraries(value):
    assert decide(SuccessRule(lambda **_: value)) is True


@pytest.mark.parametrize(
    "value", [1, 1.0, "True", None, np.float32(1), torch.tensor(1.0), [True], np.array([True, True])]
)
def test_anything_else_is_an_error(value):
    with pytest.raises(ConfigError, match=r"`success_fn` returned .*; success must be True or False"):
        decide(SuccessRule(lambda **_: value))
    with pytest.raises(ConfigError, match="`World.success` is "):
        decide(SuccessRule(), World(value))


def test_a_rule_that_cannot_be_called():
    with pytest.raises(ConfigError, match="`success_fn` is 'yes', which cannot be called"):
        SuccessRule("yes")


def test_each_rule_is_named_once(caplog):
    caplog.set_level(logging.INFO, logger="cope_trl")
    rule = SuccessRule(threshold=0.5)
    for environment in (None, World(True), None, World(False), Mute()):
        decide(rule, environment)
    assert [record.getMessage() for record in caplog.records] == [
        "An episode is a success by total reward >= 0.5 (`success_threshold`).",
        "An episode is a success by the attribute `success` of World.",
    ]
