"""The data folder: where it is, what is in it, and one clear error for whatever is wrong with it."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvDataError

ROOT_VARIABLE = "WEBSHOP_DATA"
DEFAULT_ROOT = "~/.cache/cope_trl/webshop"
# The names of WebShop's own small files: its `data` folder can be played from as it is.
PRODUCTS = "items_shuffle_1000.json"
ATTRIBUTES = "items_ins_v2_1000.json"
NOUNS_PATTERN = "nouns_*.json"
# Tokens of a word list instead of a tagger: only for want of any other file.
NOUNS_BY_WORDS = "nouns_words.json"

MAKE_IT = "Make it from WebShop's own product files: `cope-trl envs make-data webshop --source FOLDER`."
_OTHERWISE = (
    f"{MAKE_IT} Or name another folder with `root` or ${ROOT_VARIABLE}, or play the generated catalogue, which needs "
    'no files: `data="synthetic"`.'
)


def data_root(root: str | os.PathLike[str] | None = None) -> Path:
    """The data folder: `root`, else what the environment variable `WEBSHOP_DATA` names, else one under `~/.cache`."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT).expanduser()


def need_file(root: Path, name: str) -> Path:
    """Path of a file of the data folder. Raises [`EnvDataError`] when the folder or the file does not exist."""
    if not root.is_dir():
        raise EnvDataError(f"The data folder of 'webshop' is {str(root)!r}, which does not exist. {_OTHERWISE}")
    path = root / name
    if not path.is_file():
        raise EnvDataError(f"The data folder of 'webshop', {str(root)!r}, holds no file {name!r}. {_OTHERWISE}")
    return path


def read_json(path: Path, kind: type) -> Any:
    """The content of a JSON file, a `list` or a `dict` as `kind` says.

    Raises:
        EnvDataError: the file cannot be read, is cut off, or holds something else.
    """
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise EnvDataError(
            f"The file {str(path)!r} cannot be read as JSON ({error}); it may have been cut off. {MAKE_IT}"
        ) from error
    if not isinstance(content, kind):
        raise EnvDataError(
            f"The file {str(path)!r} must hold a JSON {kind.__name__}, but holds a {type(content).__name__}. {MAKE_IT}"
        )
    return content


def read_nouns(root: Path) -> Mapping[str, list[str]] | None:
    """Tagged nouns of the titles by product id, or `None` where the folder holds none.

    Of several files the one with the last name counts, so that of the newest tagger.
    """
    paths = sorted(root.glob(NOUNS_PATTERN), key=lambda path: (path.name != NOUNS_BY_WORDS, path.name))
    if not paths:
        return None
    nouns: dict[str, list[str]] = read_json(paths[-1], dict)
    for asin, words in nouns.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise EnvDataError(
                f"The file {str(paths[-1])!r} must hold a list of words for each product, but {asin!r} has "
                f"{str(words)[:80]!r}. {MAKE_IT}"
            )
    return nouns
