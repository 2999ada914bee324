"""`check_env`: does an environment keep the contract of [`~env_adapters.base.TextEnv`]?

Every check has a message of its own, which says what was done, what came back, and what was expected.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
from gymnasium.error import ResetNeeded

from env_adapters.base import Task, TextEnv
from env_adapters.errors import EnvContractError, EpisodeStateError, UnknownSplitError, UnknownTaskError
from env_adapters.protocols import Protocol

# What untrained policies and broken decoders send.
HOSTILE_REPLIES = {
    "an empty reply": "",
    "only white space": " \n\t\r\n ",
    "only the marker": "Action:",
    "letters of many scripts": "Action: \u0636\u4f60\u597d \u0928\u092e\u0938\U0001f9ea\u200f\u202e z\u0335\u0321",
    "100 kB": "Action: " + "go north " * 11_400,
    "a lone surrogate": "Action: open \ud800 door \udfff",
    "NUL characters": "Action: \x00look\x00",
    "unclosed markup": "<think>Action: ```python\n<tool_call>{",
}
_UNKNOWN = "no such task \x00"


def check_env(
    env: "gymnasium.Env[str, str]", task_id: str | None = None, *, replies: Sequence[str] | None = None
) -> None:
    """Check that a text environment keeps the contract; the environment is closed afterwards.

    Args:
        env: a fresh environment, on which `reset` was not called yet.
        task_id: the task to play; by default the first of the first split, or none where the environment lists no
            tasks.
        replies: replies that end the episode of that task, to check its end too.

    Raises:
        EnvContractError: the first violation found.
    """
    if not isinstance(env, gymnasium.Env):
        raise EnvContractError(f"An environment must be a gymnasium.Env, got {type(env).__name__}.")
    inner = env.unwrapped
    if isinstance(inner, TextEnv):
        first = _check_class(type(inner))
        task_id = first if task_id is None else task_id
    _check_refused(env, "before `reset`")
    _check_reset(env, task_id)
    if task_id is not None:
        _check_unknown_task(env)
    _check_hostile_replies(env, task_id)
    if replies is not None:
        _check_end(env, task_id, replies)
    _call("The first `close()`", env.close)
    _call("`close()` on a closed environment, which must do nothing,", env.close)
    _check_refused(env, "after `close`")


# -------------------------------------------------------------------- the class


def _check_class(cls: type[TextEnv]) -> str:
    """Check the class attributes and the task lists; return the first task id."""
    kinds: dict[str, Any] = {"name": str, "instruction": str, "protocol": Protocol, "splits": tuple}
    for attribute, kind in kinds.items():
        value = getattr(cls, attribute, None)
        if not isinstance(value, kind) or not value:
            raise EnvContractError(f"`{attribute}` must be a non-empty {kind.__name__}, got {value!r}.")
    acknowledgement: Any = cls.acknowledgement
    if acknowledgement is not None and not isinstance(acknowledgement, str):
        raise EnvContractError(f"`acknowledgement` must be a str or None, got {acknowledgement!r}.")
    low, high = cls.score_range
    if not low < high:
        raise EnvContractError(f"`score_range` must be (smallest, largest), got {cls.score_range!r}.")
    for split in cls.splits:
        _check_tasks(cls, split)
    try:
        cls.tasks("no such split")
    except UnknownSplitError:
        pass
    except Exception as error:
        raise EnvContractError(f"`tasks` of an unknown split must raise UnknownSplitError, not {error!r}.") from error
    else:
        raise EnvContractError("`tasks` of an unknown split must raise UnknownSplitError, but it returned.")
    first = cls.tasks(cls.splits[0])[0].task_id
    _check_prompt(cls, first)
    return first


def _check_prompt(cls: type[TextEnv], task_id: str) -> None:
    messages: Any = _call(f"`standing_messages({task_id!r})`", lambda: cls.standing_messages(task_id))
    if not messages or not all({"role", "content"} <= message.keys() for message in messages):
        raise EnvContractError(
            f"`standing_messages({task_id!r})` must be a non-empty list of messages with 'role' and 'content', got "
            f"{_short(messages)}."
        )
    tools: Any = _call(f"`tools({task_id!r})`", lambda: cls.tools(task_id))
    if tools is not None and not (isinstance(tools, list) and all(_is_schema(tool) for tool in tools)):
        raise EnvContractError(
            f"`tools({task_id!r})` must be None or a list of schemas "
            '{"type": "function", "function": {"name": ..., "parameters": ...}}, got ' + f"{_short(tools)}."
        )


def _is_schema(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _check_tasks(cls: type[TextEnv], split: str) -> None:
    tasks = _call(f"`tasks({split!r})`", lambda: cls.tasks(split))
    if not tasks:
        raise EnvContractError(f"`tasks({split!r})` is empty.")
    for task in tasks:
        if not isinstance(task, Task) or not isinstance(task.task_id, str):
            raise EnvContractError(f"`tasks({split!r})` must hold Task objects whose task_id is a str, got {task!r}.")
        if task.environment != cls.name or task.split != split:
            raise EnvContractError(
                f"`tasks({split!r})` holds {task!r}, but its environment must be {cls.name!r} and its split {split!r}."
            )
    if len({task.task_id for task in tasks}) != len(tasks):
        raise EnvContractError(f"`tasks({split!r})` holds a task id twice.")


# -------------------------------------------------------------------- the episode


def _check_reset(env: "gymnasium.Env[str, str]", task_id: str | None) -> None:
    observation, info = _reset(env, task_id)
    if info["success"]:
        raise EnvContractError("`info['success']` is True after `reset`, before anything was done.")
    # A step in between shows state that a reset leaves behind.
    _step(env, "Action: look", "a reply")
    again, _ = _reset(env, task_id)
    if again != observation:
        raise EnvContractError(
            f"Two resets with the same task id {task_id!r} and seed gave different observations: "
            f"{_short(observation)} and {_short(again)}."
        )
    _, info = _reset(env, task_id, admissible_actions=True)
    actions = info.get("admissible_actions")
    if actions is not None and not (isinstance(actions, list) and all(isinstance(a, str) for a in actions)):
        raise EnvContractError(f"`info['admissible_actions']` must be a list of str or None, got {_short(actions)}.")


def _check_unknown_task(env: "gymnasium.Env[str, str]") -> None:
    try:
        env.reset(seed=0, options={"task_id": _UNKNOWN})
    except UnknownTaskError:
        return
    except Exception as error:
        raise EnvContractError(f"An unknown task id must raise UnknownTaskError, not {error!r}.") from error
    raise EnvContractError("An unknown task id must raise UnknownTaskError, but `reset` returned.")


def _check_hostile_replies(env: "gymnasium.Env[str, str]", task_id: str | None) -> None:
    _reset(env, task_id)
    for what, reply in HOSTILE_REPLIES.items():
        info, ended = _step(env, reply, what)
        if ended:
            raise EnvContractError(f"The episode ended on {what}; a reply that does nothing must leave it playable.")
        if not reply and (info["action"] or not info["invalid"]):
            raise EnvContractError(
                "An empty reply must give `info['action'] == ''` and `info['invalid'] == True`, got "
                f"{info['action']!r} and {info['invalid']!r}."
            )


def _check_end(env: "gymnasium.Env[str, str]", task_id: str | None, replies: Sequence[str]) -> None:
    _reset(env, task_id)
    for reply in replies:
        _, ended = _step(env, reply, f"the reply {_short(reply)}")
        if ended:
            _check_refused(env, "after the end of an episode")
            _reset(env, task_id)
            return
    raise EnvContractError("The `replies` that should end the episode did not.")


def _check_refused(env: "gymnasium.Env[str, str]", when: str) -> None:
    try:
        env.step("Action: look")
    except (EpisodeStateError, ResetNeeded):  # the second is Gymnasium's own, raised by its wrappers
        return
    except Exception as error:
        raise EnvContractError(f"`step` {when} must raise EpisodeStateError, not {error!r}.") from error
    raise EnvContractError(f"`step` {when} must raise EpisodeStateError, but it returned.")


# -------------------------------------------------------------------- one call


def _reset(env: "gymnasium.Env[str, str]", task_id: str | None, **options: Any) -> tuple[str, dict[str, Any]]:
    if task_id is not None:
        options["task_id"] = task_id
    result: Any = _call(f"`reset` with the task id {task_id!r}", lambda: env.reset(seed=0, options=options))
    if not isinstance(result, tuple) or len(result) != 2:
        raise EnvContractError(f"`reset` must return (observation, info), got {_short(result)}.")
    observation, info = result
    if not isinstance(observation, str):
        raise EnvContractError(f"The observation of `reset` must be a str, got {_short(observation)}.")
    _check_info(env, info, "reset")
    return observation, info


def _step(env: "gymnasium.Env[str, str]", reply: str, what: str) -> tuple[dict[str, Any], bool]:
    """Step, check everything that came back, and return the info and whether the episode is over."""
    result: Any = _call(f"`step` with {what}", lambda: env.step(reply))
    if not isinstance(result, tuple) or len(result) != 5:
        raise EnvContractError(
            f"`step` must return (observation, reward, terminated, truncated, info), got {_short(result)}."
        )
    observation, reward, terminated, truncated, info = result
    if not isinstance(observation, str):
        raise EnvContractError(f"The observation of `step` must be a str, got {_short(observation)}.")
    if isinstance(reward, bool) or not isinstance(reward, (int, float)) or reward not in (0, 1):
        raise EnvContractError(f"The reward must be 0.0 or 1.0, got {reward!r}.")
    for name, value in {"terminated": terminated, "truncated": truncated}.items():
        if not isinstance(value, bool):
            raise EnvContractError(f"`{name}` must be a bool, got {value!r}.")
    _check_info(env, info, "step")
    if info["success"] and not terminated:
        raise EnvContractError("`info['success']` is True, but the episode goes on: success must end it.")
    if bool(reward) != info["success"]:
        raise EnvContractError(
            f"The reward is {reward!r} with `info['success']` {info['success']}; it must be 1.0 on success only."
        )
    return info, terminated or truncated


def _check_info(env: "gymnasium.Env[str, str]", info: Any, method: str) -> None:
    if not isinstance(info, dict):
        raise EnvContractError(f"The info of `{method}` must be a dict, got {_short(info)}.")
    for key, kind in {"success": bool, "score": float, "action": str, "invalid": bool}.items():
        if key not in info:
            raise EnvContractError(f"The info of `{method}` lacks the key {key!r}; it has {sorted(map(str, info))}.")
        if not isinstance(info[key], kind):
            raise EnvContractError(
                f"`info[{key!r}]` of `{method}` must be a {kind.__name__}, got {_short(info[key])}."
            )
    low, high = getattr(env.unwrapped, "score_range", (-math.inf, math.inf))
    if not (math.isfinite(info["score"]) and low <= info["score"] <= high):
        raise EnvContractError(f"`info['score']` of `{method}` is {info['score']}, outside of [{low}, {high}].")


def _call(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise EnvContractError(f"{what} raised {error!r}.") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"
