import ast
import importlib
from pathlib import Path

import pytest

import cope_trl


@pytest.mark.parametrize("name", cope_trl.__all__)
def test_every_public_name_resolves(name):
    value = getattr(cope_trl, name)
    if name in cope_trl._HOME:
        assert value is getattr(importlib.import_module(cope_trl._HOME[name]), name)
    assert name in dir(cope_trl)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="has no attribute 'CoPETrainr'"):
        _ = cope_trl.CoPETrainr


def test_the_lists_of_names_agree():
    tree = ast.parse(Path(cope_trl.__file__).read_text())
    typed = {
        alias.name: node.module
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        for alias in node.names
    }
    assert typed == cope_trl._HOME
    assert set(cope_trl.__all__) == {"__version__", *cope_trl._HOME}
