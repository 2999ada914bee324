"""`cope-trl envs make-data webshop`: from WebShop's product files to a data folder.

WebShop's setup script downloads the files; this reads them from where they are. The folder holds the first 1,000
products, what is asked of them, and the nouns of their titles, so that nobody who plays needs a tagger.
"""

import argparse
import importlib.util
import json
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvDataError
from env_adapters.webshop.files import ATTRIBUTES, NOUNS_BY_WORDS, PRODUCTS, data_root, read_json
from env_adapters.webshop.nouns import guess_nouns
from env_adapters.webshop.products import load_products

PRODUCT_COUNT = 1_000
# What the shop reads of a product; the other half of upstream's file is left out.
KEYS = (
    "asin",
    "name",
    "full_description",
    "small_description",
    "pricing",
    "customization_options",
    "category",
    "query",
    "product_category",
)
# Names of the whole files, used where the small ones are not there.
WHOLE = {PRODUCTS: "items_shuffle.json", ATTRIBUTES: "items_ins_v2.json"}
NOUN_TAGS = ("NOUN", "PROPN")
_CHUNK = 1 << 20
_LONGEST_ENTRY = 1 << 25  # characters; a longer one is damage, not to be read to the end of the file

logger = logging.getLogger(__name__)


def main(argv: list[str]) -> None:
    """Write the data folder of WebShop.

    Args:
        argv: command-line arguments, without the command.

    Raises:
        EnvDataError: a product file is missing, cut off, or of another kind.
    """
    parser = argparse.ArgumentParser(prog="cope-trl envs make-data webshop", description=__doc__)
    parser.add_argument(
        "--source",
        type=Path,
        required=True,
        help=f"folder with WebShop's product files: {PRODUCTS} and {ATTRIBUTES}, or the whole ones, "
        f"{' and '.join(WHOLE.values())}",
    )
    parser.add_argument(
        "--root", type=Path, help="data folder to write; $WEBSHOP_DATA or ~/.cache/cope_trl/webshop by default"
    )
    parser.add_argument("--spacy_model", default="en_core_web_sm", help="installed spaCy model that tags the titles")
    args = parser.parse_args(argv)
    output = data_root(args.root)
    sources = {name: _find(args.source, name) for name in WHOLE}
    rows = list(_first(sources[PRODUCTS], PRODUCT_COUNT))
    annotations = read_json(sources[ATTRIBUTES], dict)
    # Also the check that these are products at all.
    titles = {product.asin: product.title for product in load_products(rows, annotations, random.Random())}
    nouns_name, nouns = _nouns(titles, args.spacy_model)
    contents: dict[str, Any] = {
        PRODUCTS: [{key: row.get(key) for key in KEYS} for row in rows],
        ATTRIBUTES: {asin: annotations[asin] for asin in titles if asin in annotations},
        nouns_name: nouns,
    }
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            if name not in sources or sources[name].resolve() != (output / name).resolve():
                _write(output / name, content)
    except OSError as error:
        raise EnvDataError(
            f"The data folder {str(output)!r} cannot be written ({error}); name another by `--root`."
        ) from error
    print(f"{output}: {len(titles)} products. Play them: WEBSHOP_DATA={output}")


def _find(source: Path, name: str) -> Path:
    """The small file, else the whole one."""
    for candidate in (name, WHOLE[name]):
        if (source / candidate).is_file():
            return source / candidate
    raise EnvDataError(
        f"`--source` is {str(source)!r}, which holds neither {name!r} nor {WHOLE[name]!r}. Name the folder that "
        "WebShop's setup script downloads its product files to (`data` in its repository)."
    )


def _first(path: Path, count: int) -> Iterator[Any]:
    """The first entries of a JSON array, read piece by piece: the whole product file takes several GB."""
    decoder = json.JSONDecoder()
    text = ""
    try:
        with path.open(encoding="utf-8") as file:
            if file.read(1) != "[":
                raise ValueError("it does not begin with '['")
            for _ in range(count):
                while True:
                    text = text.lstrip(" \t\r\n,")
                    if text.startswith("]"):
                        return
                    try:
                        entry, end = decoder.raw_decode(text)
                        break
                    except ValueError:  # damaged, or it goes on in the next piece
                        more = file.read(max(_CHUNK, len(text)))
                        if not more or len(text) > _LONGEST_ENTRY:
                            raise
                        text += more
                text = text[end:]
                yield entry
    except (OSError, ValueError, RecursionError) as error:
        raise EnvDataError(
            f"The file {str(path)!r} cannot be read as a JSON list ({error}); it may have been cut off. Download it "
            "again with WebShop's setup script."
        ) from error


def _nouns(titles: Mapping[str, str], model: str) -> tuple[str, dict[str, list[str]]]:
    """Name and content of the nouns file: tagged by spaCy where it is installed, else by a word list."""
    if importlib.util.find_spec("spacy") is not None:
        import spacy

        try:
            tagger = spacy.load(model)
        except OSError as error:
            logger.warning("spaCy has no model %r (%s); nouns of the titles are guessed by a word list.", model, error)
        else:
            logger.info("Tagging %d titles with spaCy's %s %s.", len(titles), model, tagger.meta["version"])
            major, minor = tagger.meta["version"].split(".")[:2]
            name = f"nouns_{model.rpartition('_')[2]}{major}{minor}.json"
            return name, dict(zip(titles, _tag(tagger.pipe(titles.values())), strict=True))
    else:
        logger.warning(
            "spaCy is not installed; nouns of the titles are guessed by a word list. For upstream's tags: "
            "`pip install spacy`, `python -m spacy download %s`, and make the data again.",
            model,
        )
    return NOUNS_BY_WORDS, {asin: guess_nouns(title) for asin, title in titles.items()}


def _tag(documents: Iterable[Any]) -> Iterator[list[str]]:
    for document in documents:
        yield [token.text.lower() for token in document if token.pos_ in NOUN_TAGS]


def _write(path: Path, content: Any) -> None:
    # In one move, so that a folder is never found half written.
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    os.replace(partial, path)
