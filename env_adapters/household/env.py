"""The household as a text environment."""

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EpisodeStateError
from env_adapters.household.catalog import listing
from env_adapters.household.tasks import TASKS, build, check_size, families, parse_task_id, task_id_of
from env_adapters.household.world import World
from env_adapters.protocols import Action, ReActText


class HouseholdEnv(TextEnv):
    """An embedded household: go, open, take, put, clean, heat, cool and use a lamp, by text commands.

    Needs no dependency. Six task families: `pick`, `look`, `clean`, `heat`, `cool`, `pick2`. The episode ends in
    success only; a limit on turns is the caller's. `score` is the share of subgoals reached so far.

    Args:
        size: which tasks `reset` draws from when it is given no `task_id` (a task id carries its own size):
            `"standard"` (four rooms, 6 to 15 necessary steps), `"small"` (one room, 3 to 7) or `"tiny"` (one room,
            everything in sight, only `pick` and `look`, 2 to 4).
    """

    name = "household"
    protocol = ReActText()
    instruction = (
        "You do chores in a house. Commands: go to X, open X, close X, take O from X, put O in/on X, use lamp 1, "
        "clean O with X, heat O with X, cool O with X, look, inventory. Reply 'Thought: ... Action: ...' or only "
        "'Action: ...', with one command."
    )
    acknowledgement = "OK."

    def __init__(self, size: str = "standard") -> None:
        check_size(size)
        self.size = size
        self._world: World | None = None

    @classmethod
    def tasks(cls, split: str, size: str = "standard") -> list[Task]:
        """All tasks of a split, in a fixed order; no household is generated.

        Args:
            split: `"train"` (4,200 tasks of each size) or `"test"` (200).
            size: `"standard"`, `"small"` or `"tiny"`.
        """
        cls.check_split(split)
        check_size(size)
        kinds = families(size)
        return [
            Task(cls.name, task_id_of(size, split, index), kinds[index % len(kinds)], split)
            for index in range(TASKS[split])
        ]

    @property
    def world(self) -> World:
        """State of the current episode, for the expert and for tests. Raises before the first `reset`."""
        if self._world is None:
            raise EpisodeStateError("The 'household' environment has no world yet; call `reset` first.")
        return self._world

    def admissible_actions(self) -> list[str]:
        """Every command that has an effect now."""
        return self.world.admissible()

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        parse_task_id(task_id)

    def expert_action(self) -> str | None:
        """The next action of an expert that knows only what the agent has seen; `None` after success."""
        from env_adapters.household.expert import next_command  # imports this module

        return None if self.world.done else next_command(self.world, explore=True)

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        if task_id is None:
            task_id = task_id_of(self.size, "train", int(self.np_random.integers(TASKS["train"])))
        self._world = World(build(task_id))
        return _first_observation(self._world)

    def _act(self, action: Action) -> Outcome:
        world = self.world
        answer = world.act(" ".join(action.text.lower().split()))
        if answer is None:
            return Outcome(self.protocol.no_action_observation, world.score, invalid=True)
        if world.done:
            return Outcome(f"{answer} The task is done.", 1.0, success=True, done=True)
        return Outcome(answer, world.score)

    def _current_score(self) -> float:
        return self.world.score


def _first_observation(world: World) -> str:
    layout = world.layout
    if len(layout.rooms) > 1:
        rooms = ", ".join(f"{room} ({', '.join(places)})" for room, places in layout.rooms)
        sentences = [f"The house has: {rooms}.", f"You are in the {world.room}."]
    elif layout.in_sight:
        places = ", ".join(f"{p} ({', '.join(world.things_at(p)) or 'nothing'})" for p in world.places_in[world.room])
        sentences = [f"You see: {places}."]
    else:
        sentences = [f"You are in the {world.room}. You see: {', '.join(world.places_in[world.room])}."]
    if world.place is not None:
        sentences.append(f"You are at the {world.place}.")
        if not layout.in_sight:
            sentences.append(world.describe())
    if world.held is not None:
        sentences.append(f"You carry {listing([world.held])}.")
    return " ".join([*sentences, f"Your task is to: {world.goal.sentence()}."])
