"""Sampling on a shared engine by one rank alone; several ranks are in `tests/cope_trl/test_vllm_server_calls.py`."""

from cope_trl.rollout.shared import SharedEngine


class Engine:
    """Samples the length of a prompt, as often as it may."""

    def __init__(self, logprobs=True):
        self.asked, self.logprobs = [], logprobs

    def __call__(self, prompts, limit):
        self.asked.append((prompts, limit))
        ids = [[len(prompt)] * limit for prompt in prompts]
        return ids, [[-float(len(prompt))] * limit for prompt in prompts] if self.logprobs else None


def test_one_rank_is_sampled_as_it_asks():
    engine = Engine()
    ids, logprobs = SharedEngine(alone=True).sample(engine, [(1, 2, 3), (4, 5)], 2)
    assert engine.asked == [([[1, 2, 3], [4, 5]], 2)]
    assert (ids, logprobs) == ([[3, 3], [2, 2]], [[-3.0, -3.0], [-2.0, -2.0]])
    assert SharedEngine(alone=True).sample(Engine(logprobs=False), [[1, 2]], 1) == ([[2]], None)


def test_a_prompt_close_to_the_context_is_asked_for_by_itself():
    engine = Engine()
    prompts = [[0] * 3, [0] * 8, [0] * 2]
    ids, logprobs = SharedEngine(context=10, alone=True).sample(engine, prompts, 4)
    assert [(len(asked), limit) for asked, limit in engine.asked] == [(2, 4), (1, 2)]
    assert ids == [[3] * 4, [8] * 2, [2] * 4]
    assert logprobs == [[-3.0] * 4, [-8.0] * 2, [-2.0] * 4]


def test_a_rank_alone_has_no_placeholders():
    assert SharedEngine(alone=True).sample(Engine(), [[7]], 1) == ([[1]], [[-1.0]])
