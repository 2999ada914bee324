"""Names of environments on other hosts, and how sessions spread over these."""

import pytest

from env_adapters import EnvAdapterError, resolve
from env_adapters.openenv import address
from env_adapters.openenv.address import Hosts, parse


@pytest.mark.parametrize(
    ("name", "urls"),
    [
        ("openenv:http://a:8000", ("http://a:8000",)),
        ("openenv:https://a.example/env/", ("https://a.example/env",)),
        ("openenv:http://a:1,http://b:2", ("http://a:1", "http://b:2")),
        ("openenv:http://a:1; http://[::1]:2/ ,", ("http://a:1", "http://[::1]:2")),
    ],
)
def test_addresses(name, urls):
    assert parse(name) == address.Address(name, urls, {})


def test_options_follow_a_question_mark():
    parsed = parse("openenv:http://a:1,http://b:2?action_field=say&observation_field=a+b")
    assert parsed.urls == ("http://a:1", "http://b:2")
    assert parsed.options == {"action_field": "say", "observation_field": "a b"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("openenv:", "names no host"),
        ("openenv:,", "names no host"),
        ("openenv:a:8000", "'a:8000' is no address of a server"),
        ("openenv:ws://a:8000", "'ws://a:8000' is no address"),
        ("openenv:http://a:port", "is no address"),
        ("openenv:http://a:0", "is no address"),
        ("openenv:http://:8000", "is no address"),
        ("openenv:http://a:1?acton_field=x", "Did you mean 'action_field'"),
    ],
)
def test_what_is_no_address(name, message):
    with pytest.raises(EnvAdapterError, match=message):
        parse(name)


def test_a_password_is_refused_and_not_repeated():
    with pytest.raises(EnvAdapterError, match="COPE_TRL_TOKEN") as caught:
        parse("openenv:http://me:secret@a:8000")
    assert "secret" not in str(caught.value)


def test_a_name_without_a_colon_is_no_address():
    with pytest.raises(EnvAdapterError, match="`name` is 'openenv', but the environments are"):
        resolve("openenv")


def test_the_host_with_the_fewest_sessions_is_next():
    hosts = Hosts(("a", "b", "c"))
    assert [hosts.take(set()) for _ in range(7)] == list("abcabca")
    hosts.give_back("b")
    assert hosts.take(set()) == "b"
    assert hosts.take({"b", "c"}) == "a"
    assert hosts.take({"a", "b", "c"}) is None


def test_ranks_begin_at_different_hosts():
    assert [Hosts(("a", "b", "c"), start=rank).take(set()) for rank in range(4)] == list("abca")


def test_a_host_that_failed_is_tried_last_for_a_while(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(address.time, "monotonic", lambda: now)
    hosts = Hosts(("a", "b"))
    assert hosts.take(set()) == "a"
    hosts.give_back("a", failed=True)
    assert [hosts.take(set()) for _ in range(3)] == list("bbb")
    assert hosts.take({"b"}) == "a"  # rather than none at all
    now += address.AVOID_SECONDS + 1
    assert hosts.take(set()) == "a"
