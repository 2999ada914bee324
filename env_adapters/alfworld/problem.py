"""A generated world as the texts of a game file: the PDDL problem, the task in words, the walkthrough."""

import random
from collections.abc import Callable, Iterator
from typing import Any

from env_adapters.alfworld.scenes import (
    LAMPS,
    TREATMENTS,
    World,
    can_be,
    can_hold,
    constants,
    receptacle_types,
    type_of,
)

# The engine splits ids at `_bar_` to make names of them, and PDDL takes no signs or dots.
_MANGLED = {"|": "_bar_", "+": "_plus_", "-": "_minus_", ".": "_dot_", ",": "_comma_"}
_ABILITIES = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}
# Types that the domain's conditions name, so they must exist in every problem.
_NAMED_RECEPTACLES = ("SinkBasin", "Microwave", "Fridge")
_NAMED_OBJECTS = ("Knife", "ButterKnife")


def mangle(name: str) -> str:
    """An id as PDDL spells it."""
    return "".join(_MANGLED.get(letter, letter) for letter in name)


def goals() -> Any:
    """`alfworld.gen.goal_library.gdict`: goals in PDDL and in words, by task type."""
    import alfworld.gen.goal_library

    return alfworld.gen.goal_library.gdict


def pddl_problem(world: World, trial: str) -> str:
    """The PDDL problem of a world, in the layout of the benchmark's own files."""
    goal = goals()[world.task_type]["pddl"].format(
        obj=world.target, recep=world.receptacle, toggle=world.lamp, mrecep=""
    )
    lines = [f"(define (problem plan_{trial})", "(:domain alfred)", "(:objects", "agent1 - agent"]
    lines += [f"        {line}" for line in _declarations(world)]
    lines += ["        )", "(:init"]
    lines += [f"        ({line})" for line in _facts(world)]
    lines += ["        )"]
    return "\n".join(lines) + goal.replace("#", "-")  # the goal text closes the problem's parenthesis


def _declarations(world: World) -> Iterator[str]:
    # Like the benchmark's files, every type is declared, and every type of object is an object as well.
    receptacles = sorted(receptacle_types() | set(_NAMED_RECEPTACLES))
    objects = sorted((set(constants().OBJECTS_SET) - set(receptacles)) | set(_NAMED_OBJECTS))
    yield from (f"{kind} - object" for kind in objects)
    yield from (f"{kind}Type - otype" for kind in objects)
    yield from (f"{kind}Type - rtype" for kind in receptacles)
    yield from (f"{mangle(name)} - object" for name in sorted(world.placed))
    yield from (f"{mangle(name)} - receptacle" for name in sorted(world.scene.receptacles))
    yield from (
        f"{mangle(place)} - location" for place in sorted({*world.scene.receptacles.values(), world.scene.start})
    )


def _facts(world: World) -> Iterator[str]:
    places = world.scene.receptacles
    for name in sorted(places):
        yield f"receptacleType {mangle(name)} {type_of(name)}Type"
        yield f"receptacleAtLocation {mangle(name)} {mangle(places[name])}"
        if type_of(name) in constants().OPENABLE_CLASS_SET:
            yield f"openable {mangle(name)}"
    for name, where in sorted(world.placed.items()):
        kind = type_of(name)
        yield f"objectType {mangle(name)} {kind}Type"
        yield f"inReceptacle {mangle(name)} {mangle(where)}"
        yield f"objectAtLocation {mangle(name)} {mangle(places[where])}"
        yield f"{'toggleable' if kind in LAMPS else 'pickupable'} {mangle(name)}"
        if kind in constants().MOVABLE_RECEPTACLES_SET:
            yield f"isReceptacleObject {mangle(name)}"
        yield from (f"{fact} {mangle(name)}" for group, fact in _ABILITIES.items() if can_be(group, kind))
    kinds = sorted({type_of(name) for name in world.placed})
    for holder in sorted({type_of(name) for name in places}):
        yield from (f"canContain {holder}Type {kind}Type" for kind in kinds if can_hold(holder, kind))
    yield f"atLocation agent1 {mangle(world.scene.start)}"


def task_in_words(world: World, rng: random.Random) -> str:
    """One of the benchmark's sentences for the goal, such as `put a clean mug in coffeemachine`."""
    template = rng.choice(goals()[world.task_type]["templates"])
    words = template.format(
        obj=world.target.lower(), recep=world.receptacle.lower(), toggle=world.lamp.lower(), mrecep=""
    )
    return str(words)


def walkthrough(world: World, name_of: Callable[[str], str]) -> list[str]:
    """Commands that reach the goal, for someone who knows where everything is.

    Args:
        world: the world.
        name_of: what the engine calls an object or receptacle, by its mangled id.
    """
    name = {key: name_of(mangle(key)) for key in (*world.placed, *world.scene.receptacles)}
    opened: set[str] = set()
    commands: list[str] = []

    def go_to(place: str) -> None:
        if not commands or here != place:
            commands.append(f"go to {name[place]}")
        if type_of(place) in constants().OPENABLE_CLASS_SET and place not in opened:
            opened.add(place)
            commands.append(f"open {name[place]}")

    def first(kind: str) -> str:
        return next(place for place in sorted(world.scene.receptacles) if type_of(place) == kind)

    here = ""
    for thing in world.of_type(world.target)[: 2 if world.family == "pick2" else 1]:
        go_to(world.placed[thing])
        here = world.placed[thing]
        commands.append(f"take {name[thing]} from {name[here]}")
        if world.family in TREATMENTS:
            tool = first(TREATMENTS[world.family][0])
            commands += [f"go to {name[tool]}", f"{world.family} {name[thing]} with {name[tool]}"]
            here = tool
        if world.lamp:
            lamp = world.of_type(world.lamp)[0]
            go_to(world.placed[lamp])
            commands.append(f"use {name[lamp]}")
        else:
            goal = first(world.receptacle)
            go_to(goal)
            here = goal
            commands.append(f"move {name[thing]} to {name[goal]}")
    return commands
