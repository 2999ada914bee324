"""When an episode that somebody else rolled out counts as a success (Y of paper Eq. 5)."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from cope_trl.errors import ConfigError

logger = logging.getLogger(__name__)

SuccessFn = Callable[..., bool]


class SuccessRule:
    """Decides success by the first of: a function of the user's, the environment's own word, the total reward.

    Args:
        success_fn: called with the keyword arguments `row` (the dataset row, with the extra fields of the rollout),
            `completion` (messages, or a text), `environment` (the instance that was played, or `None`) and `rewards`
            (`dict[str, float | None]`, one value a reward function); returns a `bool`.
        threshold: smallest total reward that counts as a success where nothing better is known.
    """

    def __init__(self, success_fn: SuccessFn | None = None, threshold: float = 1.0) -> None:
        if success_fn is not None and not callable(success_fn):
            raise ConfigError(
                f"`success_fn` is {success_fn!r}, which cannot be called; pass a function of (row, completion, "
                "environment, rewards) that returns a bool."
            )
        self.success_fn = success_fn
        self.threshold = threshold
        self._said: set[str] = set()

    def __call__(
        self,
        row: Mapping[str, Any],
        completion: Any,
        environment: Any,
        rewards: Mapping[str, float | None],
        total: float,
    ) -> bool:
        """Whether the episode is a success.

        Args:
            row, completion, environment, rewards: as `success_fn` gets them.
            total: weighted sum of the rewards; NaN where no function gave any.

        Raises:
            ConfigError: the rule in force gave something else than a bool.
        """
        if self.success_fn is not None:
            self._say("`success_fn`")
            value = self.success_fn(row=row, completion=completion, environment=environment, rewards=rewards)
            return self._checked(value, "`success_fn` returned")
        if environment is not None and hasattr(environment, "success"):
            name = type(environment).__name__
            self._say(f"the attribute `success` of {name}")
            return self._checked(environment.success, f"`{name}.success` is")
        self._say(f"total reward >= {self.threshold:g} (`success_threshold`)")
        return not math.isnan(total) and total >= self.threshold

    def _checked(self, value: Any, said: str) -> bool:
        # NumPy's and torch's booleans are booleans to their users.
        plain = value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value
        if not isinstance(plain, bool):
            raise ConfigError(
                f"{said} {value!r}, a {type(value).__name__}; success must be True or False. Compare it with what "
                "counts as a success, for example `rewards['accuracy'] == 1.0`."
            )
        return plain

    def _say(self, rule: str) -> None:
        if rule not in self._said:
            self._said.add(rule)
            logger.info("An episode is a success by %s.", rule)
