"""Noisy demonstrations of an environment's scripted expert, as conversations."""

import random
from collections.abc import Sequence
from typing import Any

from cope_trl.errors import ConfigError
from cope_trl.forecast.prompts import LIST_SEPARATOR, plan_ahead
from env_adapters.base import TextEnv

Message = dict[str, str]


def demonstrate(env: TextEnv, task_id: str, *, noise: float, max_turns: int, rng: random.Random) -> list[Message]:
    """Play one task by the expert, some of whose actions are replaced by random admissible ones.

    Args:
        env: an environment with a scripted expert and a list of admissible actions.
        task_id: the task.
        noise: probability that an action is random.
        max_turns: longest demonstration, in turns.
        rng: source of the noise.

    Returns:
        The conversation: standing messages, then observation and reply in turn; ends with a reply.

    Raises:
        [`ConfigError`]: the environment has no scripted expert.
    """
    observation, _ = env.reset(options={"task_id": task_id})
    messages = env.standing_messages(task_id)
    for _ in range(max_turns):
        action = env.expert_action()
        if action is None:
            raise ConfigError(
                f"`environment` is {env.name!r}, which has no scripted expert to learn from. Set `warm_start` to "
                "false and `model_name_or_path` to an instruct model."
            )
        if rng.random() < noise:
            action = rng.choice(env.admissible_actions() or [action])
        messages += [{"role": "user", "content": observation}, {"role": "assistant", "content": f"Action: {action}"}]
        observation, _, terminated, truncated, _ = env.step(f"Action: {action}")
        if terminated or truncated:
            break
    return messages


def with_plan(messages: Sequence[Message], horizon: int, rng: random.Random) -> list[Message]:
    """The conversation cut at a random observation and continued by a plan-ahead turn (paper C.6).

    An instruct model understands the request for a plan; a model that has only ever seen actions does not. A small
    share of such conversations teaches it the format.
    """
    replies = [i for i, message in enumerate(messages) if message["content"].startswith("Action: ")]
    first = rng.randrange(len(replies))
    actions = [messages[i]["content"].removeprefix("Action: ") for i in replies[first : first + horizon + 1]]
    plan = [
        {"role": "user", "content": plan_ahead(len(actions), "list")},
        {"role": "assistant", "content": LIST_SEPARATOR.join(actions)},
    ]
    return [*messages[: replies[first]], *plan]


def demonstrations(
    env: TextEnv,
    task_ids: Sequence[str],
    *,
    noise: float,
    plan_share: float,
    horizon: int,
    max_turns: int,
    seed: int,
) -> list[dict[str, Any]]:
    """One conversation a task, as rows with a `messages` column.

    Args:
        env: as in [`demonstrate`].
        task_ids: tasks, one demonstration each.
        noise, max_turns: as in [`demonstrate`].
        plan_share: share of conversations that end with a plan-ahead turn.
        horizon: K of those turns.
        seed: seed of everything random.
    """
    rng = random.Random(seed)
    rows = []
    for task_id in task_ids:
        messages = demonstrate(env, task_id, noise=noise, max_turns=max_turns, rng=rng)
        rows.append({"messages": with_plan(messages, horizon, rng) if rng.random() < plan_share else messages})
    return rows
