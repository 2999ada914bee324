"""What a dataset's `environment` column means: the registry plus the factories a user passed."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import gymnasium
from datasets import Dataset

from cope_trl.errors import ConfigError
from cope_trl.rollout.episodes import EpisodeLimits
from env_adapters import registry
from env_adapters.base import TextEnv


class EnvironmentTable:
    """Resolves environment names.

    Args:
        factories: factories by name, taking precedence over the registry.
    """

    def __init__(self, factories: Mapping[str, Callable[[], gymnasium.Env]] | None = None) -> None:
        for name, factory in (factories or {}).items():
            if not callable(factory):
                raise ConfigError(
                    f"`environments[{name!r}]` is {factory!r}, which cannot be called; pass a class or a function "
                    "that returns a new environment."
                )
        self._factories = dict(factories or {})
        self._seen: set[str] = set()

    def check(self, dataset: Any) -> None:
        """Check every environment and task id a dataset names, without making an environment.

        Raises the adapter's own errors: unknown environment, unknown task id, missing dependency. A stream is not
        read; its rows are checked when they are played.
        """
        if not isinstance(dataset, Dataset):
            return
        for name in dataset.unique("environment"):
            self.learn([name])
            if name in self._factories:
                continue
            cls = registry.resolve(name)
            if not issubclass(cls, TextEnv):  # a foreign Gymnasium environment checks its own tasks when it is reset
                continue
            cls.check_requirements()
            for row_name, task_id in zip(dataset["environment"], dataset["task_id"], strict=True):
                if row_name == name:
                    cls.check_task_id(str(task_id))

    def learn(self, names: Iterable[str]) -> bool:
        """Take up environments met in rows, so that [`limits`] knows them; a stream names its own no sooner.

        Args:
            names: values of the `environment` column.

        Returns:
            Whether one of them is new.

        Raises:
            UnknownEnvironmentError, MissingDependencyError: as [`check`].
        """
        new = set(names) - self._seen
        for name in new - self._factories.keys():
            registry.resolve(name)
        self._seen |= new
        return bool(new)

    def make(self, name: str) -> gymnasium.Env:
        """A new environment."""
        return self._factories[name]() if name in self._factories else registry.make(name)

    def limits(self, args: Any, evaluation: bool, context: int | None) -> EpisodeLimits:
        """Episode limits: those of the configuration, else the own ones of the environments met so far.

        Args:
            args: a [`~cope_trl.CoPEConfig`].
            evaluation: whether for evaluation episodes.
            context: longest sequence the model takes in tokens, or `None`.
        """
        own = {}
        asked = args.max_turns_eval if evaluation else args.max_turns
        for name in self._seen:
            source = self._factories.get(name) or registry.resolve(name)
            own[name] = asked or getattr(source, "max_turns_eval" if evaluation else "max_turns", 30)
        return EpisodeLimits(
            max_turns={**own, "": asked or 30},
            max_tokens_per_turn=args.max_tokens_per_turn,
            max_completion_length=args.max_completion_length,
            max_total_tokens=context,
            max_prompt_length=args.max_prompt_length,
        )
