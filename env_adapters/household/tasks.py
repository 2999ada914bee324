"""Task ids and the households they stand for.

An id alone determines its task, on every machine: `"train-00017"` seeds the draw of one house and goal. Drawing uses
nothing but `random.Random(str).random()`, whose sequence Python guarantees across versions.

No task is in both splits, by construction: a drawn task is kept for the split that its own content falls to.
"""

import hashlib
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

from env_adapters.errors import UnknownSplitError, UnknownTaskError, did_you_mean
from env_adapters.household.catalog import (
    ACCEPTS,
    FAMILIES,
    HOMES,
    LAMP_PLACES,
    LAMP_ROOMS,
    OBJECTS,
    OPENABLE,
    ROOMS,
    TINY_OBJECTS,
    TINY_PLACES,
    TOOLS,
    kind_of,
)
from env_adapters.household.layout import Goal, Layout

T = TypeVar("T")

SIZES = ("standard", "small", "tiny")
TASKS = {"train": 4200, "test": 200}
_TINY_FAMILIES = ("pick", "look")
_TASK_ID = re.compile(r"(?:(small|tiny)-)?(train|test)-([0-9]{5})")


def families(size: str) -> tuple[str, ...]:
    """Families of a size; the task with index i belongs to the family i modulo their number."""
    return _TINY_FAMILIES if size == "tiny" else FAMILIES


def check_size(size: str) -> None:
    """Raise [`~env_adapters.errors.UnknownSplitError`] unless `size` is one of `SIZES`."""
    if size not in SIZES:
        raise UnknownSplitError(
            f"`size` is {size!r}, but 'household' has the sizes {list(SIZES)}.{did_you_mean(size, SIZES)}"
        )


def task_id_of(size: str, split: str, index: int) -> str:
    """The id of a task: `"train-00017"`, or with the size in front of it where that is not `"standard"`."""
    prefix = "" if size == "standard" else f"{size}-"
    return f"{prefix}{split}-{index:05d}"


def parse_task_id(task_id: str) -> tuple[str, str, int]:
    """Size, split and index of a task id. Raises [`~env_adapters.errors.UnknownTaskError`] for any other string."""
    match = _TASK_ID.fullmatch(task_id)
    if match is None or int(match[3]) >= TASKS[match[2]]:
        ranges = " and ".join(f"'{split}-00000' to '{split}-{count - 1:05d}'" for split, count in TASKS.items())
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but 'household' has {ranges}, each also with 'small-' or 'tiny-' in front."
        )
    return match[1] or "standard", match[2], int(match[3])


@lru_cache(maxsize=1024)
def build(task_id: str) -> Layout:
    """The household and goal of a task; the rollouts of a group share one."""
    size, split, index = parse_task_id(task_id)
    family = families(size)[index % len(families(size))]
    dice = _Dice(f"a house {size} {split} {index}")
    draw = {"standard": _draw_standard, "small": _draw_small, "tiny": _draw_tiny}[size]
    while True:
        layout = draw(dice, family)
        if layout is not None and _split_of(layout) == split:
            return layout


def _split_of(layout: Layout) -> str:
    """The one split a task may be in: a quarter of all possible tasks is kept for testing."""
    return "test" if hashlib.sha256(layout.content().encode()).digest()[0] % 4 == 0 else "train"


class _Dice:
    """Random draws that are the same in every Python version."""

    def __init__(self, seed: str) -> None:
        self._next = random.Random(seed).random

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._next() * len(options))]

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        rest = list(options)
        return [rest.pop(int(self._next() * len(rest))) for _ in range(count)]

    def chance(self, probability: float) -> bool:
        return self._next() < probability


def _draw_standard(dice: _Dice, family: str) -> Layout | None:
    """Four rooms. The agent starts in a room without the object, and `pick` and `look` end in a third place, which
    makes at least 6 necessary steps; two trips of at most 8 and 7 steps are the longest task."""
    kinds_in = {room: [*always, *dice.sample(extra, 2 + dice.chance(0.5))] for room, (always, extra) in ROOMS.items()}
    rooms = _number_places(kinds_in)
    places_in = dict(rooms)
    wanted_kind, count, others = _draw_kinds(dice, family, distractors=8)
    kinds = [wanted_kind] * (count + dice.chance(0.3))
    for kind in others:
        kinds += [kind] * (1 + dice.chance(0.25))
    objects = [(name, dice.pick(places_in[dice.pick(HOMES[kind_of(name)])])) for name in _number(kinds)]
    lamp = dice.pick([p for room in LAMP_ROOMS for p in places_in[room] if kind_of(p) in LAMP_PLACES])
    goal = _draw_goal(dice, family, wanted_kind, count, [p for places in places_in.values() for p in places], lamp)
    room = dice.pick(list(places_in))

    origins = {place for name, place in objects if kind_of(name) == wanted_kind}
    if any(place in places_in[room] for place in origins) or (goal.place in origins and family != "look"):
        return None
    goal_room = next(places for places in places_in.values() if goal.place in places)
    if family in ("pick", "look") and any(place in goal_room for place in origins):
        return None
    return Layout(rooms, tuple(objects), lamp, room, None, goal)


def _draw_small(dice: _Dice, family: str) -> Layout | None:
    """One kitchen and every family, in 3 to 7 necessary steps: at most one place has to be opened, and two objects
    lie together where the agent starts."""
    extra = dice.sample(("cabinet", "counter", "drawer", "shelf", "table"), 3)
    rooms = _number_places({"kitchen": ["fridge", "microwave", "sink", *extra]})
    places = rooms[0][1]
    wanted_kind, count, others = _draw_kinds(dice, family, distractors=4)
    origin = dice.pick(places)
    objects = [
        (name, origin if kind_of(name) == wanted_kind else dice.pick(places))
        for name in _number([wanted_kind] * count + others)
    ]
    lamp = dice.pick([place for place in places if kind_of(place) in LAMP_PLACES])
    goal = _draw_goal(dice, family, wanted_kind, count, places, lamp)

    shut = (kind_of(origin) in OPENABLE) + (kind_of(goal.place) in OPENABLE)
    if shut > (0 if family == "pick2" else 1) or (origin == goal.place and family != "look"):
        return None
    start = origin if family == "pick2" else None
    return Layout(rooms, tuple(objects), lamp, "kitchen", start, goal)


def _draw_tiny(dice: _Dice, family: str) -> Layout | None:
    """One room with everything in sight: 2 to 4 necessary steps. The agent starts away from all places, or at the
    object, or with the object in hand."""
    rooms = _number_places({"bedroom": dice.sample(TINY_PLACES, 4)})
    places = rooms[0][1]
    kinds = dice.sample(TINY_OBJECTS, 4)
    wanted = f"{kinds[0]} 1"
    located: dict[str, str | None] = {name: dice.pick(places) for name in _number(kinds)}
    lamp = dice.pick(places)
    goal = _draw_goal(dice, family, kinds[0], 1, places, lamp)
    if located[wanted] == goal.place and family != "look":
        return None
    begin = dice.pick(("away", "at", "held"))
    start = located[wanted] if begin == "at" else None
    if begin == "held":
        located[wanted] = None
    return Layout(rooms, tuple(located.items()), lamp, "bedroom", start, goal, in_sight=True)


def _draw_kinds(dice: _Dice, family: str, distractors: int) -> tuple[str, int, list[str]]:
    """The wanted kind of object, how many of it the goal asks for, and other kinds."""
    wanted = dice.pick([kind for kind in OBJECTS if kind in ACCEPTS.get(family, OBJECTS)])
    others = dice.sample([kind for kind in OBJECTS if kind != wanted], distractors)
    return wanted, 2 if family == "pick2" else 1, others


def _draw_goal(dice: _Dice, family: str, kind: str, count: int, places: Sequence[str], lamp: str) -> Goal:
    # The tool's own place is never the target: the object would be there already.
    tool = TOOLS[family][0] if family in TOOLS else None
    place = lamp if family == "look" else dice.pick([place for place in places if kind_of(place) != tool])
    return Goal(family, kind, place, count)


def _number(kinds: Sequence[str]) -> list[str]:
    """Names of objects or places: kinds in alphabetical order, numbered from 1 within each."""
    ordered = sorted(kinds)
    return [f"{kind} {i - ordered.index(kind) + 1}" for i, kind in enumerate(ordered)]


def _number_places(kinds_in: dict[str, list[str]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Rooms with the names of their places, numbered through the whole house."""
    counts: dict[str, int] = {}
    rooms = []
    for room, kinds in kinds_in.items():
        names = []
        for kind in sorted(kinds):
            counts[kind] = counts.get(kind, 0) + 1
            names.append(f"{kind} {counts[kind]}")
        rooms.append((room, tuple(names)))
    return tuple(rooms)
