"""The texts of the synthetic planning turn (paper Appendix C.6), in one place.

The wording is the paper's, to the letter: also with one action it reads "the next 1 actions".
"""

from cope_trl.errors import ConfigError
from cope_trl.types import Layout

PLAN_AHEAD_LIST = (
    "Plan ahead: list the next {k} actions you will take to make progress on the task, "
    "starting with the action you take right now, one action per line."
)
PLAN_AHEAD_TURNS = (
    "Plan ahead: give the next {k} actions you will take to make progress on the task, one action per reply, "
    "starting with the action you take right now. Reply with the action only."
)
NEXT_ACTION = "Next action?"
"""The fixed user turn between two targets of layout `"turns"`."""

LIST_SEPARATOR = "\n"
"""What stands between two targets of layout `"list"`."""

MERGE_SEPARATOR = "\n\n"
"""What stands between an observation and the plan-ahead text where a template refuses two user turns in a row."""


def plan_ahead(k: int, layout: Layout) -> str:
    """Return the text of the planning turn.

    Args:
        k: number of actions in *this* target: K+1, fewer at the end of an episode.
        layout: `"list"` (one action a line) or `"turns"` (one action a reply).

    Raises:
        ConfigError: `k` is below 1 or `layout` is unknown.

    Source: paper Appendix C.6.
    """
    if k < 1:
        raise ConfigError(f"`k` is {k}, but a plan holds at least one action.")
    if layout == "list":
        return PLAN_AHEAD_LIST.format(k=k)
    if layout == "turns":
        return PLAN_AHEAD_TURNS.format(k=k)
    raise ConfigError(f"`layout` is {layout!r}; use 'list' or 'turns'.")
