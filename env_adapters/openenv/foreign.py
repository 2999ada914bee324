"""Plays a text environment that somebody else wrote for OpenEnv: one text field in, text fields out.

Which fields these are is read from the JSON schemas the server publishes. A task is a seed: `reset` is called with it,
so episodes of a group begin alike wherever the environment keeps to its seed.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from env_adapters.base import Outcome, Task
from env_adapters.errors import EnvAdapterError, UnknownTaskError, did_you_mean
from env_adapters.isolated.proxy import PROTOCOLS
from env_adapters.openenv.address import Address
from env_adapters.openenv.client import DEADLINE, OpenEnvEnv
from env_adapters.openenv.describe import fetch
from env_adapters.protocols import Action, Protocol

# Seeds of the splits; they do not overlap.
SEEDS = {"train": range(1000), "test": range(1000, 1200)}
# What every OpenEnv action and observation has, none of it for the agent.
_COMMON = ("metadata", "done", "reward")


class ForeignEnv(OpenEnvEnv):
    """An OpenEnv text environment of other people.

    An episode is a success when its last reward is at least 1.0. The score is the reward of the last step.

    Args:
        action_field: the action's field that takes the text; by default the one required text field, or else the only
            one.
        observation_field: the observation's field that is shown, several joined by `+`; by default the only text
            field.
        protocol: how the action is found in a reply: `"react"`, `"code"` or `"tool_call"`.
        deadline: seconds until a `reset` or a `step` is given up.
    """

    schema: ClassVar[dict[str, Any]]
    protocol: Protocol  # type: ignore[misc]  # may be chosen for each object
    splits = tuple(SEEDS)
    score_range = (-math.inf, math.inf)
    max_turns = 30

    def __init__(
        self,
        action_field: str | None = None,
        observation_field: str | None = None,
        protocol: str | None = None,
        deadline: float = DEADLINE,
    ) -> None:
        super().__init__(deadline)
        options = self.address.options
        self._action_field = action_field_of(self.schema, action_field or options.get("action_field"))
        self._shown = observation_fields_of(self.schema, observation_field or options.get("observation_field"))
        if protocol is not None:
            self.protocol = _protocol(protocol)

    @classmethod
    def attributes(cls, address: Address, schema: dict[str, Any]) -> dict[str, Any]:
        """The class attributes for one address."""
        metadata = fetch(address.urls[0], "/metadata")
        described = metadata.get("description") if isinstance(metadata, dict) else None
        return {
            "schema": schema,
            "instruction": str(described or "Play the environment."),
            "protocol": _protocol(address.options.get("protocol", "react")),
        }

    @classmethod
    def check_requirements(cls) -> None:
        action_field_of(cls.schema, cls.address.options.get("action_field"))
        observation_fields_of(cls.schema, cls.address.options.get("observation_field"))

    @classmethod
    def tasks(cls, split: str) -> Sequence[Task]:
        cls.check_split(split)
        return [Task(cls.name, str(seed), "", split) for seed in SEEDS[split]]

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        if not (task_id.isascii() and task_id.isdigit()):
            raise UnknownTaskError(
                f"`task_id` is {task_id!r}, but the tasks of {cls.name!r} are seeds: a whole number of 0 or more."
            )

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        if task_id is not None:
            self.check_task_id(task_id)
            seed = int(task_id)
        return self._text(self._start(**({} if seed is None else {"seed": int(seed)})))

    def _act(self, action: Action) -> Outcome:
        answer = self._step({self._action_field: action.text})
        score, done = self._score(answer), bool(answer.done)
        return Outcome(self._text(answer), score=score, success=done and score >= 1.0, done=done)

    def _text(self, answer: Any) -> str:
        values = [answer.observation.get(name) for name in self._shown]
        return "\n".join(value for value in values if isinstance(value, str) and value)

    def _score(self, answer: Any) -> float:
        reward = 0.0 if answer.reward is None else answer.reward
        if not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise EnvAdapterError(f"The environment at {self.url} gave the reward {reward!r}; it must be a number.")
        return float(reward)


def action_field_of(schema: dict[str, Any], chosen: str | None = None) -> str:
    """The field of an action that takes the text.

    Args:
        schema: what `GET /schema` answered.
        chosen: the field to take, or `None`.

    Raises:
        EnvAdapterError: there is no such field, or more than one and none was chosen; or the action has another
            required field, for which there is no value.
    """
    action = schema["action"]
    texts = _texts(action)
    required = [name for name in action.get("required", []) if name not in _COMMON]
    if chosen is None:
        candidates = [name for name in texts if name in required] or texts
        if len(candidates) != 1:
            raise EnvAdapterError(_choose("action", "action_field", candidates, action))
        chosen = candidates[0]
    elif chosen not in texts:
        raise EnvAdapterError(
            f"`action_field` is {chosen!r}, but the text fields of the action are {texts}."
            + did_you_mean(chosen, texts)
        )
    others = [name for name in required if name != chosen]
    if others:
        raise EnvAdapterError(
            f"The action needs {others} beside {chosen!r}, and text is all an agent has to give; this environment "
            "cannot be played as text."
        )
    return chosen


def observation_fields_of(schema: dict[str, Any], chosen: str | None = None) -> list[str]:
    """The fields of an observation that are shown; arguments and errors as [`action_field_of`]."""
    observation = schema["observation"]
    texts = _texts(observation)
    if chosen is None:
        if len(texts) != 1:
            raise EnvAdapterError(_choose("observation", "observation_field", texts, observation))
        return texts
    names = re.split(r"[+\s]+", chosen)  # a `+` after a `?` reads as a space
    for name in names:
        if name not in texts:
            raise EnvAdapterError(
                f"`observation_field` names {name!r}, but the text fields of the observation are {texts}."
                + did_you_mean(name, texts)
            )
    return names


def _texts(schema: dict[str, Any]) -> list[str]:
    """Names of the fields that hold any text; a field of fixed words is none."""
    return [
        name
        for name, field in schema.get("properties", {}).items()
        if name not in _COMMON and any(_is_text(kind) for kind in (field, *field.get("anyOf", [])))
    ]


def _is_text(field: dict[str, Any]) -> bool:
    return field.get("type") == "string" and not ({"enum", "const", "format"} & field.keys())


def _choose(what: str, option: str, candidates: list[str], schema: dict[str, Any]) -> str:
    if candidates:
        found = f"has the text fields {candidates}; choose with `{option}=`, or '?{option}=…' after the address"
    else:
        names = [name for name in schema.get("properties", {}) if name not in _COMMON]
        found = f"has no text field (its fields are {names}); this environment cannot be played as text"
    return f"The {what} of this OpenEnv environment {found}."


def _protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise EnvAdapterError(f"`protocol` is {name!r}; use one of {list(PROTOCOLS)}.{did_you_mean(name, PROTOCOLS)}")
    return PROTOCOLS[name]
