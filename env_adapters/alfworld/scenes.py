"""Rooms and worlds for generated games: floor plans, objects, goals and affordances that the `alfworld` wheel ships.

`alfworld` is imported inside the functions: it is an optional dependency.
"""

import functools
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env_adapters.alfworld.games import FAMILIES

# AI2-THOR's numbering of its rooms.
ROOMS = {
    "kitchen": range(1, 31),
    "living room": range(201, 231),
    "bedroom": range(301, 331),
    "bathroom": range(401, 431),
}
FAMILY_ROOMS = {
    "look": ("living room", "bedroom"),
    "heat": ("kitchen",),
    "cool": ("kitchen",),
}
LAMPS = ("DeskLamp", "FloorLamp")
# Where an object is treated, and the group of objects (in `alfworld.gen.constants`) that can be.
TREATMENTS = {
    "clean": ("SinkBasin", "Cleanable"),
    "heat": ("Microwave", "Heatable"),
    "cool": ("Fridge", "Coolable"),
}
OBJECTS = (12, 26)  # number of objects in a room, the smallest and the largest


@dataclass(frozen=True)
class Scene:
    """One floor plan.

    Attributes:
        number: AI2-THOR's number of the floor plan.
        receptacles: id of each receptacle -> the location from which it is reached; no two share one.
        start: where the agent begins, which is nobody's location.
        objects: types of the objects that can be taken and put there.
        lamps: types of the lamps there.
    """

    number: int
    receptacles: dict[str, str]
    start: str
    objects: tuple[str, ...]
    lamps: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """What one game begins with and asks for.

    Attributes:
        scene: the room.
        task_type: first part of the folder's name, a key of [`FAMILIES`].
        target: type of the object to find.
        receptacle: type of the receptacle to put it in; empty for the family `look`.
        lamp: type of the lamp to look at it under; empty for every other family.
        placed: id of each object -> id of the receptacle it is in or on.
    """

    scene: Scene
    task_type: str
    target: str
    receptacle: str = ""
    lamp: str = ""
    placed: dict[str, str] = field(default_factory=dict)

    @property
    def family(self) -> str:
        return FAMILIES[self.task_type]

    @property
    def folder(self) -> str:
        """Name of the game's folder, as the benchmark builds it."""
        return f"{self.task_type}-{self.target}-None-{self.lamp or self.receptacle}-{self.scene.number}"

    def of_type(self, kind: str) -> list[str]:
        """Ids of the objects of a type, in a fixed order."""
        return sorted(name for name in self.placed if type_of(name) == kind)


def constants() -> Any:
    """`alfworld.gen.constants`: object types and what can be done with them."""
    import alfworld.gen.constants

    return alfworld.gen.constants


def type_of(name: str) -> str:
    """Type of an object or receptacle id: `Mug|+01.00|...` is a Mug, `Sink|...|SinkBasin` a SinkBasin."""
    parts = name.split("|")
    return parts[4] if len(parts) > 4 else parts[0]


def can_hold(receptacle_type: str, object_type: str) -> bool:
    """Whether objects of a type are ever put in receptacles of a type."""
    return object_type in constants().VAL_RECEPTACLE_OBJECTS.get(receptacle_type, ())


def can_be(group: str, object_type: str) -> bool:
    """Whether objects of a type belong to a group such as `"Heatable"`."""
    return object_type in constants().VAL_ACTION_OBJECTS[group]


def receptacle_types() -> set[str]:
    """Types of receptacle that stay where they are."""
    known = constants()
    return set(known.RECEPTACLES) - set(known.MOVABLE_RECEPTACLES_SET)


@functools.cache
def load_scene(number: int) -> Scene | None:
    """The floor plan of a number, or `None` where the wheel has none."""
    import alfworld.gen

    layouts = Path(alfworld.gen.__file__).parent / "layouts"
    openable = layouts / f"FloorPlan{number}-openable.json"
    if not openable.exists():
        return None
    places = {
        name: tuple(place)
        for name, place in json.loads(openable.read_text(encoding="utf-8")).items()
        if type_of(name) in receptacle_types()
    }
    found = set(json.loads((layouts / f"FloorPlan{number}-objects.json").read_text(encoding="utf-8")))
    *locations, start = _locations([places[name] for name in sorted(places)])
    return Scene(
        number=number,
        receptacles=dict(zip(sorted(places), locations, strict=True)),
        start=start,
        objects=tuple(sorted(kind for kind in found if any(can_hold(where, kind) for where in receptacle_types()))),
        lamps=tuple(sorted(found & set(LAMPS))),
    )


def _locations(places: list[tuple[float, ...]]) -> list[str]:
    """One location for each place `(x, z, rotation, horizon)`, in grid units of 0.25 m, and one more to start at.

    Where two places coincide, the second turns its head: with two receptacles at one location, going to the second
    is refused by the engine (https://github.com/alfworld/alfworld/issues/131).
    """
    used: list[str] = []
    for x, z, rotation, horizon in [*places, places[0]]:
        turns = [(int(rotation) // 90 + turn) % 4 for turn in range(4)]
        tilts = [int(horizon), *(tilt for tilt in range(0, 75, 15) if tilt != int(horizon))]
        ways = (f"loc|{round(x * 4)}|{round(z * 4)}|{turn}|{tilt}" for tilt in tilts for turn in turns)
        used.append(next(way for way in ways if way not in used))
    return used


def draw_world(family: str, rng: random.Random) -> World:
    """A random world of a family, whose goal does not hold yet and can be reached."""
    numbers = [number for room in FAMILY_ROOMS.get(family, tuple(ROOMS)) for number in ROOMS[room]]
    while True:  # most draws can host the family, and some scene always can
        scene = load_scene(rng.choice(numbers))
        world = None if scene is None else _draw_goal(family, scene, rng)
        if world is not None and _place(world, rng):
            return world


def _draw_goal(family: str, scene: Scene, rng: random.Random) -> World | None:
    task_type = next(name for name, short in FAMILIES.items() if short == family)
    present = {type_of(name) for name in scene.receptacles}
    treated_in, group = TREATMENTS.get(family, ("", ""))
    targets = [kind for kind in scene.objects if not group or can_be(group, kind)]
    if not targets or (treated_in and treated_in not in present):
        return None
    target = rng.choice([kind for kind in targets if kind not in LAMPS])
    if family == "look":
        return World(scene, task_type, target, lamp=rng.choice(scene.lamps)) if scene.lamps else None
    goals = sorted(kind for kind in present if can_hold(kind, target) and kind != treated_in)
    return World(scene, task_type, target, receptacle=rng.choice(goals)) if goals else None


def _place(world: World, rng: random.Random) -> bool:
    """Put objects into the room. Returns whether there was a place for those the goal needs."""
    treated_in = TREATMENTS.get(world.family, ("", ""))[0]
    for _ in range(2 if world.family == "pick2" else 1):
        if not _put(world, world.target, {world.receptacle, treated_in}, rng):
            return False
    if world.lamp:
        surfaces = [n for n in sorted(world.scene.receptacles) if type_of(n) not in constants().OPENABLE_CLASS_SET]
        if not surfaces:
            return False
        world.placed[_new_name(world.lamp, rng)] = rng.choice(surfaces)
    others = [kind for kind in world.scene.objects if kind != world.target and kind not in LAMPS]
    for _ in range(rng.randint(*OBJECTS) - len(world.placed) if others else 0):
        _put(world, rng.choice(others), set(), rng)
    return True


def _put(world: World, kind: str, avoid: set[str], rng: random.Random) -> bool:
    places = [
        name
        for name in sorted(world.scene.receptacles)
        if can_hold(type_of(name), kind) and type_of(name) not in avoid
    ]
    if places:
        world.placed[_new_name(kind, rng)] = rng.choice(places)
    return bool(places)


def _new_name(kind: str, rng: random.Random) -> str:
    return "|".join([kind, *(f"{rng.uniform(-3, 3):+06.2f}" for _ in range(3))])
