"""The ScienceWorld adapter."""

import threading
from collections.abc import Sequence

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError, did_you_mean
from env_adapters.protocols import Action, ReActText
from env_adapters.scienceworld.jvm import GOLD_HEAP_MB, Simulator, check_packages, find_java
from env_adapters.scienceworld.splits import PoolEntry, draw_split, find_entry

SIMPLIFICATIONS = (
    "easy",
    "noElectricalAction",
    "openContainers",
    "openDoors",
    "selfWateringFlowerPots",
    "teleportAction",
)
# What the simulator answers to text it cannot read, and to a reply that is no choice when it asked for a number.
NO_EFFECT = ("No known action matches that input", "Unknown action.")
# The paper's prompt (Appendix C.3), word for word: results compare only under the same one.
INSTRUCTION = (
    "You are an agent for science world. Every round I will give you an observation, you have to respond an action "
    "based on the observation to finish the given task. Here are the actions you may take: ["
    '{"action": "open/close OBJ", "description": "open/close a container"}, '
    '{"action": "de/activate OBJ", "description": "activate/deactivate a device"}, '
    '{"action": "connect OBJ to OBJ", "description": "connect electrical components"}, '
    '{"action": "disconnect OBJ", "description": "disconnect electrical components"}, '
    '{"action": "use OBJ [on OBJ]", "description": "use a device/item"}, '
    '{"action": "look around", "description": "describe the current room"}, '
    '{"action": "look at OBJ", "description": "describe an object in detail"}, '
    '{"action": "look in OBJ", "description": "describe a container\'s contents"}, '
    '{"action": "read OBJ", "description": "read a note or book"}, '
    '{"action": "move OBJ to OBJ", "description": "move an object to a container"}, '
    '{"action": "pick up OBJ", "description": "move an object to the inventory"}, '
    '{"action": "put down OBJ", "description": "drop an inventory item"}, '
    '{"action": "pour OBJ into OBJ", "description": "pour a liquid into a container"}, '
    '{"action": "dunk OBJ into OBJ", "description": "dunk a container into a liquid"}, '
    '{"action": "mix OBJ", "description": "chemically mix a container"}, '
    '{"action": "go to LOC", "description": "move to a new location"}, '
    '{"action": "eat OBJ", "description": "eat a food"}, '
    '{"action": "flush OBJ", "description": "flush a toilet"}, '
    '{"action": "focus on OBJ", "description": "signal intent on a task object"}, '
    '{"action": "wait", "description": "take no action for 10 iterations"}, '
    '{"action": "wait1", "description": "take no action for 1 iteration"}, '
    '{"action":"examine OBJ","description":"provides a description of the objects present on or in a receptacle."}, '
    '{"action": "task", "description": "describe current task"}, '
    '{"action": "inventory", "description": "list your inventory"}] '
    "Your response should use the following format: Thought: your thoughts. Action: your next action"
)


class ScienceWorldEnv(TextEnv):
    """Elementary-school science experiments in a simulated house (Wang et al., 2022), as the paper plays them.

    The first observation is the task followed by the first look around. The score is the simulator's, times 100:
    0 to 100, or -100 after a mistake that cannot be undone (focusing on the wrong object). An episode ends in success
    at 100, in failure below 0, and also when the simulator says the task is over. Invalid are the actions that the
    simulator cannot read.

    When an action fits several objects, the simulator answers with a numbered list, and the next action has to be a
    number from it, such as `0`; any other reply cancels the choice, is not executed itself, and counts as invalid.

    A task id fixes the whole episode: the same actions get the same observations on every machine, whatever was played
    before. The seed of `reset` only draws a task of the training split where no task id is given.

    Every environment object has a Java process of its own (the simulator's state is shared inside a process). It is
    started by the first `reset`, kept until `close` or `kill`, and replaced by the next `reset` if it dies.

    Args:
        simplifications: comma-separated names from [`SIMPLIFICATIONS`] (`"easy"` stands for all that suit the task);
            empty for the benchmark as it is.

    Raises:
        EnvAdapterError: a simplification has an unknown name.
    """

    name = "scienceworld"
    protocol = ReActText()
    instruction = INSTRUCTION
    acknowledgement = "OK. I'll follow your instructions and try my best to solve the task."
    score_range = (-100.0, 100.0)
    splits = ("train", "test", "all")
    max_turns = 20
    max_turns_eval = 30

    def __init__(self, simplifications: str = "") -> None:
        self.simplifications = _check_simplifications(simplifications)
        self._lock = threading.Lock()  # of `_simulator` and `_closed`, which `kill` changes from another thread
        self._simulator: Simulator | None = None
        self._score = 0.0

    @classmethod
    def tasks(cls, split: str) -> Sequence[Task]:
        """Tasks of `"train"` (2,120), `"test"` (200) or `"all"` (4,639) by running id; starts nothing.

        The family is the simulator's name of the task type, such as `"boil"`.

        Raises:
            UnknownSplitError: there is no such split.
        """
        cls.check_split(split)
        return [Task(cls.name, entry.task_id, entry.task_type, split) for entry in draw_split(split)]

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] unless `scienceworld`, `py4j` and Java (>= 8) are installed."""
        check_packages()
        find_java()

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] unless the id reads `sciworld_17` or `17` and is in the pool."""
        find_entry(task_id)

    @property
    def java_pid(self) -> int | None:
        """Process id of the simulator, or `None` while there is none."""
        simulator = self._simulator
        return simulator.process.pid if simulator is not None and simulator.alive else None

    def admissible_actions(self) -> list[str]:
        """Every action that would be accepted now: hundreds to thousands, in up to a second."""
        return self._need_simulator().valid_actions()

    def close(self) -> None:
        """End the Java process and the environment. May be called again, and from any thread."""
        with self._lock:
            super().close()
            simulator, self._simulator = self._simulator, None
        if simulator is not None:
            simulator.stop()

    def kill(self) -> None:
        """What `close` does: the process ends at once even while a `step` waits for it, which then raises."""
        self.close()

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        if task_id is None:
            drawn = draw_split("train")
            entry = drawn[int(self.np_random.integers(len(drawn)))]
        else:
            entry = find_entry(task_id)
        self._score = 0.0
        _check_solvable(entry, self.simplifications)
        simulator = self._start()
        simulator.load(entry.task_type, entry.variation, self.simplifications)
        observation, _, _ = simulator.step("look around")
        return f"{simulator.description()}\n{observation}"

    def _act(self, action: Action) -> Outcome:
        try:
            observation, score, completed = self._need_simulator().step(action.text)
        except EnvAdapterError:
            self._playing = False  # the state of the world is lost
            raise
        self._score = float(round(100 * score))
        success = self._score >= 100
        return Outcome(
            observation,
            score=self._score,
            success=success,
            done=success or completed or self._score < 0,
            invalid=any(text in observation for text in NO_EFFECT),
        )

    def _current_score(self) -> float:
        return self._score

    def _start(self) -> Simulator:
        """The running simulator, started anew if there is none or it died."""
        self.check_requirements()  # asks `java` for its version the first time, so not under the lock
        with self._lock:
            if self._closed:
                raise EpisodeStateError("The 'scienceworld' environment was closed while it was to start a task.")
            if self._simulator is not None and self._simulator.alive:
                return self._simulator
            dead, self._simulator = self._simulator, Simulator()
            simulator = self._simulator
        if dead is not None:
            dead.stop()
        # Outside the lock, so that `kill` gets through when the process hangs at its start.
        try:
            simulator.connect()
        except BaseException:
            simulator.stop()
            raise
        return simulator

    def _need_simulator(self) -> Simulator:
        simulator = self._simulator
        if simulator is None or simulator.scienceworld is None:
            state = "was closed" if self._closed else "has no task loaded; call `reset` first"
            raise EpisodeStateError(f"The 'scienceworld' environment {state}.")
        return simulator


def gold_actions(task_id: str, simplifications: str = "") -> list[str]:
    """The simulator's own solution of a task: actions that lead from the first observation to a score of 100.

    Starts a Java process for this one answer, which takes several seconds and up to 600 MB of memory. The path is not
    the shortest, and for some task types longer than the paper's turn limits. Its end may hold actions that come after
    the success.

    Args:
        task_id: `"sciworld_17"` or `"17"`.
        simplifications: as for [`ScienceWorldEnv`].

    Raises:
        UnknownTaskError: no task has that id.
        MissingDependencyError: a package or Java is missing.
        EnvAdapterError: a simplification is unknown or does not suit the task, or the simulator failed.
    """
    entry = find_entry(task_id)
    _check_solvable(entry, _check_simplifications(simplifications))
    simulator = Simulator(GOLD_HEAP_MB)
    try:
        simulator.connect()
        simulator.load(entry.task_type, entry.variation, simplifications, gold=True)
        return simulator.gold_actions()
    finally:
        simulator.stop()


def _check_simplifications(simplifications: str) -> str:
    for given in filter(None, simplifications.split(",")):
        if given not in SIMPLIFICATIONS:
            raise EnvAdapterError(
                f"`simplifications` is {simplifications!r}, but {given!r} is none of {list(SIMPLIFICATIONS)} (several "
                f"are joined by commas, without spaces).{did_you_mean(given, SIMPLIFICATIONS)}"
            )
    return simplifications


def _check_solvable(entry: PoolEntry, simplifications: str) -> None:
    electrical = entry.task_type.startswith(("power-component", "test-conductivity"))
    if electrical and "noElectricalAction" in simplifications:
        raise EnvAdapterError(
            f"`simplifications` is {simplifications!r}, but {entry.task_id!r} ({entry.task_type}) cannot be solved "
            "without electrical actions; leave 'noElectricalAction' out."
        )
