"""A scripted expert for the household: the next good command from any state, so that noisy play can be continued."""

from collections.abc import Sequence

from env_adapters.household.catalog import HOMES, LAMP_PLACES, LAMP_ROOMS, TOOLS, kind_of
from env_adapters.household.env import HouseholdEnv
from env_adapters.household.layout import LAMP
from env_adapters.household.world import World


class HouseholdExpert:
    """Plays an environment's current episode.

    The expert keeps no memory of its own: it may be asked in any state, whoever played before.

    Args:
        env: the environment; `reset` it first.
        explore: whether to use only what the agent has seen so far, searching place by place for the object. The
            default knows the house, which gives the shortest demonstrations; one that explores can be imitated by an
            agent that does not know it.
    """

    def __init__(self, env: HouseholdEnv, *, explore: bool = False) -> None:
        self._env = env
        self._explore = explore

    def next_action(self) -> str:
        """The next command towards the goal, always one that has an effect. Not to be called after success."""
        return next_command(self._env.world, explore=self._explore)


def expert_actions(env: HouseholdEnv, *, explore: bool = False) -> list[str]:
    """All commands from the current state of an episode to its success; the environment is left as it is.

    Args:
        env: the environment; `reset` it first.
        explore: as in [`HouseholdExpert`].

    Returns:
        The commands, without `Action:`; empty after success.
    """
    world = env.world.copy()
    commands = []
    while not world.done:
        commands.append(next_command(world, explore=explore))
        world.act(commands[-1])
    return commands


def next_command(world: World, *, explore: bool = False) -> str:
    """The expert's command in this state of the world."""
    if world.held is None:
        return _fetch(world, explore)
    if world.held in world.wanted:
        return _deliver(world, world.held, explore)
    return _drop(world, world.held)


def _deliver(world: World, name: str, explore: bool) -> str:
    """Bring a wanted object, which is in hand, to where it goes next."""
    goal = world.goal
    if goal.family == "look":
        if explore and goal.place not in world.seen:
            return _search(world, LAMP_ROOMS, [place for place in world.room_of if kind_of(place) in LAMP_PLACES])
        return _reach(world, goal.place, inside=False) or f"use {LAMP}"
    if not world.ready(name):
        kind = TOOLS[goal.family][0]
        tools = [place for place in world.room_of if kind_of(place) == kind]
        tool = min(tools, key=lambda place: (place != world.place, world.room_of[place] != world.room))
        return _reach(world, tool, inside=False) or f"{goal.family} {name} with {tool}"
    return _reach(world, goal.place) or f"put {name} in/on {goal.place}"


def _drop(world: World, name: str) -> str:
    """Free the hand of an object nobody asked for, as near as possible."""
    place = world.place
    if place is None:
        place = min(world.places_in[world.room], key=lambda place: not world.accessible(place))
    return _reach(world, place) or f"put {name} in/on {place}"


def _fetch(world: World, explore: bool) -> str:
    """Go and take the nearest object that is still needed, or search for one."""
    goal = world.goal

    def needed(name: str) -> bool:
        return goal.family == "look" or not (world.ready(name) and world.where[name] == goal.place)

    def distance(name: str) -> tuple[bool, ...]:
        place = world.where[name]
        away = (world.room_of[place] != world.room, place != world.place, not world.accessible(place))
        return (not world.ready(name), *away)

    known = [name for name in world.wanted if needed(name) and (not explore or world.where[name] in world.seen)]
    if not known:
        return _search(world, HOMES[goal.kind], list(world.room_of))
    name = min(known, key=distance)
    return _reach(world, world.where[name]) or f"take {name} from {world.where[name]}"


def _search(world: World, likely: Sequence[str], places: Sequence[str]) -> str:
    """Look into the next place not seen yet: the one at hand, then likely rooms, the current one before others."""

    def order(place: str) -> tuple[bool, ...]:
        room = world.room_of[place]
        return (place != world.place, room not in likely, room != world.room)

    place = min((place for place in places if place not in world.seen), key=order)
    return _reach(world, place) or "look"


def _reach(world: World, place: str, *, inside: bool = True) -> str | None:
    """The next command on the way to a place, or `None` when there (and, with `inside`, when it is open)."""
    if world.room_of[place] != world.room:
        return f"go to {world.room_of[place]}"
    if place != world.place:
        return f"go to {place}"
    return f"open {place}" if inside and not world.accessible(place) else None
