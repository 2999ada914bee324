"""Data folders: what is wrong with them, nouns of titles, and the command that makes them."""

import importlib.machinery
import json
import logging
import sys
import types
from pathlib import Path

import pytest

from env_adapters.errors import EnvDataError
from env_adapters.webshop import WebShopEnv, make_data
from env_adapters.webshop.files import ATTRIBUTES, DEFAULT_ROOT, NOUNS_BY_WORDS, PRODUCTS, ROOT_VARIABLE, data_root
from env_adapters.webshop.nouns import guess_nouns
from env_adapters.webshop.shop import open_shop
from env_adapters.webshop.synthetic import generate_files

MAKE = "make-data webshop --source FOLDER"


@pytest.fixture
def files():
    return generate_files()


@pytest.fixture
def no_spacy(monkeypatch):
    monkeypatch.setitem(sys.modules, "spacy", None)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "spacy" else find_spec(name))


@pytest.fixture
def fake_spacy(monkeypatch):
    """A tagger by which long words are names and middling ones nouns, and which has one model."""

    def tag(word):
        return "PROPN" if len(word) > 6 else "NOUN" if len(word) > 4 else "ADP"

    class Tagger:
        meta = {"version": "3.8.0"}  # noqa: RUF012

        def pipe(self, titles):
            for title in titles:
                words = title.split()
                yield [types.SimpleNamespace(text=word, pos_=tag(word)) for word in words]

    def load(model):
        if model != "en_core_web_sm":
            raise OSError(f"[E050] Can't find model {model!r}.")
        return Tagger()

    module = types.ModuleType("spacy")
    module.load = load
    module.__spec__ = importlib.machinery.ModuleSpec("spacy", None)
    monkeypatch.setitem(sys.modules, "spacy", module)


# ------------------------------------------------------------------------------------------------------- the folder


def test_where_the_folder_is(monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, "/somewhere")
    assert data_root() == Path("/somewhere")
    assert data_root("/else") == Path("/else")
    monkeypatch.delenv(ROOT_VARIABLE)
    assert data_root() == Path(DEFAULT_ROOT).expanduser() == Path.home() / ".cache/cope_trl/webshop"


@pytest.mark.parametrize("name", [PRODUCTS, ATTRIBUTES])
def test_a_missing_file(tmp_path, write_folder, files, name):
    write_folder(tmp_path, *files)
    (tmp_path / name).unlink()
    with pytest.raises(EnvDataError, match=rf"holds no file '{name}'.*{MAKE}.*data=\"synthetic\"") as caught:
        WebShopEnv.tasks("train", root=tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", [PRODUCTS, ATTRIBUTES, "nouns_sm38.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "other kind", "binary", "deep"])
def test_a_damaged_file(tmp_path, write_folder, files, name, damage):
    write_folder(tmp_path, *files)
    (tmp_path / "nouns_sm38.json").write_text("{}")
    path = tmp_path / name
    good = path.read_bytes()
    bad = {"cut": good[:-1], "empty": b"", "other kind": b"3", "binary": b"\xff\xfe\x00", "deep": b"[" * 200_000}
    path.write_bytes(bad[damage])
    with pytest.raises(EnvDataError, match=MAKE) as caught:
        open_shop(root=tmp_path)
    assert name in str(caught.value)
    path.write_bytes(good)
    assert len(open_shop(root=tmp_path).goals) == 1475  # a failure is not kept


def test_files_that_do_not_belong_together(tmp_path, write_folder, files):
    write_folder(tmp_path, files[0], {"B0OTHER": {"attributes": []}})
    with pytest.raises(EnvDataError, match=f"give no goal.*{MAKE}"):
        open_shop(root=tmp_path)


def test_folders_are_opened_once(tmp_path, write_folder, files, monkeypatch):
    write_folder(tmp_path, *files)
    shop = open_shop(root=tmp_path)
    monkeypatch.chdir(tmp_path)
    assert open_shop(root=".") is open_shop("real", tmp_path / ".." / tmp_path.name) is shop


# ------------------------------------------------------------------------------------------------------------- nouns


def test_nouns_of_the_folder(tmp_path, write_folder, files, caplog):
    write_folder(tmp_path, *files)
    asin = files[0][0]["asin"]
    for name, word in ((NOUNS_BY_WORDS, "worst"), ("nouns_lg30.json", "older"), ("nouns_sm38.json", "best")):
        (tmp_path / name).write_text(json.dumps({asin: [word]}))
    shop = open_shop(root=tmp_path)
    assert shop.nouns[asin] == ["best"]
    other = files[0][1]
    assert shop.nouns[other["asin"]] == guess_nouns(other["name"])
    assert not caplog.records


def test_guessed_nouns_are_said_once(tmp_path, write_folder, files, caplog):
    write_folder(tmp_path, *files)
    for _ in range(3):
        open_shop(root=tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "guessed by a word list" in record.getMessage()
    assert str(tmp_path) in record.getMessage()


@pytest.mark.parametrize("content", ['{"B1": "word"}', '{"B1": [3]}'])
def test_broken_nouns(tmp_path, write_folder, files, content):
    write_folder(tmp_path, *files)
    (tmp_path / "nouns_sm38.json").write_text(content)
    with pytest.raises(EnvDataError, match=f"nouns_sm38.json.*list of words.*'B1'.*{MAKE}"):
        open_shop(root=tmp_path)


# --------------------------------------------------------------------------------------------------------- make-data


def make(source: Path, output: Path, *more: str) -> None:
    make_data.main(["--source", str(source), "--root", str(output), *more])


def test_make_data(tmp_path, write_folder, files, fake_spacy, capsys, caplog):
    (source := tmp_path / "source").mkdir()
    write_folder(source, *files)
    make(source, tmp_path / "new" / "folder")
    output = tmp_path / "new" / "folder"
    assert sorted(path.name for path in output.iterdir()) == sorted([PRODUCTS, ATTRIBUTES, "nouns_sm38.json"])
    made, original = open_shop(root=output), open_shop(root=source)
    assert [goal.text for goal in made.goals] == [goal.text for goal in original.goals]
    assert list(made.products.values()) == list(original.products.values())
    nouns = json.loads((output / "nouns_sm38.json").read_text())
    for row in files[0]:
        assert nouns[row["asin"]] == [word.lower() for word in row["name"].split() if len(word) > 4]
    assert "360 products" in capsys.readouterr().out
    row = json.loads((output / PRODUCTS).read_text())[0]
    assert "images" not in row


def test_make_data_without_spacy(tmp_path, write_folder, files, no_spacy, caplog, monkeypatch):
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "default"))
    make_data.main(["--source", str(write_folder(tmp_path, *files))])
    nouns = json.loads((tmp_path / "default" / NOUNS_BY_WORDS).read_text())
    assert nouns == {row["asin"]: guess_nouns(row["name"]) for row in files[0]}
    assert "spaCy is not installed" in caplog.text
    assert "python -m spacy download en_core_web_sm" in caplog.text


def test_make_data_with_an_unknown_model(tmp_path, write_folder, files, fake_spacy, caplog):
    make(write_folder(tmp_path, *files), tmp_path / "out", "--spacy_model", "en_core_web_trf")
    assert (tmp_path / "out" / NOUNS_BY_WORDS).exists()
    assert "no model 'en_core_web_trf'" in caplog.text


def test_make_data_in_place_leaves_the_files(tmp_path, write_folder, files, fake_spacy):
    write_folder(tmp_path, *files)
    before = {name: (tmp_path / name).read_bytes() for name in (PRODUCTS, ATTRIBUTES)}
    make(tmp_path, tmp_path)
    assert before == {name: (tmp_path / name).read_bytes() for name in before}
    assert (tmp_path / "nouns_sm38.json").exists()


def test_make_data_in_place_adds_what_is_missing(tmp_path, write_folder, files, fake_spacy):
    write_folder(tmp_path, *files)
    (tmp_path / ATTRIBUTES).rename(tmp_path / "items_ins_v2.json")
    before = (tmp_path / PRODUCTS).read_bytes()
    make(tmp_path, tmp_path)
    assert (tmp_path / PRODUCTS).read_bytes() == before
    assert json.loads((tmp_path / ATTRIBUTES).read_text()) == files[1]


def test_make_data_where_nothing_can_be_written(tmp_path, write_folder, files, no_spacy):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvDataError, match="cannot be written.*`--root`"):
        make(write_folder(tmp_path, *files), tmp_path / "file" / "folder")


def test_the_first_thousand_of_the_whole_files(tmp_path, files, no_spacy, monkeypatch):
    rows = [{**files[0][i % 360], "asin": f"B{i:09}", "name": "long " * 50} for i in range(1_100)]
    (tmp_path / "items_ins_v2.json").write_text(json.dumps({row["asin"]: {"attributes": ["x"]} for row in rows}))
    # Whatever follows the first thousand is not even read.
    listed = " ,\n".join(map(json.dumps, rows))
    (tmp_path / "items_shuffle.json").write_text(f"[ {listed} , damaged")
    monkeypatch.setattr(make_data, "_CHUNK", 1_000)  # pieces shorter than a row
    make(tmp_path, tmp_path / "out")
    assert [row["asin"] for row in json.loads((tmp_path / "out" / PRODUCTS).read_text())] == [
        row["asin"] for row in rows[:1_000]
    ]
    assert len(json.loads((tmp_path / "out" / ATTRIBUTES).read_text())) == 1_000


@pytest.mark.parametrize(
    ("products", "message"),
    [
        (None, "holds neither 'items_shuffle_1000.json' nor 'items_shuffle.json'"),
        ("{}", "does not begin with"),
        ("[", "cannot be read as a JSON list"),
        ('[{"asin": "B1"', "cannot be read as a JSON list"),
        ('[{"asin": "B1"}]', "Row 0 of the product file"),
        ("[3]", "Row 0 of the product file"),
    ],
)
def test_make_data_from_bad_files(tmp_path, products, message, no_spacy):
    if products is not None:
        (tmp_path / PRODUCTS).write_text(products)
    (tmp_path / ATTRIBUTES).write_text("{}")
    with pytest.raises(EnvDataError, match=message):
        make(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_make_data_needs_a_source(capsys):
    with pytest.raises(SystemExit):
        make_data.main([])
    assert "cope-trl envs make-data webshop" in capsys.readouterr().err
