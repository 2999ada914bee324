"""One household world: its state, what each command does to it, and how near the goal is.

Each verb decides for itself whether it has an effect; `admissible` lists the same conditions, and a test compares the
two over every command there is.
"""

from collections.abc import Callable
from copy import copy

from env_adapters.household.catalog import ACCEPTS, OPENABLE, OPPOSITE, TOOLS, kind_of, listing, preposition
from env_adapters.household.layout import LAMP, Layout


class World:
    """A household that changes under commands.

    Args:
        layout: the state to begin in.

    Attributes:
        room, place: where the agent stands.
        held: the object in its hand, or `None`.
        where: object → place; the held object is missing.
        contents: place → objects, in the order they were put there.
        opened: openable places that are open now.
        marks: object → states it is in.
        lit: whether the lamp is on.
        seen: places whose contents the agent has seen.
        best: most subgoals that ever held at once.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.goal = layout.goal
        self.room = layout.room
        self.place = layout.place
        self.room_of = {place: room for room, places in layout.rooms for place in places}
        self.places_in = dict(layout.rooms)
        self.contents: dict[str, list[str]] = {place: [] for place in self.room_of}
        self.where: dict[str, str] = {}
        self.held: str | None = None
        for name, place in layout.objects:
            if place is None:
                self.held = name
            else:
                self.where[name] = place
                self.contents[place].append(name)
        self.wanted = [name for name, _ in layout.objects if kind_of(name) == self.goal.kind]
        self.opened: set[str] = set()
        self.marks: dict[str, frozenset[str]] = {}
        self.lit = False
        self.seen: set[str] = set()
        if layout.in_sight:
            self.seen.update(place for place in self.room_of if self.accessible(place))
        self.best = self._begun = self._reached()

    def copy(self) -> "World":
        """An independent world in the same state."""
        other = copy(self)
        other.contents = {place: list(names) for place, names in self.contents.items()}
        other.where, other.marks = dict(self.where), dict(self.marks)
        other.opened, other.seen = set(self.opened), set(self.seen)
        return other

    # ---------------------------------------------------------------- progress

    @property
    def subgoals(self) -> int:
        """Number of subgoals: two an object (taken, then brought or lit), and one more for a state asked for."""
        return 2 * self.goal.count + (self.goal.mark is not None)

    @property
    def done(self) -> bool:
        """Whether the goal was reached."""
        return self.best == self.subgoals

    @property
    def score(self) -> float:
        """Share of the subgoals still open at the start that were ever reached."""
        return (self.best - self._begun) / (self.subgoals - self._begun)

    def ready(self, name: str) -> bool:
        """Whether an object is in the state that the goal asks for."""
        return self.goal.mark is None or self.goal.mark in self.marks.get(name, ())

    def _reached(self) -> int:
        holding = self.held is not None and self.held in self.wanted
        if self.goal.family == "look":
            return holding + (holding and self.lit and self.place == self.goal.place)
        ready = [name for name in self.wanted if self.ready(name)]
        placed = min(self.goal.count, sum(self.where.get(name) == self.goal.place for name in ready))
        marked = self.goal.mark is not None and bool(ready)
        return 2 * placed + (holding and placed < self.goal.count) + marked

    # ---------------------------------------------------------------- what the agent sees

    def accessible(self, place: str) -> bool:
        """Whether one can reach into a place: it is open, or nothing closes it."""
        return kind_of(place) not in OPENABLE or place in self.opened

    def things_at(self, place: str) -> list[str]:
        """Objects at a place, and the lamp where it stands."""
        return [*self.contents[place], *([LAMP] if place == self.layout.lamp else [])]

    def describe(self) -> str:
        """What is seen from where the agent stands; places whose contents are told count as seen."""
        if self.place is None:
            return f"You are in the {self.room}. You see {listing(self.places_in[self.room])}."
        if not self.accessible(self.place):
            return f"The {self.place} is closed."
        self.seen.add(self.place)
        where = preposition(self.place).capitalize()
        return f"{where} the {self.place}, you see {listing(self.things_at(self.place))}."

    # ---------------------------------------------------------------- commands

    def act(self, command: str) -> str | None:
        """Execute a command and return what is seen then, or `None` when it has no effect."""
        verb, _, rest = command.partition(" ")
        handler = _HANDLERS.get(verb)
        answer = None if handler is None else handler(self, verb, rest)
        if answer is not None:
            self.best = max(self.best, self._reached())
        return answer

    def admissible(self) -> list[str]:
        """Every command that has an effect now, in a fixed order."""
        here, held = self.place, self.held
        commands = [f"go to {room}" for room in self.places_in if room != self.room]
        commands += [f"go to {place}" for place in self.places_in[self.room] if place != here]
        if here is not None:
            kind = kind_of(here)
            if kind in OPENABLE:
                commands.append(f"{'close' if here in self.opened else 'open'} {here}")
            if held is None and self.accessible(here):
                commands += [f"take {name} from {here}" for name in self.contents[here]]
            elif held is not None and self.accessible(here):
                commands.append(f"put {held} in/on {here}")
            if here == self.layout.lamp:
                commands.append(f"use {LAMP}")
            for verb, (tool, mark) in TOOLS.items():
                if held is not None and kind == tool and self._can_change(held, verb, mark):
                    commands.append(f"{verb} {held} with {here}")
        return [*commands, "look", "inventory"]

    def _can_change(self, name: str, verb: str, mark: str) -> bool:
        return kind_of(name) in ACCEPTS[verb] and mark not in self.marks.get(name, ())

    def _go(self, verb: str, rest: str) -> str | None:
        to, _, target = rest.partition(" ")
        if to != "to":
            return None
        if target in self.places_in and target != self.room:
            self.room, self.place = target, None
        elif target != self.place and self.room_of.get(target) == self.room:
            self.place = target
        else:
            return None
        return self.describe()

    def _open(self, verb: str, place: str) -> str | None:
        if place != self.place or self.accessible(place):
            return None
        self.opened.add(place)
        return f"You open the {place}. {self.describe()}"

    def _close(self, verb: str, place: str) -> str | None:
        if place != self.place or place not in self.opened:
            return None
        self.opened.discard(place)
        return f"You close the {place}."

    def _take(self, verb: str, rest: str) -> str | None:
        name, _, place = rest.partition(" from ")
        if self.held or place != self.place or self.where.get(name) != place or not self.accessible(place):
            return None
        del self.where[name]
        self.contents[place].remove(name)
        self.held = name
        return f"You take the {name} from the {place}."

    def _put(self, verb: str, rest: str) -> str | None:
        name, place = self.held, self.place
        if name is None or place is None or not self.accessible(place):
            return None
        if rest not in (f"{name} in/on {place}", f"{name} in {place}", f"{name} on {place}"):
            return None
        self.where[name] = place
        self.contents[place].append(name)
        self.held = None
        return f"You put the {name} {preposition(place)} the {place}."

    def _use(self, verb: str, name: str) -> str | None:
        if name != LAMP or self.place is None or self.place != self.layout.lamp:
            return None
        self.lit = not self.lit
        return f"You turn {'on' if self.lit else 'off'} the {LAMP}."

    def _change(self, verb: str, rest: str) -> str | None:
        name, _, place = rest.partition(" with ")
        tool, mark = TOOLS[verb]
        if (
            name != self.held
            or place != self.place
            or kind_of(place) != tool
            or not self._can_change(name, verb, mark)
        ):
            return None
        self.marks[name] = self.marks.get(name, frozenset()) - {OPPOSITE.get(mark)} | {
            mark
        }  # what is heated is no longer cool
        return f"You {verb} the {name} with the {place}."

    def _look(self, verb: str, rest: str) -> str | None:
        return None if rest else self.describe()

    def _inventory(self, verb: str, rest: str) -> str | None:
        if rest:
            return None
        states = f" ({', '.join(sorted(self.marks[self.held]))})" if self.held and self.marks.get(self.held) else ""
        return f"You carry {listing([self.held] if self.held else [])}{states}."


_HANDLERS: dict[str, Callable[[World, str, str], str | None]] = {
    "go": World._go,
    "open": World._open,
    "close": World._close,
    "take": World._take,
    "put": World._put,
    "use": World._use,
    **dict.fromkeys(TOOLS, World._change),
    "look": World._look,
    "inventory": World._inventory,
}
