import pytest

from cope_trl.errors import ConfigError
from cope_trl.forecast.prompts import NEXT_ACTION, plan_ahead


def test_the_texts_are_those_of_the_paper():
    assert plan_ahead(3, "list") == (
        "Plan ahead: list the next 3 actions you will take to make progress on the task, starting with the action you "
        "take right now, one action per line."
    )
    assert plan_ahead(1, "turns") == (
        "Plan ahead: give the next 1 actions you will take to make progress on the task, one action per reply, "
        "starting with the action you take right now. Reply with the action only."
    )
    assert NEXT_ACTION == "Next action?"


def test_bad_arguments_are_named():
    with pytest.raises(ConfigError, match="`k` is 0"):
        plan_ahead(0, "list")
    with pytest.raises(ConfigError, match="'grid'; use 'list' or 'turns'"):
        plan_ahead(1, "grid")
