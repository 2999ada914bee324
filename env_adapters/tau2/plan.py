"""What a task expects to be done and said, and how much of it still is not: known to the scripted sides only."""

import json
from typing import Any

DO_THIS = "Please do this on your device: "
AGENT, CUSTOMER = "assistant", "user"


def made_by(call: Any) -> str:
    """Who makes a tool call: [`AGENT`] or [`CUSTOMER`]."""
    maker: str = call.requestor  # codespell:ignore requestor
    return maker


class Plan:
    """The benchmark's own solution of a task, as far as it has not happened yet.

    Args:
        task: the benchmark's task.

    Attributes:
        pending: expected tool calls of agent and customer, in order.
        unsaid: texts the agent still has to say to the customer.
        empty: whether nothing was expected from the start, as in a task whose request has to be refused.
    """

    def __init__(self, task: Any) -> None:
        criteria = task.evaluation_criteria
        self.pending: list[Any] = list((criteria and criteria.actions) or [])
        self.unsaid: list[str] = list((criteria and criteria.communicate_info) or [])
        self.empty = not (self.pending or self.unsaid)

    @property
    def left(self) -> int:
        """Number of things that have not happened yet."""
        return len(self.pending) + len(self.unsaid)

    def note_call(self, call: Any) -> None:
        """Strike out the first expected call that this one fulfils, if any."""
        for position, action in enumerate(self.pending):
            if made_by(action) == made_by(call) and action.compare_with_tool_call(call):
                del self.pending[position]
                return

    def note_message(self, text: str) -> None:
        """Strike out what the agent says here; compared as the benchmark's evaluator compares."""
        said = text.lower().replace(",", "")
        self.unsaid = [info for info in self.unsaid if info.lower() not in said]

    def expert_reply(self) -> str:
        """What an agent that knows the solution replies now."""
        if self.pending and made_by(self.pending[0]) == AGENT:
            action = self.pending[0]
            call = json.dumps({"name": action.name, "arguments": action.arguments}, ensure_ascii=False)
            return f"<tool_call>\n{call}\n</tool_call>"
        if self.pending:
            return f"{DO_THIS}{self.pending[0].name}"
        return " ".join(["That is all I can do for you.", *self.unsaid])
