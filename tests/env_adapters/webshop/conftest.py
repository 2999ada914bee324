"""Fixtures of the WebShop tests: the generated shop, a data folder in WebShop's format, the oracle's files."""

import json
import os
from pathlib import Path

import pytest

from env_adapters.webshop.files import ATTRIBUTES, PRODUCTS, ROOT_VARIABLE
from env_adapters.webshop.shop import open_shop
from env_adapters.webshop.synthetic import generate_files


@pytest.fixture(autouse=True)
def _no_data_folder(monkeypatch, tmp_path):
    """A machine without a data folder, whatever this one has."""
    monkeypatch.setenv(ROOT_VARIABLE, str(tmp_path / "no-such-folder"))


@pytest.fixture(scope="session")
def shop():
    return open_shop("synthetic")


@pytest.fixture(scope="session")
def write_folder():
    """Writes a product file and an attribute file into a folder, and returns the folder."""

    def write(folder: Path, rows: object, annotations: object) -> Path:
        for name, content in ((PRODUCTS, rows), (ATTRIBUTES, annotations)):
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def folder(tmp_path_factory, write_folder):
    """The generated catalogue as a data folder."""
    return write_folder(tmp_path_factory.mktemp("webshop"), *generate_files())


@pytest.fixture(scope="session")
def oracle():
    """Folder with recordings of the original and its product files; `COPE_TRL_ORACLE_DATA` names the one above."""
    root = os.environ.get("COPE_TRL_ORACLE_DATA")
    if not root:
        pytest.skip("set COPE_TRL_ORACLE_DATA to the folder that holds webshop/")
    return Path(root) / "webshop"


@pytest.fixture(scope="session")
def recorded(oracle):
    return json.loads((oracle / "reference_selfmade.json").read_text(encoding="utf-8"))
