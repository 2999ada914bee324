"""What the `environment` column of a dataset means."""

from types import SimpleNamespace

import gymnasium
import pytest
from datasets import Dataset, IterableDataset
from support import CountEnv, count_rows

from cope_trl.environments import EnvironmentTable
from cope_trl.errors import ConfigError
from cope_trl.rollout.episodes import EpisodeLimits
from env_adapters import registry
from env_adapters.errors import MissingDependencyError, UnknownEnvironmentError, UnknownTaskError

ARGS = SimpleNamespace(
    max_turns=None, max_turns_eval=None, max_tokens_per_turn=11, max_completion_length=22, max_prompt_length=33
)


@pytest.fixture
def registered(monkeypatch):
    """The toy environment under a registered name, and a foreign one."""

    class Foreign(gymnasium.Env):
        max_turns = 5

    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    registry.register("toy", CountEnv)
    registry.register("foreign", Foreign)
    return Foreign


def dataset(*pairs):
    prompt = CountEnv.standing_messages()
    return Dataset.from_list([{"prompt": prompt, "environment": name, "task_id": task} for name, task in pairs])


def table_of(*names, **factories):
    table = EnvironmentTable(factories)
    table.check(dataset(*((name, "count-1") for name in names)))
    return table


def test_factories_come_before_the_registry(registered):
    class Mine(CountEnv):
        pass

    table = EnvironmentTable({"toy": Mine})
    assert type(table.make("toy")) is Mine
    assert type(EnvironmentTable().make("toy")) is CountEnv
    assert table.make("toy") is not table.make("toy")
    with pytest.raises(UnknownEnvironmentError, match="'nowhere'"):
        table.make("nowhere")


@pytest.mark.parametrize("factory", ["CountEnv", CountEnv(), None, 3])
def test_a_factory_must_be_callable(factory):
    with pytest.raises(ConfigError, match=r"`environments\['count'\]` is .*, which cannot be called; pass a class"):
        EnvironmentTable({"count": factory})


def test_a_good_dataset_passes(registered):
    table = EnvironmentTable({"count": CountEnv})
    table.check(Dataset.from_list(count_rows(1, 2)))
    table.check(dataset(("toy", "count-3"), ("foreign", "any id at all"), ("count", "no id of it")))


def test_an_unknown_environment_is_named_with_the_closest(registered):
    with pytest.raises(UnknownEnvironmentError, match=r"'tou'.*Did you mean 'toy'"):
        EnvironmentTable().check(dataset(("toy", "count-1"), ("tou", "count-1")))


def test_every_task_id_is_checked(registered):
    rows = [("toy", f"count-{n}") for n in range(1, 40)] + [("foreign", "x"), ("toy", "count-many")]
    with pytest.raises(UnknownTaskError, match="count-many"):
        EnvironmentTable().check(dataset(*rows))
    EnvironmentTable().check(Dataset.from_list([{"environment": "toy", "task_id": 7}]))  # a number is read as text


def test_requirements_are_checked_before_tasks(registered):
    class Heavy(CountEnv):
        @classmethod
        def check_requirements(cls):
            raise MissingDependencyError("install Java")

    registry.register("heavy", Heavy)
    with pytest.raises(MissingDependencyError, match="install Java"):
        EnvironmentTable().check(dataset(("heavy", "count-many")))


def test_no_environment_is_made_by_a_check(registered, monkeypatch):
    monkeypatch.setattr(CountEnv, "__init__", lambda self: pytest.fail("made"))
    EnvironmentTable().check(dataset(("toy", "count-1")))


def test_a_stream_is_not_read(registered):
    def explode():
        raise AssertionError("read")
        yield

    EnvironmentTable().check(IterableDataset.from_generator(explode))


# ---------------------------------------------------------------- limits


def test_limits_are_the_environments_own(registered):
    table = table_of("toy", "foreign")
    train = table.limits(ARGS, False, 4096)
    assert train == EpisodeLimits({"toy": 6, "foreign": 5, "": 30}, 11, 22, 4096, 33)
    evaluation = table.limits(ARGS, True, None)
    assert evaluation == EpisodeLimits({"toy": 8, "foreign": 30, "": 30}, 11, 22, None, 33)


def test_limits_of_an_environment_that_is_met_in_rows(registered):
    """A stream is not read by `check`; its names are known when its rows are played."""
    table = EnvironmentTable({"count": CountEnv})
    table.check(IterableDataset.from_generator(lambda: iter(count_rows(1))))
    assert table.limits(ARGS, False, None).max_turns == {"": 30}
    assert table.learn(["count", "count"])
    assert table.limits(ARGS, False, None).max_turns == {"count": 6, "": 30}
    assert not table.learn(["count"])
    assert table.learn(["count", "toy", "foreign"])
    assert table.limits(ARGS, False, None).max_turns == {"count": 6, "toy": 6, "foreign": 5, "": 30}


def test_an_unknown_environment_met_in_rows_is_not_taken_up(registered):
    table = table_of("toy")
    for _ in range(2):
        with pytest.raises(UnknownEnvironmentError, match=r"'tou'.*Did you mean 'toy'"):
            table.learn(["toy", "tou", "foreign"])
    assert table.limits(ARGS, False, None).max_turns == {"toy": 6, "": 30}
    with pytest.raises(UnknownEnvironmentError, match="'tou'"):
        table.check(dataset(("tou", "count-1")))
    assert table.limits(ARGS, False, None).max_turns == {"toy": 6, "": 30}


def test_limits_of_the_configuration_come_first(registered):
    table = table_of("toy", "count", count=CountEnv)
    args = SimpleNamespace(**{**vars(ARGS), "max_turns": 3})
    assert table.limits(args, False, None).max_turns == {"toy": 3, "count": 3, "": 3}
    assert table.limits(args, True, None).max_turns == {"toy": 8, "count": 8, "": 30}
    args = SimpleNamespace(**{**vars(ARGS), "max_turns_eval": 4})
    assert table.limits(args, True, None).max_turns == {"toy": 4, "count": 4, "": 4}
    assert table.limits(args, False, None).max_turns == {"toy": 6, "count": 6, "": 30}
