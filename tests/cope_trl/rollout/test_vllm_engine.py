"""One vLLM request a turn, on a stand-in for vLLM; the real one is in `tests/vllm_engine/`."""

import sys
from types import SimpleNamespace

import pytest
from support import GO, CountEnv, make_tokenizer

from cope_trl.chat import ChatFormat
from cope_trl.rollout.endpoint import turn_seed
from cope_trl.rollout.episodes import EpisodeLimits, EpisodePlayer
from cope_trl.rollout.generation import Generation
from cope_trl.rollout.pool import EnvironmentPool
from cope_trl.rollout.vllm_engine import VLLMEngine
from cope_trl.types import TaskRef

CONTEXT = 50


class StandIn:
    """A `vllm.LLM` that answers a request when told to, with what it was asked.

    Attributes:
        asked: (name, prompt, parameters) of every request.
        running: those not answered yet.
        ready: tells of a running request whether the next step ends it.
        say: ids that answer a prompt.
        with_logprobs: answers hold log-probabilities.
    """

    def __init__(self, context=CONTEXT):
        self.llm_engine = self
        self.model_config = SimpleNamespace(max_model_len=context)
        self.asked, self.aborted, self.running, self.steps = [], [], {}, 0
        self.with_logprobs = True
        self.ready = lambda name: True
        self.say = lambda prompt: [len(prompt), 7]

    def add_request(self, name, prompt, parameters):
        assert name not in self.running
        self.running[name] = prompt["prompt_token_ids"]
        self.asked.append((name, prompt["prompt_token_ids"], parameters))

    def abort_request(self, names):
        self.aborted.extend(names)
        for name in names:
            del self.running[name]

    def step(self):
        self.steps += 1
        outputs = []
        for name, prompt in list(self.running.items()):
            finished = self.ready(name)
            outputs.append(self.output(name, prompt, self.say(prompt), finished))
            if finished:
                del self.running[name]
        return outputs[::-1]

    def output(self, name, prompt, ids, finished):
        # The sampled token is not the first of an entry that also holds others.
        logprobs = [{99: SimpleNamespace(logprob=-9.0), token: SimpleNamespace(logprob=-token / 10)} for token in ids]
        sequence = SimpleNamespace(token_ids=tuple(ids), logprobs=logprobs if self.with_logprobs else None)
        return SimpleNamespace(
            request_id=name,
            finished=finished,
            outputs=[sequence],
            prompt_token_ids=prompt,
            num_cached_tokens=len(prompt) // 2,
        )


@pytest.fixture(autouse=True)
def vllm(monkeypatch):
    """As much of the module as is imported."""
    sampling_params = SimpleNamespace(RequestOutputKind=SimpleNamespace(FINAL_ONLY="final"))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict, sampling_params=sampling_params))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling_params)


def test_a_request_has_the_trainers_sampling_and_a_limit_and_seed_of_its_own():
    llm = StandIn()
    engine = VLLMEngine(llm, {"temperature": 0.7, "stop_token_ids": [2], "seed": 5})
    one, other = engine.open("a"), engine.open("b")
    engine.sample(one, (1, 2, 3), 20, [].append)
    engine.sample(other, [4] * 45, 20, [].append)  # five tokens from the context's end
    while engine.advance():
        pass
    engine.sample(one, [1, 2, 3, 4], 19, [].append)
    common = {"temperature": 0.7, "stop_token_ids": [2], "output_kind": "final", "detokenize": False}
    assert [(prompt, parameters) for _, prompt, parameters in llm.asked] == [
        ([1, 2, 3], {**common, "max_tokens": 20, "seed": turn_seed("a", 0)}),
        ([4] * 45, {**common, "max_tokens": 5, "seed": turn_seed("b", 0)}),
        ([1, 2, 3, 4], {**common, "max_tokens": 19, "seed": turn_seed("a", 1)}),
    ]


def test_text_is_made_where_a_stop_string_needs_it():
    llm = StandIn()
    engine = VLLMEngine(llm, {"stop": ["Observation:"]})
    engine.sample(engine.open("a"), [1], 5, [].append)
    assert llm.asked[0][2]["detokenize"] is True


def test_turns_are_delivered_when_they_are_done_with_the_sampled_tokens_log_probabilities():
    llm = StandIn()
    engine = VLLMEngine(llm, {})
    one, other, taken = engine.open("a"), engine.open("b"), []
    assert not engine.advance()
    assert llm.steps == 0
    engine.sample(one, [1] * 4, 9, lambda turn: taken.append(("one", turn)))
    engine.sample(other, [1] * 6, 9, lambda turn: taken.append(("other", turn)))
    first = llm.asked[0][0]
    llm.ready = lambda name: name != first
    assert engine.advance()
    assert taken == [("other", Generation([6, 7], [-0.6, -0.7]))]
    llm.ready = lambda name: True
    assert engine.advance()
    assert taken[1:] == [("one", Generation([4, 7], [-0.4, -0.7]))]
    assert not engine.advance()
    assert (engine.tokens.prompt, engine.tokens.cached, engine.tokens.sampled) == (10, 5, 4)


def test_log_probabilities_nobody_asked_for_are_missing():
    llm = StandIn()
    llm.with_logprobs = False
    engine, taken = VLLMEngine(llm, {"logprobs": None}), []
    engine.sample(engine.open("a"), [1, 2], 5, taken.append)
    engine.advance()
    assert taken == [Generation([2, 7], None)]


def test_a_closed_episodes_turn_is_aborted_and_not_delivered():
    llm = StandIn()
    engine, taken = VLLMEngine(llm, {}), []
    one, other = engine.open("a"), engine.open("b")
    engine.sample(one, [1], 5, taken.append)
    engine.sample(other, [2, 2], 5, taken.append)
    engine.close(one)
    assert llm.aborted == [llm.asked[0][0]]
    assert engine.advance()
    assert taken == [Generation([2, 7], [-0.2, -0.7])]
    engine.close(other)  # nothing is being sampled for it
    assert len(llm.aborted) == 1
    assert not engine.advance()


def test_engines_on_one_vllm_do_not_take_each_others_turns():
    llm, taken = StandIn(), []
    for seed in ("a", "b"):
        engine = VLLMEngine(llm, {})
        engine.sample(engine.open(seed), [1], 5, taken.append)  # the first is left behind
    assert engine.advance()
    assert len(taken) == 1
    assert len({name for name, _, _ in llm.asked}) == 2


def test_episodes_that_can_go_on_do_not_wait_for_a_turn_that_takes_long():
    tokenizer = make_tokenizer()
    chat = ChatFormat(tokenizer)
    llm, order, goals = StandIn(context=1000), [], (1, 4, 2)
    reply = [*tokenizer(GO, add_special_tokens=False)["input_ids"], chat.end_of_turn_id]
    llm.say = lambda prompt: reply
    llm.ready = lambda name: name != llm.asked[0][0] or len(order) == 2
    pool = EnvironmentPool(lambda name: CountEnv(), timeout=10.0)
    engine = VLLMEngine(llm, {})
    played = EpisodePlayer(pool, engine, chat, []).play(
        [TaskRef("count", f"count-{goal}") for goal in goals],
        [CountEnv.standing_messages()] * 3,
        EpisodeLimits({"": 6}, max_tokens_per_turn=30, max_completion_length=900),
        on_finished=lambda finished: order.extend(finished),
    )
    pool.close()
    first = next(episode for episode in played if tuple(episode.ids[: len(llm.asked[0][1])]) == tuple(llm.asked[0][1]))
    assert order[-1] is first
    assert [len(episode.turns) for episode in played] == list(goals)
    assert all(episode.success for episode in played)
    assert engine.tokens.sampled == sum(goals) * len(reply)
    assert all(episode.logprobs is not None and min(episode.logprobs) < 0 for episode in played)
    # Each prompt is the one before and what is new, or no cache would be of use.
    for episode in played:
        prompts = [prompt for _, prompt, _ in llm.asked if tuple(prompt) == tuple(episode.ids[: len(prompt)])]
        assert len(prompts) >= len(episode.turns)
