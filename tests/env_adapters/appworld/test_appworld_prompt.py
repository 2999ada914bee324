"""The standing instruction of AppWorld against what the paper says of it."""

import ast
import hashlib
import json
import re

from env_adapters.appworld.prompt import ACKNOWLEDGEMENT, INSTRUCTION
from env_adapters.protocols import CodeBlock

BLOCKS = re.findall(r"^```python\n(.*?)^```$", INSTRUCTION, re.MULTILINE | re.DOTALL)
OUTPUTS = re.findall(r"^Output:\n```\n(.*?)^```$", INSTRUCTION, re.MULTILINE | re.DOTALL)


def test_word_for_word():
    """Against the digest of the paper's text (Appendix C.4), white space apart, with its quotes and fences typed."""
    words = " ".join(INSTRUCTION.split())
    assert (
        hashlib.sha256(words.encode()).hexdigest()
        == "d2302ab36cad38ad358acfba9d5399642c25d7ee1a9ef41901c05fca08797278"
    )


def test_the_listing_reads_as_python_and_json_again():
    assert len(BLOCKS) == 12
    for block in BLOCKS:
        ast.parse(block)
    # The four outputs without an ellipsis, all printed as AppWorld prints them.
    whole = [output for output in OUTPUTS if "..." not in output.replace("title. ...", "")]
    assert [output for output in whole if json.dumps(json.loads(output), indent=1) == output.rstrip()] == whole
    assert len(OUTPUTS) == 8
    assert len(whole) == 5


def test_the_task_comes_with_the_next_message():
    assert INSTRUCTION.startswith("I am your supervisor, and you are an AI Assistant")
    assert INSTRUCTION.endswith("The task you must solve will be given to you in the next message.")
    assert ACKNOWLEDGEMENT == "Ok."


def test_the_steps_it_shows_are_actions():
    for turn in re.findall(r"^ASSISTANT:\n(.*?)^USER:", INSTRUCTION, re.MULTILINE | re.DOTALL):
        assert CodeBlock().parse(turn).text.strip() in {block.strip() for block in BLOCKS}
