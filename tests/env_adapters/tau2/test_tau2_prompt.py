"""What the agent is shown: the paper's system message (Appendix C.5), with the chat template's own list of tools."""

import json
import re

import pytest
from support import make_tokenizer

from env_adapters.errors import EnvAdapterError
from env_adapters.tau2 import Tau2Env

pytest.importorskip("tau2")

# Paper, C.5.1: length of the policy in characters and words, and number of tools.
MEASURED = {
    "retail_0": (6_699, 1_158, 15),
    "airline_0": (7_676, 1_313, 14),
    "telecom_[mobile_data_issue]airplane_mode_on|user_abroad_roaming_enabled_off[PERSONA:None]": (23_318, 3_715, 13),
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer("qwen2_5")


@pytest.mark.parametrize(("task_id", "measured"), MEASURED.items(), ids=["retail", "airline", "telecom"])
def test_policy_and_tools_have_the_papers_sizes(task_id, measured):
    (message,) = Tau2Env.standing_messages(task_id)
    assert message["role"] == "system"
    policy = re.fullmatch(r".*<policy>\n(.*)\n</policy>", message["content"], re.DOTALL).group(1)
    assert (len(policy), len(policy.split()), len(Tau2Env.tools(task_id))) == measured


def test_the_template_renders_the_papers_prompt(tokenizer):
    messages = [*Tau2Env.standing_messages("retail_0"), {"role": "user", "content": "Hi!"}]
    tools = Tau2Env.tools("retail_0")
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    begin = (
        "<|im_start|>system\nYou are a customer service agent that helps the user according to the policy provided "
        "below.\nIn each turn you can either:\n- Send a message to the user.\n- Make a tool call.\nYou cannot do both "
        "at the same time.\n\nTry to be helpful and always follow the policy.\n\n<policy>\n"
    )
    end = (
        "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.startswith(begin)
    assert text.endswith(end)
    listed = text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == tools
    assert "done" not in {tool["function"]["name"] for tool in tools}


def test_a_tools_answer_reads_as_in_the_template(tokenizer):
    """An observation becomes a user turn; in its tags it is, letter for letter, the template's own tool turn."""
    env = Tau2Env("scripted")
    env.reset(options={"task_id": "retail_0"})
    reply = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 1"}}\n</tool_call>'
    observation = env.step(reply)[0]
    history = [{"role": "user", "content": "Hi!"}, {"role": "assistant", "content": reply}]
    as_user = tokenizer.apply_chat_template([*history, {"role": "user", "content": observation}], tokenize=False)
    as_tool = tokenizer.apply_chat_template([*history, {"role": "tool", "content": "2.0"}], tokenize=False)
    assert as_user == as_tool


def test_the_system_message_belongs_to_a_task():
    with pytest.raises(EnvAdapterError, match="pass `task_id`"):
        Tau2Env.standing_messages()
    assert Tau2Env.tools() is None
    assert Tau2Env.standing_messages("retail_0") == Tau2Env.standing_messages("retail_1")
    assert Tau2Env.tools("retail_0") != Tau2Env.tools("airline_0")


def test_tools_are_the_callers_own():
    Tau2Env.tools("retail_0")[0]["function"]["name"] = "spoiled"
    assert Tau2Env.tools("retail_0")[0]["function"]["name"] == "calculate"
