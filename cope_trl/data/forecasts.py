"""Plan-ahead sequences as a conversational dataset: the forecasting objective for any SFT trainer (paper C.6)."""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

from datasets import Dataset, Features, List, Value

from cope_trl.errors import DataError
from cope_trl.forecast.prompts import LIST_SEPARATOR, MERGE_SEPARATOR, NEXT_ACTION, plan_ahead
from cope_trl.forecast.windows import forecast_windows
from cope_trl.types import Layout, TaskRef, Trajectory

Message = dict[str, str]
Standing = Sequence[Message] | Mapping[str, Sequence[Message]] | Callable[[TaskRef], Sequence[Message]]
_MESSAGES = List({"role": Value("string"), "content": Value("string")})
FEATURES = Features({"prompt": _MESSAGES, "completion": _MESSAGES})


def forecast_dataset(
    trajectories: Iterable[Trajectory],
    prompt_messages: Standing,
    *,
    horizon: int = 2,
    skip_invalid: bool = False,
    skip_no_call: bool = False,
    max_windows: int | None = None,
    seed: int = 0,
    successes_only: bool = True,
    merge_user_turns: bool = False,
) -> Dataset:
    """Return one row a forecast window, with conversational `prompt` and `completion`.

    TRL's `SFTTrainer` takes it unchanged and trains on the completion. With layout `"turns"` the completion holds the
    fixed user turns between actions as well: set `SFTConfig(assistant_only_loss=True)` to leave them out of the loss.

    Args:
        trajectories: episodes; failed ones are left out, and unsuccessful ones too under `successes_only`.
        prompt_messages: the messages every episode begins with (`TextEnv.standing_messages()`), a mapping from the
            name of an environment to its messages, or a function of the task where they differ from task to task.
        horizon: K, the largest offset in turns.
        skip_invalid, skip_no_call, max_windows: as in [`forecast_windows`].
        seed: seed of the draw under `max_windows`.
        successes_only: only episodes with Y = 1, as in Eq. 5; `False` takes every episode that did not fail.
        merge_user_turns: append the planning request to the last observation, for templates that refuse two user turns
            in a row (Gemma, Mistral).

    Raises:
        ConfigError: see [`forecast_windows`].
        DataError: `prompt_messages` lacks an environment, or no window is left.
    """
    rng = random.Random(seed)
    rows = []
    for trajectory in trajectories:
        if trajectory.failed or (successes_only and not trajectory.success):
            continue
        messages = trajectory_messages(trajectory, _standing(trajectory, prompt_messages))
        before = len(messages) - 2 * len(trajectory.turns)  # number of messages that the first turn answers
        for window in forecast_windows(
            trajectory,
            horizon,
            skip_invalid=skip_invalid,
            skip_no_call=skip_no_call,
            max_windows=max_windows,
            rng=rng,
        ):
            history = messages[: before + 2 * window.turn]
            request = plan_ahead(len(window.targets), trajectory.layout)
            rows.append(
                {
                    "prompt": _ask(history, request, merge_user_turns),
                    "completion": _answer(window.targets, trajectory.layout),
                }
            )
    if not rows:
        raise DataError("`trajectories` gave no forecast window: pass successful episodes, or `successes_only=False`.")
    return Dataset.from_list(rows, features=FEATURES)


def trajectory_messages(trajectory: Trajectory, prompt_messages: Sequence[Message]) -> list[Message]:
    """Return an episode as messages: standing messages, first observation, then two messages a turn.

    Standing messages that end with the user's get the first observation appended, as in an episode. The last message
    is the last observation, empty where the turn was cut and never executed.
    """
    messages = [dict(message) for message in prompt_messages]
    first = trajectory.first_observation
    if messages and messages[-1]["role"] == "user":
        messages[-1]["content"] += MERGE_SEPARATOR + first
    else:
        messages.append({"role": "user", "content": first})
    for turn in trajectory.turns:
        messages.append({"role": "assistant", "content": turn.reply})
        messages.append({"role": "user", "content": turn.observation})
    return messages


def _standing(trajectory: Trajectory, prompt_messages: Standing) -> Sequence[Message]:
    if callable(prompt_messages):
        return prompt_messages(trajectory.task)
    if not isinstance(prompt_messages, Mapping):
        return prompt_messages
    name = trajectory.task.environment
    if name not in prompt_messages:
        raise DataError(
            f"`prompt_messages` has no entry for the environment {name!r} (it has {sorted(prompt_messages)}); add its "
            "`standing_messages()`."
        )
    return prompt_messages[name]


def _ask(history: list[Message], request: str, merge: bool) -> list[Message]:
    if not merge:
        return [*history, {"role": "user", "content": request}]
    *earlier, last = history
    return [*earlier, {"role": "user", "content": last["content"] + MERGE_SEPARATOR + request}]


def _answer(targets: Sequence[str], layout: Layout) -> list[Message]:
    if layout == "list":
        return [{"role": "assistant", "content": LIST_SEPARATOR.join(targets)}]
    messages: list[Message] = []
    for target in targets:
        if messages:
            messages.append({"role": "user", "content": NEXT_ACTION})
        messages.append({"role": "assistant", "content": target})
    return messages
