"""Reading a game file, with one clear error for each way it can be wrong."""

import json
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvDataError

# Written `put {o} in/on {r}` before ALFWorld 0.4. A policy trained on one wording fails on the other.
PUT_COMMAND = "move {o} to {r}"
_TEXTS = ("pddl_domain", "pddl_problem", "grammar")


def read_game(path: Path) -> dict[str, Any]:
    """The content of a game file.

    A game file is code: the engine evaluates expressions of its grammar. Load files from sources you trust only.

    Args:
        path: a `game.tw-pddl` file.

    Returns:
        A dict with the texts `pddl_domain`, `pddl_problem` and `grammar`, and the list of commands `walkthrough`,
        which is empty where the file has none.

    Raises:
        EnvDataError: the file is missing, cut off, of another kind, or of another version of ALFWorld.
    """
    try:
        game = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EnvDataError(f"The game file {str(path)!r} cannot be read: {error}. {REMEDY}") from error
    except ValueError as error:
        raise EnvDataError(f"The game file {str(path)!r} is damaged ({error}). {REMEDY}") from error
    missing = [name for name in _TEXTS if not isinstance(game, dict) or not isinstance(game.get(name), str)]
    if missing:
        raise EnvDataError(f"The game file {str(path)!r} is damaged: it lacks {', '.join(missing)}. {REMEDY}")
    if PUT_COMMAND not in game["grammar"]:
        raise EnvDataError(
            f"The game file {str(path)!r} is of another ALFWorld version: its grammar has no command "
            f"{PUT_COMMAND!r}, which games since 0.4 have (older ones say 'put {{o}} in/on {{r}}'). Get the current "
            "games with `alfworld-download -f`."
        )
    walkthrough = game.get("walkthrough") or []
    if not (isinstance(walkthrough, list) and all(isinstance(command, str) for command in walkthrough)):
        raise EnvDataError(f"The game file {str(path)!r} is damaged: its walkthrough is no list of commands. {REMEDY}")
    return {**{name: game[name] for name in _TEXTS}, "walkthrough": walkthrough}


REMEDY = (
    "Get it again with `alfworld-download -f`, or make games with `cope-trl envs make-data alfworld` in a new folder."
)
