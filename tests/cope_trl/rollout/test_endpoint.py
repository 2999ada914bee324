"""Sampling over HTTP against a server written here, which answers as vLLM's does (read off vLLM 0.31's answers)."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cope_trl.errors import RolloutError
from cope_trl.rollout.endpoint import EndpointPolicy, fit_context, fit_limit, turn_seed
from cope_trl.rollout.generation import Generation

CONTEXT = 20


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({"data": [{"id": "first", "max_model_len": CONTEXT}, {"id": "second"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers.get("Authorization"), body))
        if any(len(prompt) + body["max_tokens"] > CONTEXT for prompt in body["prompt"]):
            self.answer({"message": "maximum context length is 20"}, 400)
            return
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            ids = [sum(prompt)] * min(body["max_tokens"], 3)
            choices.append({"index": index, "logprobs": {"token_logprobs": [-0.5] * len(ids)}, "token_ids": ids})
        if self.server.without_ids:
            for choice in choices:
                choice["token_ids"] = None
        self.answer({"choices": choices[::-1]})

    def answer(self, content, status=200):
        if self.server.statuses:
            status = self.server.statuses.pop(0)
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.asked, server.statuses, server.without_ids = [], [], False
        server.url = f"http://127.0.0.1:{server.server_port}/v1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_answers_come_in_the_order_of_the_prompts(server):
    policy = EndpointPolicy(server.url + "/", [9, 7], temperature=0.7, top_p=0.9, api_key="secret")
    assert policy([[1, 2], [3], [4, 5, 6]], 5) == [Generation([n] * 3, [-0.5] * 3) for n in (3, 3, 15)]
    ((path, authorization, body),) = server.asked
    assert (path, authorization) == ("/v1/completions", "Bearer secret")
    assert body == {
        "model": "first",
        "prompt": [[1, 2], [3], [4, 5, 6]],
        "max_tokens": 5,
        "logprobs": 0,
        "return_token_ids": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "stop_token_ids": [7, 9],
    }


def test_no_prompts_ask_nothing(server):
    assert EndpointPolicy(server.url, [2])([], 5) == []
    assert server.asked == []


def test_a_prompt_close_to_the_context_is_asked_for_by_itself(server):
    policy = EndpointPolicy(server.url, [2])
    assert policy.context == CONTEXT
    lengths = [len(g.ids) for g in policy([[1], [1] * 18, [1] * 3, [1] * 19], 10)]
    assert lengths == [3, 2, 3, 1]
    assert [(len(body["prompt"]), body["max_tokens"]) for _, _, body in server.asked] == [(2, 10), (1, 2), (1, 1)]


def test_limits_by_prompt():
    prompts = [[0] * n for n in (1, 90, 100, 95, 50)]
    assert fit_context(prompts, 10, None) == {10: [0, 1, 2, 3, 4]}
    assert fit_context(prompts, 10, 100) == {10: [0, 1, 4], 1: [2], 5: [3]}


def test_the_limit_of_one_prompt():
    assert [fit_limit(length, 10, 100) for length in (1, 90, 91, 100, 120)] == [10, 10, 9, 1, 1]
    assert fit_limit(120, 10, None) == 10


def test_a_turns_seed_is_the_same_everywhere_and_no_two_turns_share_one():
    # The first 63 bits of SHA-256, as `printf a-0 | sha256sum` gives them.
    assert turn_seed("a", 0) == 0x68571817C96C5C83 >> 1
    seeds = {turn_seed(f"42-train-0-{episode}", turn) for episode in range(100) for turn in range(30)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_one_turn_is_asked_for_with_its_seed_under_its_own_limit(server):
    policy = EndpointPolicy(server.url, [2], sampling={"top_k": 5, "temperature": 0.5}, connections=2)
    assert policy.sample((1, 2), 9, seed=7) == Generation([3] * 3, [-0.5] * 3)
    assert policy.sample([1] * 18, 9, seed=8) == Generation([18] * 2, [-0.5] * 2)
    bodies = [body for _, _, body in server.asked]
    assert [(body["prompt"], body["seed"], body["max_tokens"]) for body in bodies] == [
        ([[1, 2]], 7, 9),
        ([[1] * 18], 8, 2),
    ]
    assert {(body["top_k"], body["temperature"], body["top_p"]) for body in bodies} == {(5, 0.5, 1.0)}
    policy([[1, 2]], 5)
    assert "seed" not in server.asked[-1][2]


def test_a_model_is_chosen_by_name(server):
    policy = EndpointPolicy(server.url, [2], model="second")
    assert (policy.model, policy.context) == ("second", None)
    with pytest.raises(RolloutError, match=r"`model` is 'third', but .* serves \['first', 'second'\]"):
        EndpointPolicy(server.url, [2], model="third")


def test_a_passing_failure_is_asked_again_and_a_refusal_is_not(server):
    policy = EndpointPolicy(server.url, [2])
    server.statuses = [503, 429]
    assert len(policy([[1, 2]], 5)) == 1
    assert len(server.asked) == 3
    server.statuses = [403]
    with pytest.raises(RolloutError, match="/completions answered 403"):
        policy([[1, 2]], 5)
    assert len(server.asked) == 4
    once = EndpointPolicy(server.url, [2], attempts=1)
    server.statuses = [500]
    with pytest.raises(RolloutError, match="answered 500"):
        once([[1, 2]], 5)


def test_a_server_without_token_ids_is_refused(server):
    server.without_ids = True
    with pytest.raises(RolloutError, match="returned text without token ids"):
        EndpointPolicy(server.url, [2])([[1, 2]], 5)


def test_an_address_where_nothing_listens(server):
    server.shutdown()
    server.server_close()
    with pytest.raises(RolloutError, match="which cannot be reached"):
        EndpointPolicy(server.url, [2], attempts=1)
