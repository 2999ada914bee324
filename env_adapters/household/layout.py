"""A household at rest: its rooms, its objects, and the goal set in it. Frozen, so that a task is a value."""

from dataclasses import dataclass

from env_adapters.household.catalog import TOOLS, preposition, with_article

LAMP = "lamp 1"


@dataclass(frozen=True, slots=True)
class Goal:
    """What must hold for success.

    Attributes:
        family: one of `catalog.FAMILIES`.
        kind: kind of object wanted.
        place: where it must end up; for `look`, where the lamp stands.
        count: how many objects of that kind.
    """

    family: str
    kind: str
    place: str
    count: int = 1

    @property
    def mark(self) -> str | None:
        """State the object must be in (`"clean"`, `"hot"`, `"cool"`), or `None`."""
        return TOOLS[self.family][1] if self.family in TOOLS else None

    def sentence(self) -> str:
        """The goal in words."""
        if self.family == "look":
            return f"look at {with_article(self.kind)} under the {LAMP}"
        words = f"{self.mark} {self.kind}" if self.mark else self.kind
        what = f"two {words}s" if self.count == 2 else with_article(words)
        return f"put {what} {preposition(self.place)} the {self.place}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A household and a goal in it, before anything happened; equal layouts are the same task.

    Attributes:
        rooms: name and places of every room, in order.
        objects: every object and the place it lies at (`None`: in the agent's hand), sorted by name.
        lamp: place of the lamp, or `None`.
        room, place: where the agent stands; `place` is `None` away from all places.
        goal: what to achieve.
        in_sight: whether everything that is not shut away is seen from the start.
    """

    rooms: tuple[tuple[str, tuple[str, ...]], ...]
    objects: tuple[tuple[str, str | None], ...]
    lamp: str | None
    room: str
    place: str | None
    goal: Goal
    in_sight: bool = False

    def content(self) -> str:
        """World and goal as text, without where the agent starts."""
        return repr((self.rooms, self.objects, self.lamp, self.goal))
