"""A customer without a language model: deterministic and offline, for tests, dry runs and the scripted expert."""

import re
import uuid
from typing import Any

from env_adapters.tau2.library import Library
from env_adapters.tau2.plan import CUSTOMER, Plan, made_by

# Agent messages without anything expected happening, after which the customer leaves.
PATIENCE = 8
_WORDS = re.compile(r"[\W_]+")


class ScriptedCustomer:
    """Replays the customer's side of a task.

    The opening message is the task's own: why the customer calls, and what they know. After that the customer answers
    no question. Told to do something on their device by name (`toggle_airplane_mode`, or in words), they do it if the
    task expects it next from them. They leave with a transfer once the agent has transferred them; satisfied at the
    agent's first message after everything expected was done and said; and without patience after [`PATIENCE`] messages
    in which nothing expected happened. A customer whose request is to be refused always waits that long.

    Args:
        library: the benchmark's package.
        task: the benchmark's task.
        tools: the customer's own tools, or `None`.
        plan: what is expected and has not happened yet.
    """

    def __init__(self, library: Library, task: Any, tools: list[Any] | None, plan: Plan) -> None:
        self._message = library.message
        self._simulator = library.user_simulator(tools=tools, instructions=str(task.user_scenario))
        self._opening = _opening(task)
        self._plan = plan
        self._left_before = plan.left
        self._in_vain = 0
        self._told = ""
        self._transferred = False
        self._opened = False

    def get_init_state(self, message_history: list[Any] | None = None) -> Any:
        """State as the benchmark's own simulator keeps it."""
        return self._simulator.get_init_state(message_history)

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Answer the agent's message, or go on after a tool result of one's own."""
        state.messages.append(message)
        answer = self._answer(message)
        state.messages.append(answer)
        return answer, state

    def note_agent_call(self, name: str) -> None:
        """Be told that the agent called a tool."""
        self._transferred |= name == "transfer_to_human_agents"

    def cancel(self) -> None:
        """Nothing to give up: a script does not wait."""

    def _answer(self, message: Any) -> Any:
        if not self._opened:
            self._opened = True
            return self._say(self._opening)
        from_agent = isinstance(message, self._message.AssistantMessage)
        if from_agent:
            self._told = _words(message.content)
        mine = next((action for action in self._plan.pending if made_by(action) == CUSTOMER), None)
        if mine is not None and f" {_words(mine.name).strip()} " in self._told:
            return self._do(mine)
        if not from_agent:
            return self._say("I have done that. What next?")
        return self._say(self._react())

    def _react(self) -> str:
        progress = self._plan.left < self._left_before
        self._left_before = self._plan.left
        self._in_vain = 0 if progress else self._in_vain + 1
        if self._transferred:
            return "###TRANSFER###"
        if not self._plan.left and not self._plan.empty:
            return "Thank you, that was all. ###STOP###"
        if self._in_vain >= PATIENCE:
            return "Then I will leave it at that. ###STOP###"
        return "I still need your help with this."

    def _say(self, text: str) -> Any:
        return self._message.UserMessage(role="user", content=text, cost=0.0)

    def _do(self, action: Any) -> Any:
        call = self._message.ToolCall(
            id=uuid.uuid4().hex,
            name=action.name,
            arguments=dict(action.arguments),
            requestor=CUSTOMER,  # codespell:ignore requestor
        )
        return self._message.UserMessage(role="user", content=None, cost=0.0, tool_calls=[call])


def _opening(task: Any) -> str:
    instructions = task.user_scenario.instructions
    if isinstance(instructions, str):
        return instructions
    return "\n".join(filter(None, (instructions.reason_for_call, instructions.known_info)))


def _words(text: str) -> str:
    """Lower-case words between single blanks, with one at each end."""
    return f" {_WORDS.sub(' ', text.lower()).strip()} "
