"""Which vLLM can be asked for single turns, and with which weights; for two ranks see `test_vllm_server_calls.py`."""

import re
from types import SimpleNamespace

import pytest

import cope_trl.engine_trainer as module
from cope_trl.engine_trainer import EngineTrainer
from cope_trl.errors import RolloutError


class Bare(EngineTrainer):
    """A trainer of which there is nothing but vLLM."""

    def __init__(self, mode="colocate", calls=None, processes=1, **engine):
        calls = [] if calls is None else calls
        self.vllm_mode, self.eos_token_ids, self.spans = mode, [2], None
        self.state, self._last_loaded_step = SimpleNamespace(global_step=3), -1
        self.accelerator = SimpleNamespace(
            num_processes=processes, wait_for_everyone=lambda: calls.append("wait"), is_main_process=True
        )
        settings = {
            **dict.fromkeys(("repetition_penalty", "temperature", "top_p"), 1.0),
            **dict.fromkeys(("top_k", "logprobs"), 0),
            "min_p": None,
            "generation_kwargs": {"stop_token_ids": [2]},
            "llm": "the engine",
            "server_base_url": None,
            "server_host": "0.0.0.0",
            "server_port": 8000,
            "sync_weights": lambda: calls.append("weights"),
            **engine,
        }
        self.vllm_generation = SimpleNamespace(**settings)


def arguments(**changes):
    settings = {
        "vllm_tensor_parallel_size": 1,
        "vllm_enable_sleep_mode": False,
        "vllm_structured_outputs_regex": None,
    }
    return SimpleNamespace(**settings | changes)


@pytest.fixture
def endpoint(monkeypatch):
    """Replaces what asks a server; holds what it was made with, and whether it reaches one."""
    made = SimpleNamespace(reached=True, calls=[])

    class Endpoint:
        def __init__(self, url, stops, **options):
            made.calls.append((url, stops, options))
            if not made.reached:
                raise RolloutError("cannot be reached")

    monkeypatch.setattr(module, "EndpointPolicy", Endpoint)
    return made


@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_vllm_is_asked_for_single_turns_by_default(endpoint, mode):
    assert Bare(mode)._why_vllm_in_lock_step(arguments()) is None


@pytest.mark.parametrize(
    ("mode", "changes", "engine", "reason"),
    [
        ("colocate", {"vllm_tensor_parallel_size": 2}, {}, "`vllm_tensor_parallel_size` is 2"),
        ("colocate", {"vllm_enable_sleep_mode": True}, {}, "`vllm_enable_sleep_mode`"),
        ("colocate", {"vllm_structured_outputs_regex": "a|b"}, {}, "`vllm_structured_outputs_regex`"),
        ("server", {"vllm_structured_outputs_regex": "a|b"}, {}, "`vllm_structured_outputs_regex`"),
        ("colocate", {}, {"generation_kwargs": {"n": 2, "max_tokens": 4}}, r"holds \['max_tokens', 'n'\]"),
        ("server", {}, {"generation_kwargs": {"structured_outputs": {}}}, r"holds \['structured_outputs'\]"),
    ],
)
def test_what_keeps_vllm_in_lock_step(endpoint, mode, changes, engine, reason):
    assert re.search(reason, Bare(mode, **engine)._why_vllm_in_lock_step(arguments(**changes)))


def test_settings_of_a_colocated_engine_do_not_matter_to_a_server(endpoint):
    changes = {"vllm_tensor_parallel_size": 2, "vllm_enable_sleep_mode": True}
    assert Bare("server")._why_vllm_in_lock_step(arguments(**changes)) is None


@pytest.mark.parametrize(
    ("url", "ranks", "everyone"),
    [
        ("http://server:1/", [("node", True), ("node", True)], True),
        ("http://server:1/", [("node", True), ("other", True)], True),
        ("http://server:1/", [("node", True), ("other", False)], False),
        ("http://localhost:1", [("node", True), ("node", True)], True),
        # Something answers there too, but not the server that gets the weights.
        ("http://localhost:1", [("node", True), ("other", True)], False),
        (None, [("node", True), ("other", True)], False),
    ],
)
def test_every_process_has_to_reach_the_server_that_gets_the_weights(endpoint, monkeypatch, url, ranks, everyone):
    monkeypatch.setattr(module, "gather_object", lambda own: ranks)
    reason = Bare("server", processes=2, server_base_url=url)._why_vllm_in_lock_step(arguments())
    assert (reason is None) == everyone
    assert reason is None or "within reach of the main process only" in reason


def test_what_each_process_finds_out_is_gathered(endpoint, monkeypatch):
    endpoint.reached, gathered = False, []
    monkeypatch.setattr(module, "gather_object", lambda own: gathered.extend(own) or own)
    assert Bare("server", processes=2)._why_vllm_in_lock_step(arguments()) is not None
    assert [reached for _, reached in gathered] == [False]
    assert Bare("server")._why_vllm_in_lock_step(arguments()) is not None
    assert len(gathered) == 1  # a process alone asks nobody


def test_weights_are_handed_over_once_a_step(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "VLLMEngine", lambda llm, sampling, spans: calls.append((llm, sampling)))
    trainer = Bare(calls=calls)
    trainer._vllm_engine(4)
    assert calls[0] == "weights"
    trainer._vllm_engine(4)
    trainer.state.global_step = 4
    trainer._vllm_engine(4)
    asked = ("the engine", trainer._vllm_sampling())
    assert calls == ["weights", asked, asked, "weights", asked]


def test_a_server_is_asked_once_it_has_the_weights_over_a_connection_an_episode(endpoint):
    calls = endpoint.calls
    trainer = Bare("server", calls=calls, server_base_url="http://server:1/")
    engine = trainer._vllm_engine(4)
    sampling = trainer._vllm_sampling()
    made = ("http://server:1/v1", [2], {"sampling": sampling, "connections": 4})
    assert calls == ["weights", "wait", made]
    assert isinstance(engine, module.EndpointEngine)
    trainer._vllm_engine(4)
    assert calls[3:] == ["wait", made]
