"""The game list of ALFWorld and its splits: which game file a running id stands for.

The ids are AgentGym's, which the paper uses (Appendix A.3): 0 to 2419 are games of `json_2.1.1/train`, 2420 to 2619
games of `json_2.1.1/valid_train`. The download holds more games than that, so which ones they are has to be said by
somebody. A data folder says it in one of three ways, looked for in this order:

1. the manifest that `make-data` writes: a folder of generated games, numbered as listed there;
2. AgentGym's own two lists, `mappings_train.json` and `mappings_test.json`;
3. nothing: then the two folders must hold exactly the paper's numbers of games, which are numbered in sorted order.
"""

import functools
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvDataError, UnknownTaskError

ID_PREFIX = "alfworld_"
GAME_FILE = "game.tw-pddl"
DATA_FOLDER = "json_2.1.1"
# Which folder of the data a split is played from.
FOLDERS = {"train": "train", "test": "valid_train"}
MANIFEST = "cope_trl_games.json"
MANIFEST_FORMAT = 1
MAPPINGS = {"train": "mappings_train.json", "test": "mappings_test.json"}
MAPPINGS_SOURCE = "https://raw.githubusercontent.com/WooooDyy/AgentGym/main/agentenv-alfworld/configs/"

# Task type as the first part of a folder's name -> family (paper, Table 8).
FAMILIES = {
    "pick_and_place_simple": "pick",
    "look_at_obj_in_light": "look",
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
    "pick_two_obj_and_place": "pick2",
}
# Paper, Tables 7 and 8.
PAPER_COUNTS = {
    "train": {"pick": 672, "look": 196, "clean": 448, "heat": 321, "cool": 394, "pick2": 389},
    "test": {"pick": 46, "look": 19, "clean": 37, "heat": 25, "cool": 28, "pick2": 45},
}

_NUMBER = re.compile(rf"(?:{ID_PREFIX})?([0-9]{{1,9}})", re.ASCII)
_NAME = re.compile(r"([a-z_]+-[A-Za-z]+-[A-Za-z]+-[A-Za-z]+-[0-9]+)_(trial_\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Game:
    """One game: its running id, the split it is in, and the two folder names that lead to its file.

    Attributes:
        index: running id.
        split: `"train"` or `"test"`.
        folder: what the task is, such as `pick_and_place_simple-Mug-None-Desk-301`.
        trial: which of the games of that folder, such as `trial_T20190907_174127_043461`.
    """

    index: int
    split: str
    folder: str
    trial: str

    @property
    def task_id(self) -> str:
        """The id that task lists and id files use, such as `"alfworld_17"`."""
        return f"{ID_PREFIX}{self.index}"

    @property
    def family(self) -> str:
        """`"pick"`, `"look"`, `"clean"`, `"heat"`, `"cool"` or `"pick2"`."""
        return FAMILIES[self.folder.split("-", 1)[0]]

    def file(self, root: Path) -> Path:
        """The game file under a data folder."""
        return root / DATA_FOLDER / FOLDERS[self.split] / self.folder / self.trial / GAME_FILE


@dataclass(frozen=True, slots=True)
class GameList:
    """All games of one data folder, in the order of their ids; training games first."""

    root: Path
    games: tuple[Game, ...]
    by_name: Mapping[str, Game]

    def split(self, name: str) -> list[Game]:
        """The games of `"train"` or `"test"`."""
        return [game for game in self.games if game.split == name]

    def find(self, task_id: str) -> Game:
        """The game behind an id: `"alfworld_17"`, `"17"`, or a folder and a trial joined as `"<folder>_<trial>"`.

        Raises:
            UnknownTaskError: the text is no such id, or this data folder has no such game.
        """
        check_form(task_id)
        match = _NUMBER.fullmatch(task_id)
        game = self.by_name.get(task_id)
        if match is not None and int(match.group(1)) < len(self.games):
            game = self.games[int(match.group(1))]
        if game is None:
            raise UnknownTaskError(
                f"`task_id` is {task_id!r}, but the games in {str(self.root)!r} are '{ID_PREFIX}0' to "
                f"'{ID_PREFIX}{len(self.games) - 1}' (the number alone and '<folder>_<trial>' are accepted too)."
            )
        return game


def check_form(task_id: str) -> None:
    """Raise [`UnknownTaskError`] for text that can be no game's id in any data folder."""
    if _NUMBER.fullmatch(task_id) is None and _NAME.fullmatch(task_id) is None:
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but ids of 'alfworld' read '{ID_PREFIX}17', '17', or "
            "'pick_and_place_simple-Mug-None-Desk-301_trial_T20190907_174127_043461'."
        )


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The data folder: `root`, else `$ALFWORLD_DATA`, else where `alfworld-download` puts its files."""
    return Path(root or os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()


def game_list(root: str | os.PathLike[str] | None = None) -> GameList:
    """The games of a data folder; read once and again only when its lists or folders change.

    Args:
        root: the data folder; see [`data_root`].

    Raises:
        EnvDataError: the folder is missing, damaged, or holds other games than the paper's; says what was found and
            what to run.
    """
    place = data_root(root)
    watched = [place / MANIFEST, *(place / name for name in MAPPINGS.values())]
    watched += [place / DATA_FOLDER / folder for folder in FOLDERS.values()]
    return _read(place, tuple(_stamp(path) for path in watched))


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=8)
def _read(root: Path, stamps: tuple[tuple[int, int] | None, ...]) -> GameList:
    """Read the list of a data folder. `stamps` only keys the cache."""
    if not (root / DATA_FOLDER).is_dir():
        raise EnvDataError(
            f"`root` is {str(root)!r}, which holds no ALFWorld data (no folder {DATA_FOLDER!r}). Run "
            "`alfworld-download` to get the benchmark's games, or `cope-trl envs make-data alfworld` to make games "
            "offline, or point $ALFWORLD_DATA or `root` at the folder that has them."
        )
    if (root / MANIFEST).exists():
        named = _from_manifest(root / MANIFEST)
    elif any((root / name).exists() for name in MAPPINGS.values()):
        named = {split: _from_mapping(root / name) for split, name in MAPPINGS.items()}
        _check_counts(root, named, "named in AgentGym's lists there", "Fetch both lists again")
    else:
        named = {split: _from_folder(root / DATA_FOLDER / folder) for split, folder in FOLDERS.items()}
        _check_counts(root, named, "found there", "The download holds more games than the paper plays; to name its "
                      f"own, put AgentGym's lists {' and '.join(MAPPINGS.values())} (from {MAPPINGS_SOURCE}) into "
                      "that folder. If there are fewer, run `alfworld-download` first")  # fmt: skip
    games = [
        Game(index, split, folder, trial)
        for index, (split, folder, trial) in enumerate((s, *pair) for s, pairs in named.items() for pair in pairs)
    ]
    by_name = {f"{game.folder}_{game.trial}": game for game in games}
    if len(by_name) < len(games):
        raise EnvDataError(f"The lists of games in {str(root)!r} name {len(games) - len(by_name)} games twice.")
    _check_files(root, games)
    return GameList(root, tuple(games), by_name)


def _from_manifest(path: Path) -> dict[str, list[tuple[str, str]]]:
    content = _load_json(path)
    if not isinstance(content, dict) or content.get("format") != MANIFEST_FORMAT:
        raise EnvDataError(
            f"{str(path)!r} is no list of games of format {MANIFEST_FORMAT}; delete the folder and make the games "
            "again with `cope-trl envs make-data alfworld`."
        )
    return {split: _pairs(path, content.get(split), ("folder", "trial")) for split in FOLDERS}


def _from_mapping(path: Path) -> list[tuple[str, str]]:
    if not path.exists():
        raise EnvDataError(
            f"{str(path)!r} is missing beside the other list; get it from {MAPPINGS_SOURCE}{path.name}."
        )
    content = _load_json(path)
    if isinstance(content, list) and all(isinstance(row, dict) for row in content):
        content = sorted(content, key=lambda row: row.get("item_id", -1))
    return _pairs(path, content, ("task_type", "task_id"))


def _pairs(path: Path, rows: Any, keys: tuple[str, str]) -> list[tuple[str, str]]:
    try:
        pairs = [(str(row[keys[0]]), str(row[keys[1]])) for row in rows]
    except (TypeError, KeyError) as error:
        raise EnvDataError(
            f"{str(path)!r} must list games with the keys {keys[0]!r} and {keys[1]!r}, but it does not ({error!r}); "
            "get or make it again."
        ) from error
    for folder, trial in pairs:
        if _NAME.fullmatch(f"{folder}_{trial}") is None or folder.split("-", 1)[0] not in FAMILIES:
            raise EnvDataError(f"{str(path)!r} names {folder!r}, {trial!r}, which is no game of a known family.")
    return pairs


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvDataError(f"{str(path)!r} cannot be read as JSON: {error}; get or make it again.") from error


def _from_folder(folder: Path) -> list[tuple[str, str]]:
    """Playable games under one folder, sorted. Sliced objects and movable receptacles have no text game upstream."""
    return sorted(
        (path.parent.parent.name, path.parent.name)
        for path in folder.glob(f"*/*/{GAME_FILE}")
        if path.parent.parent.name.split("-", 1)[0] in FAMILIES and "Sliced" not in path.parent.parent.name
    )


def _check_counts(root: Path, named: Mapping[str, list[tuple[str, str]]], how: str, remedy: str) -> None:
    found = {split: _count(folder for folder, _ in pairs) for split, pairs in named.items()}
    if found == PAPER_COUNTS:
        return
    raise EnvDataError(
        f"`root` is {str(root)!r}, but the games {how} are not the paper's (Table 8). Found {_describe(found)}; "
        f"needed {_describe(PAPER_COUNTS)}. {remedy}."
    )


def _count(folders: Iterable[str]) -> dict[str, int]:
    counted = Counter(FAMILIES[folder.split("-", 1)[0]] for folder in folders)
    return {family: counted[family] for family in FAMILIES.values()}


def _describe(counts: Mapping[str, Mapping[str, int]]) -> str:
    return " and ".join(
        f"{sum(families.values())} {split} ({', '.join(f'{n} {family}' for family, n in families.items())})"
        for split, families in counts.items()
    )


def _check_files(root: Path, games: list[Game]) -> None:
    missing = [game for game in games if not game.file(root).is_file()]
    if missing:
        raise EnvDataError(
            f"{len(missing)} of {len(games)} games have no file in {str(root)!r}, the first is "
            f"{str(missing[0].file(root))!r}. Run `alfworld-download` again, or make the games again with `cope-trl "
            "envs make-data alfworld` in a new folder."
        )
