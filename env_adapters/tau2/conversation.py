"""One conversation between agent, customer and database, driven step by step in the caller's own thread."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from env_adapters.tau2.customers import CustomerSettings, make_customer
from env_adapters.tau2.errors import CustomerError
from env_adapters.tau2.library import Library, heavy, new_environment
from env_adapters.tau2.plan import Plan

# Tool calls a customer may make between two messages to the agent. The longest way of a task's own solution has 6.
MAX_CUSTOMER_CALLS = 30


class Conversation:
    """The benchmark's orchestrator, stopped whenever it is the agent's turn.

    Args:
        library: the benchmark's package.
        domain: name of the domain.
        task: the benchmark's task.
        settings: how the customer is played.

    Attributes:
        plan: the task's own solution, as far as it has not happened.
        ended_by: `"stop"`, `"transfer"` or `"out_of_scope"` once the customer has left, else an empty string.
    """

    def __init__(self, library: Library, domain: str, task: Any, settings: CustomerSettings) -> None:
        self._library = library
        self._domain = domain
        # A copy: all conversations share the original, and a tool may keep, and change, a list it was given.
        self._task = task = task.model_copy(deep=True)
        self.plan = Plan(task)
        self.ended_by = ""
        environment = new_environment(library, domain)
        tools = None if environment.user_tools is None else environment.get_user_tools()
        self._customer = make_customer(settings, library, task, tools, self.plan)
        self._agent = _PresetAgent()
        # Its own limits (on hops and on errors) are not looked at: `step` never does, only `run`.
        self._orchestrator = library.orchestrator(
            domain=domain, agent=self._agent, user=self._customer, environment=environment, task=task
        )
        self._started = library.message.get_now()
        self._clock = time.perf_counter()

    def begin(self) -> str:
        """Let the customer open the conversation; return what they say."""
        self._orchestrator.initialize()
        return self._until_agent()

    def say(self, text: str) -> str:
        """Send a message to the customer; return what they say, after whatever they did on their device.

        Raises:
            CustomerError: the customer could not be played.
        """
        self.plan.note_message(text)
        self._send(self._library.message.AssistantMessage(role="assistant", content=text, cost=0.0))
        return self._until_agent()

    def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Execute one tool call of the agent; return what came back, and whether that is an error."""
        call = self._library.message.ToolCall(id=uuid.uuid4().hex, name=name, arguments=dict(arguments))
        self._customer.note_agent_call(name)
        self._send(self._library.message.AssistantMessage(role="assistant", content=None, tool_calls=[call], cost=0.0))
        self._orchestrator.step()
        answer = self._orchestrator.message
        return str(answer.content), bool(answer.error)

    def evaluate(self) -> Any:
        """The benchmark's own verdict on a conversation the customer has ended (evaluator `ALL`).

        Replays every tool call on a fresh database and compares the end with the expected one: up to seconds.
        """
        simulation = self._library.simulation.SimulationRun(
            id=uuid.uuid4().hex,
            task_id=self._task.id,
            start_time=self._started,
            end_time=self._library.message.get_now(),
            duration=time.perf_counter() - self._clock,
            termination_reason=self._orchestrator.termination_reason,
            # In the order in which they were said. The orchestrator's own list is sorted by the clock's time, which
            # may stand still or go back.
            messages=list(self._orchestrator.trajectory),
        )
        with heavy():
            return self._library.evaluator.evaluate_simulation(
                simulation=simulation,
                task=self._task,
                evaluation_type=self._library.evaluator.EvaluationType.ALL,
                solo_mode=False,
                domain=self._domain,
            )

    def cancel(self) -> None:
        """Ask for no further answer of the customer; may be called from any thread."""
        self._customer.cancel()

    def _send(self, message: Any) -> None:
        self._agent.message = message
        self._step()

    def _step(self) -> None:
        self._orchestrator.step()
        if self._orchestrator.to_role is self._library.role.ENV:
            for call in self._orchestrator.message.tool_calls:
                self.plan.note_call(call)

    def _until_agent(self) -> str:
        """Go on until it is the agent's turn or the customer has left; return the customer's message."""
        for _ in range(2 * MAX_CUSTOMER_CALLS + 1):
            if self._orchestrator.done or self._orchestrator.to_role is self._library.role.AGENT:
                break
            self._step()
        else:
            raise CustomerError(
                f"The simulated customer made {MAX_CUSTOMER_CALLS} tool calls in a row without a word to the agent: "
                "it goes in circles. Use a stronger model as customer."
            )
        text = str(self._orchestrator.message.content)
        if self._orchestrator.done:
            self.ended_by = next(
                (meaning for token, meaning in self._library.user_tokens.items() if token in text), "stop"
            )
        return text


class _PresetAgent:
    """What the orchestrator takes for an agent: says what it was given."""

    message: Any = None

    def get_init_state(self, message_history: list[Any] | None = None) -> None:
        return None

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        return self.message, state

    def is_stop(self, message: Any) -> bool:
        """Never: only the customer ends a conversation (paper C.5)."""
        return False
