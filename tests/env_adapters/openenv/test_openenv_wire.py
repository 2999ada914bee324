"""What crosses the wire comes out as it went in, and is valid JSON in valid Unicode on the way."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from env_adapters import EnvAdapterError, UnknownTaskError
from env_adapters.openenv import wire
from env_adapters.openenv.errors import RemoteEnvironmentError, as_here, spoken

# All of Python's text, lone surrogates among it, and all of its numbers.
ANY_TEXT = st.text(max_size=20) | st.text('aü"\\\x00\ud800\udfff\U0001f9ea', max_size=20)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ANY_TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)


def cross(fields):
    """What a strict encoder and a decoder on the other side make of it."""
    return json.loads(json.dumps(fields, allow_nan=False, ensure_ascii=False).encode("utf-8"))


@given(ANY_TEXT)
@example("\ud800\udfff")  # two lone surrogates, which are not one character
def test_replies(reply):
    fields = {"escaped": False, **cross(wire.pack_reply(reply))}
    assert wire.unpack_reply(**fields) == reply


@given(ANY_TEXT, st.booleans(), st.floats(-5, 5), ANY_TEXT, st.dictionaries(ANY_TEXT, VALUES, max_size=3))
def test_results(text, done, score, action, details):
    info = {**details, "success": done, "score": score, "action": action, "invalid": not done}
    fields = cross(wire.pack_result(text, False, info))
    found = wire.unpack_result(fields, 1.0, done)
    # `repr` tells apart what `==` does not (1 and 1.0) and finds nan like nan.
    assert repr((*found[:4], sorted(found[4].items()))) == repr((text, 1.0, done, False, sorted(info.items())))


def test_a_readable_form_stands_beside_the_exact_one():
    info = {"success": False, "score": 0.0, "action": "a \ud800", "invalid": False, "share": math.nan}
    fields = wire.pack_result("Hello \udfff.", False, info)
    assert (fields["text"], fields["action"], fields["details"]) == ("Hello ?.", "a ?", {"share": None})
    assert wire.unpack(fields)["text"] == "Hello \udfff."
    plain = wire.pack_result("Hello.", False, {**info, "action": "ü", "share": 1})
    assert "exact" not in plain


def test_a_cut_episode_is_no_terminated_one():
    info = {"success": False, "score": 0, "action": "", "invalid": False}
    assert wire.unpack_result(wire.pack_result("", True, info), 0.0, True)[2:4] == (False, True)


def test_numpy_becomes_python_and_nothing_else_passes():
    info = {"success": False, "score": 0.0, "action": "", "invalid": False}
    fields = wire.pack_result("", False, {**info, "a": np.int64(3), "b": np.arange(2), "c": (1, 2)})
    assert fields["details"] == {"a": 3, "b": [0, 1], "c": [1, 2]}
    with pytest.raises(TypeError, match="`info` holds a set, .* which has no form in JSON"):
        wire.pack_result("", False, {**info, "seen": {1}})


def test_errors_keep_their_class_where_it_is_known_here():
    said = spoken(UnknownTaskError("`task_id` is '\ud800'."))
    said.encode("utf-8")
    error = as_here("http://a:1", said)
    assert type(error) is UnknownTaskError
    assert str(error) == "`task_id` is '\\ud800'. (at http://a:1)"
    for kind in (LookupError, KeyboardInterrupt):
        assert type(as_here("http://a:1", spoken(kind("x: y")))) is RemoteEnvironmentError
    assert type(as_here("http://a:1", "Iterable: no")) is RemoteEnvironmentError
    assert type(as_here("http://a:1", "EnvAdapterError: no")) is EnvAdapterError
