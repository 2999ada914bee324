"""What a worker hosts to play a registered environment: its class, where Gymnasium and this package are installed too.

Loaded by path in the worker's interpreter (see [`~env_adapters.isolated.worker`]); arguments and results are JSON.
"""

import importlib
from dataclasses import asdict
from typing import Any

from env_adapters.base import TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.protocols import Action
from env_adapters.registry import resolve


class TextEnvHost:
    """Hosts one [`TextEnv`].

    Args:
        entry_point: a registry name, or `"package.module:Class"`, importable here.
        options: arguments of the class.
    """

    def __init__(self, entry_point: str, options: dict[str, Any]) -> None:
        module, colon, name = entry_point.partition(":")
        found = getattr(importlib.import_module(module), name) if colon else resolve(entry_point)
        if not (isinstance(found, type) and issubclass(found, TextEnv)):
            raise EnvAdapterError(f"`environment` is {entry_point!r}, which is no TextEnv, so it cannot be isolated.")
        self._class: type[TextEnv] = found
        self._options = options
        self._env: TextEnv | None = None

    def describe(self) -> dict[str, Any]:
        """The class attributes that a [`TextEnv`] has; the protocol as its name."""
        cls = self._class
        return {
            "name": cls.name,
            "protocol": cls.protocol.name,
            "instruction": cls.instruction,
            "acknowledgement": cls.acknowledgement,
            "score_range": list(cls.score_range),
            "splits": list(cls.splits),
            "max_turns": cls.max_turns,
            "max_turns_eval": cls.max_turns_eval,
        }

    def tasks(self, split: str, options: dict[str, Any]) -> list[dict[str, str]]:
        return [asdict(task) for task in self._class.tasks(split, **options)]

    def check_requirements(self) -> None:
        self._class.check_requirements()

    def check_task_id(self, task_id: str) -> None:
        self._class.check_task_id(task_id)

    def begin(self, task_id: str | None, seed: int | None) -> str:
        if self._env is None:
            self._env = self._class(**self._options)
        options = {} if task_id is None else {"task_id": task_id}
        return self._env.reset(seed=seed, options=options)[0]

    def act(self, text: str, target: str, is_call: bool) -> dict[str, Any]:
        return asdict(self._playing()._act(Action(text, target, is_call)))

    def current_score(self) -> float:
        return self._playing()._current_score()

    def admissible_actions(self) -> list[str] | None:
        return self._playing().admissible_actions()

    def expert_action(self) -> str | None:
        return self._playing().expert_action()

    def _playing(self) -> TextEnv:
        if self._env is None:
            raise EpisodeStateError("No episode is running; call `reset` first.")
        return self._env
