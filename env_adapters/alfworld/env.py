"""The ALFWorld adapter."""

import importlib.util
import os
import threading
from typing import Any

from env_adapters.alfworld import engine as engines
from env_adapters.alfworld.games import check_form, game_list
from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EpisodeStateError, MissingDependencyError
from env_adapters.protocols import Action, ReActText

# The paper's prompt (Appendix C.1), word for word: results compare only under the same one.
INSTRUCTION = (
    "Interact with a household to solve a task. Imagine you are an intelligent agent in a household environment and "
    "your target is to perform actions to complete the task goal. At the beginning of your interactions, you will be "
    "given the detailed description of the current environment and your goal to accomplish. For each of your turn, "
    "you will be given a list of actions which you can choose one to perform in this turn. You should choose from "
    'two actions: "THOUGHT" or "ACTION". If you choose "THOUGHT", you should first think about the current condition '
    "and plan for your future actions, and then output your action in this turn. Your output must strictly follow "
    'this format:"Thought: your thoughts. Action: your next action"; If you choose "ACTION", you should directly '
    'output the action in this turn. Your output must strictly follow this format:"Action: your next action". After '
    "your each turn, the environment will give you immediate feedback based on which you plan your next few steps. "
    'if the envrionment output "Nothing happened", that means '  # codespell:ignore
    "the previous action is invalid and you should try more options. Reminder: 1. the action must be chosen from the "
    "given available actions. Any actions except provided available actions will be regarded as illegal. 2. Think "
    "when necessary, try to act directly more in the process."
)


class AlfWorldEnv(TextEnv):
    """Household tasks in text (Shridhar et al., 2021), as the paper plays them.

    Needs the benchmark's game files, or games made with `cope-trl envs make-data alfworld`. The first observation is
    the room and the task; every observation ends with the commands that would be accepted next. Any other command is
    answered "Nothing happens." and counts as invalid. The score is 0 or 1, an episode ends in success only, and
    success is the engine's own verdict that the goal holds. A limit on turns is the caller's.

    A task id fixes the whole episode. The seed of `reset` only draws a training game where no task id is given.

    Args:
        root: the data folder; by default `$ALFWORLD_DATA`, or else `~/.cache/alfworld`.
        available_actions: whether observations list the accepted commands, as the prompt promises.
    """

    name = "alfworld"
    protocol = ReActText()
    instruction = INSTRUCTION
    acknowledgement = "OK. I'll follow your instructions and try my best to solve the task."
    max_turns = 20
    max_turns_eval = 30
    data_maker = "env_adapters.alfworld.make_data:main"

    def __init__(self, root: str | os.PathLike[str] | None = None, available_actions: bool = True) -> None:
        self.root = root
        self.available_actions = available_actions
        # Held while the engine runs, so that `close` from another thread cannot hand a running engine to another user.
        self._running = threading.Lock()
        self._engine: engines.Engine | None = None
        self._turn: engines.Turn | None = None
        self._walkthrough: list[str] = []

    @classmethod
    def tasks(cls, split: str, root: str | os.PathLike[str] | None = None) -> list[Task]:
        """Games of `"train"` (2,420) or `"test"` (200) by running id; loads none of them.

        Args:
            split: `"train"` or `"test"`.
            root: the data folder, as for the constructor.

        Raises:
            UnknownSplitError: there is no such split.
            EnvDataError: the data folder is missing, damaged, or holds other games than the paper's.
        """
        cls.check_split(split)
        return [Task(cls.name, game.task_id, game.family, split) for game in game_list(root).split(split)]

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] unless `alfworld`, `textworld` and `fast_downward` are installed."""
        for package in ("alfworld", "textworld", "fast_downward"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(
                    f"ALFWorld needs the Python package `{package}`, which is not installed: "
                    "pip install 'cope_trl[alfworld]' (building it needs gcc, g++ and make, and takes about ten "
                    "minutes the first time)"
                )

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] unless the default data folder has the game; loads nothing."""
        check_form(task_id)
        game_list().find(task_id)

    def admissible_actions(self) -> list[str]:
        """Every command the engine would accept now, sorted."""
        return list(self._need_turn().commands)

    def expert_action(self) -> str | None:
        """The next command of the game's walkthrough.

        `None` once the episode has left it, after its end, and for games that have none. A command that was not
        accepted changes nothing, and so leaves the walkthrough as it was.
        """
        return self._walkthrough[0] if self._walkthrough else None

    def close(self) -> None:
        """End the environment; its engine is kept for the next one. May be called again, and from any thread."""
        super().close()
        if self._running.acquire(blocking=False):
            try:
                engine, self._engine = self._engine, None
            finally:
                self._running.release()
            if engine is not None:
                engines.give_back(engine)
        # Else another thread is inside the engine: it keeps it, and the engine is not used again.

    def step(self, reply: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(reply)
        if not info["action"]:  # not the engine's answer, so the list is not in it yet
            observation = self._show(observation)
        return observation, reward, terminated, truncated, info

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        if task_id is not None:
            check_form(task_id)  # a wrong id is the better news than missing data
        self.check_requirements()
        games = game_list(self.root)
        if task_id is None:
            drawn = games.split("train")
            game = drawn[int(self.np_random.integers(len(drawn)))]
        else:
            game = games.find(task_id)
        self._turn, self._walkthrough = None, []
        with self._running:
            if self._closed:
                raise EpisodeStateError("The 'alfworld' environment was closed while it was to start a game.")
            if self._engine is None:
                self._engine = engines.borrow()
            self._turn = self._engine.load(game.file(games.root))
            self._walkthrough = list(self._engine.walkthrough)
        return self._show(self._turn.observation)

    def _act(self, action: Action) -> Outcome:
        with self._running:
            if self._closed or self._engine is None:
                raise EpisodeStateError("The 'alfworld' environment was closed while it was to act.")
            self._turn = turn = self._engine.step(action.text)
        if turn.accepted:
            followed = self._walkthrough[:1] == [action.text]
            self._walkthrough = self._walkthrough[1:] if followed and not turn.won else []
        return Outcome(
            self._show(turn.observation),
            score=float(turn.won),
            success=turn.won,
            done=turn.won,
            invalid=not turn.accepted,
        )

    def _need_turn(self) -> engines.Turn:
        if self._turn is None:
            raise EpisodeStateError("The 'alfworld' environment has no game loaded; call `reset` first.")
        return self._turn

    def _show(self, observation: str) -> str:
        if not self.available_actions:
            return observation
        return f"{observation}\nAVAILABLE ACTIONS: {','.join(self._need_turn().commands)}"
