"""The customer behind an OpenAI-compatible endpoint, against a small server on this machine."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from env_adapters.tau2 import CustomerError, MissingCustomerError, Tau2Env, conversation, endpoint
from env_adapters.tau2.customers import choose

pytest.importorskip("tau2")

HELLO = "Hi, I want to return my teapot."


class Endpoint:
    """Answers requests in the chat format with what was scripted, the last answer again and again.

    An answer is a text, a dict (the message), an int (a status), or bytes (the whole body).
    """

    def __init__(self, *answers):
        self.answers = list(answers)
        self.requests = []
        self.keys = []
        self.wait = 0.0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append(json.loads(body))
                outer.keys.append(self.headers.get("Authorization"))
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                time.sleep(outer.wait)
                status, text = outer.encode(answer)
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(text)
                except OSError:
                    pass  # the customer lost patience

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}/v1"

    @staticmethod
    def encode(answer):
        if isinstance(answer, bytes):
            return 200, answer
        if isinstance(answer, int):
            return answer, json.dumps({"error": {"message": f"status {answer}", "type": "x", "code": "y"}}).encode()
        message = answer if isinstance(answer, dict) else {"role": "assistant", "content": answer}
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": None, **message}}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, json.dumps(
            {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        ).encode()


def tool_call(name, arguments):
    function = {"name": name, "arguments": arguments}
    return {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 0.02)
    started = []

    def start(*answers, task_id="retail_1", model="openai/customer", **options):
        server = Endpoint(*answers)
        started.append(server)
        env = Tau2Env(model, api_base=server.address, **options)
        return server, env, (lambda: env.reset(options={"task_id": task_id})[0])

    yield start
    for server in started:
        server.server.shutdown()
        server.server.server_close()


@pytest.mark.parametrize("model", ["openai/customer", "hosted_vllm/customer"])
def test_a_conversation(serve, model):
    server, env, reset = serve(HELLO, "Yes, please.", "Thanks! ###STOP###", model=model, api_key="secret")
    assert reset() == HELLO
    request = server.requests[0]
    assert request["model"] == "customer"
    assert request["temperature"] == 0.7
    assert server.keys == ["Bearer secret"]
    # The model plays the customer: it is told the scenario, and what the agent says comes from its "user".
    assert [message["role"] for message in request["messages"]] == ["system", "user"]
    assert "Yusuf Rossi" in request["messages"][0]["content"]
    observation, reward, done, _, _ = env.step("<think>Easy.</think>Shall I do it?")
    assert (observation, reward, done) == ("Yes, please.", 0.0, False)
    assert server.requests[1]["messages"][-1] == {"role": "user", "content": "Shall I do it?"}
    observation, reward, done, _, info = env.step("Done.")
    assert (observation, reward, done, info["ended_by"]) == ("Thanks! ###STOP###", 0.0, True, "stop")
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("token", "meaning"),
    [("###STOP###", "stop"), ("###TRANSFER###", "transfer"), ("###OUT-OF-SCOPE###", "out_of_scope")],
)
def test_each_token_that_ends_a_conversation(serve, token, meaning):
    _, env, reset = serve(HELLO, f"Well. {token}")
    reset()
    _, _, done, _, info = env.step("No.")
    assert (done, info["ended_by"]) == (True, meaning)


def test_an_agents_own_stop_token_ends_nothing(serve):
    _, env, reset = serve(HELLO, "Hello?")
    reset()
    observation, _, done, _, _ = env.step("Goodbye. ###STOP###")
    assert (observation, done) == ("Hello?", False)


def test_half_a_character_is_replaced(serve):
    server, env, reset = serve(HELLO)
    reset()
    env.step("one \ud800 half")
    assert server.requests[1]["messages"][-1]["content"] == "one ? half"


@pytest.mark.parametrize(
    "failure",
    [500, 503, 429, b"{not json", b"", "", "  \n", "<think>hm</think>", tool_call("toggle_data", "{broken")],
    ids=str,
)
def test_what_may_pass_is_asked_again(serve, failure):
    server, env, reset = serve(failure, failure, HELLO, task_id=TELECOM)
    assert reset() == HELLO
    assert len(server.requests) == 3
    # Each attempt asked the same: a failed one left nothing behind.
    assert server.requests[0] == server.requests[1] == server.requests[2]
    env.close()


@pytest.mark.parametrize("failure", [500, b"{not json", ""], ids=str)
def test_what_does_not_pass_fails_the_episode(serve, failure):
    server, env, reset = serve(HELLO, failure, attempts=3)
    reset()
    with pytest.raises(CustomerError) as caught:
        env.step("How may I help?")
    message = str(caught.value)
    assert "'openai/customer'" in message
    assert server.address in message
    assert "3 attempts" in message
    assert "has credit" in message
    assert len(server.requests) == 4
    with pytest.raises(Exception, match="no episode running"):  # what the customer knows is lost
        env.step("How may I help?")
    server.answers = [HELLO]
    assert reset() == HELLO  # the next episode may be well again


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refused_request_is_not_made_again(serve, status):
    server, _, reset = serve(status)
    with pytest.raises(CustomerError, match="check the model's name, the key"):
        reset()
    assert len(server.requests) == 1


def test_nobody_listens():
    env = Tau2Env("hosted_vllm/customer", api_base="http://127.0.0.1:9/v1", attempts=1)
    with pytest.raises(CustomerError, match="127.0.0.1:9/v1 gave no usable answer in 1 attempt:"):
        env.reset(options={"task_id": "retail_1"})


def test_a_slow_endpoint_is_given_up(serve):
    server, env, reset = serve(HELLO, timeout=1.0, attempts=2)
    env._chosen["timeout"] = 60.0  # the first request of a process loads modules
    reset()
    env._chosen["timeout"] = 1.0
    reset()
    server.wait = 6.0
    started = time.monotonic()
    with pytest.raises(CustomerError, match="Timeout"):
        env.step("Hello?")
    assert len(server.requests) == 4
    assert time.monotonic() - started < 6


def test_kill_ends_the_attempts(serve, monkeypatch):
    monkeypatch.setattr(endpoint, "FIRST_WAIT", 30.0)
    monkeypatch.setattr(endpoint, "LONGEST_WAIT", 60.0)
    monkeypatch.setattr("tenacity.wait.random.uniform", lambda low, high: high)
    server, env, reset = serve(HELLO, 500)
    reset()
    raised = []

    def step():
        try:
            env.step("Hello?")
        except CustomerError as error:
            raised.append(error)

    thread = threading.Thread(target=step)
    thread.start()
    while len(server.requests) < 2:
        time.sleep(0.01)
    env.kill()
    thread.join(10)
    assert not thread.is_alive()
    assert len(raised) == 1
    assert len(server.requests) <= 3  # at most the one it was waiting to make, of five


def test_a_thinking_customer_keeps_its_thoughts_to_itself(serve):
    _, _, reset = serve(f"<think>I must not say ###STOP###.</think>\n{HELLO}")
    assert reset() == HELLO


TELECOM = "telecom_[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]"


def test_a_customer_with_tools_of_their_own(serve):
    server, env, reset = serve(HELLO, tool_call("toggle_airplane_mode", "{}"), "It is off now.", task_id=TELECOM)
    reset()
    assert len(server.requests[0]["tools"]) == 30
    observation, _, done, _, info = env.step("Please switch airplane mode off.")
    assert (observation, done) == ("It is off now.", False)
    assert info["has_call"] is info["wrote"] is False  # the customer's doing is not the agent's
    assert [message["role"] for message in server.requests[2]["messages"]][-2:] == ["assistant", "tool"]


def test_a_customer_who_only_calls_tools_is_given_up(serve, monkeypatch):
    monkeypatch.setattr(conversation, "MAX_CUSTOMER_CALLS", 3)
    server, env, reset = serve(HELLO, tool_call("check_status_bar", "{}"), task_id=TELECOM)
    reset()
    with pytest.raises(CustomerError, match="made 3 tool calls in a row"):
        env.step("What do you see?")
    assert len(server.requests) == 1 + 4  # three calls, and what the model said after them


def test_a_vllm_endpoint_needs_its_address(monkeypatch):
    for name in ("TAU2_CUSTOMER_API_BASE", "HOSTED_VLLM_API_BASE", "OPENAI_API_KEY", "TAU2_CUSTOMER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MissingCustomerError, match="TAU2_CUSTOMER_API_BASE"):
        choose("hosted_vllm/x")
    with pytest.raises(MissingCustomerError, match="TAU2_CUSTOMER_API_KEY"):
        choose("openai/x")
    assert "secret" not in repr(choose("openai/x", api_key="secret"))
