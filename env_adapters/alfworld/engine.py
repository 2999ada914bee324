"""One running game: load a file, read the first observation, act. Engines are reused, because each costs memory."""

import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from env_adapters.alfworld.gamefile import REMEDY, read_game
from env_adapters.alfworld.textworld_copy import copy_of_textworld
from env_adapters.errors import EnvDataError

NOTHING_HAPPENS = "Nothing happens."  # the engine's answer to every command that it does not accept
_ARRIVAL = re.compile(r"\AYou arrive at loc [^.]*\. ")

_free: "list[Engine]" = []
_free_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the engine says after a command.

    Attributes:
        observation: the engine's words.
        commands: every command it would accept next, sorted.
        won: whether the goal holds.
        accepted: whether the command was one of those; `True` for the first observation.
    """

    observation: str
    commands: tuple[str, ...]
    won: bool
    accepted: bool = True


class Engine:
    """Plays one game after another. Not for two threads at a time; different engines may run at once.

    Attributes:
        walkthrough: commands that win the loaded game; empty where its file has none.
    """

    def __init__(self) -> None:
        from textworld import EnvInfos

        self._env: Any = copy_of_textworld().pddl.PddlEnv(EnvInfos(won=True, admissible_commands=True))
        self.walkthrough: list[str] = []
        self._turn = Turn("", (), won=False)

    def load(self, path: Path) -> Turn:
        """Load a game file and start it.

        Raises:
            EnvDataError: the file is missing, damaged, or of another version of ALFWorld.
        """
        game = read_game(path)
        try:
            self._env.load(game)
            self._name_entities()
            state = self._env.reset()
        except (Exception, SystemExit) as error:  # the translator exits on text it cannot read
            raise EnvDataError(
                f"The engine cannot load the game file {str(path)!r}: {type(error).__name__}: {error}. {REMEDY}"
            ) from error
        self.walkthrough = game["walkthrough"]
        # The welcome line is dropped and the rest set on lines of its own, as AgentGym's server does.
        self._turn = _turn(state, "\n".join(state.feedback.split("\n\n")[1:]))
        return self._turn

    def step(self, command: str) -> Turn:
        """Execute a command; one that is not accepted changes nothing."""
        if command.strip() not in self._turn.commands:
            # What the stock engine does too, but only after working everything out anew.
            return replace(self._turn, observation=NOTHING_HAPPENS, accepted=False)
        state, _, _ = self._env.step(command)
        self._turn = _turn(state, _ARRIVAL.sub("", state.feedback))
        return self._turn

    def name_of(self, entity: str) -> str:
        """What the engine calls an object or receptacle, by its id in the PDDL problem."""
        return str(self._env._entity_infos[entity.lower()].name)

    def _name_entities(self) -> None:
        """Give everything its name in the texts, such as `drawer 2`, as the stock `AlfredDemangler` wrapper does."""
        from alfworld.agents.utils.misc import Demangler

        names = Demangler(game_infos=self._env._entity_infos, shuffle=False)
        for entity in self._env._entity_infos.values():
            entity.name = names.demangle_alfred_name(entity.id)


def borrow() -> Engine:
    """An engine nobody uses: one that was given back, or else a new one."""
    with _free_lock:
        if _free:
            return _free.pop()
    return Engine()


def give_back(engine: Engine) -> None:
    """Keep an engine for the next borrower. A loaded shared library cannot be unloaded, so none is thrown away."""
    with _free_lock:
        _free.append(engine)


def _turn(state: Any, observation: str) -> Turn:
    return Turn(observation, tuple(state["admissible_commands"]), bool(state["won"]))
