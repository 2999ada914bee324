"""A customer played by a language model behind an OpenAI-compatible endpoint (paper A.3: GPT-4o-mini at 0.7)."""

import threading
from typing import Any

from env_adapters.tau2.customers import CustomerSettings
from env_adapters.tau2.errors import CustomerError
from env_adapters.tau2.library import Library

# Seconds before the next request: twice as long after each failure, with jitter so that the many conversations of a
# batch do not all come back at once.
FIRST_WAIT, LONGEST_WAIT = 0.5, 20.0
# The statuses of 400 to 499 that a request may get in passing: time-out, conflict, too early, too many.
PASSING_4XX = (408, 409, 425, 429)


class UnusableReplyError(ValueError):
    """The endpoint answered, but not with something a customer could say or do."""


class EndpointCustomer:
    """The benchmark's own user simulator, whose failures are told apart from a bad end of the conversation.

    A request that fails in passing (no connection, time-out, server error, rate limit, reply that is empty or no valid
    JSON) is made again, with growing pauses; one that must fail again is not.

    Args:
        library: the benchmark's package.
        task: the benchmark's task.
        tools: the customer's own tools, or `None`.
        settings: model, endpoint and limits.
    """

    def __init__(self, library: Library, task: Any, tools: list[Any] | None, settings: CustomerSettings) -> None:
        self.settings = settings
        self._cancelled = threading.Event()
        self._simulator = library.user_simulator(
            tools=tools, instructions=str(task.user_scenario), llm=settings.customer, llm_args=_llm_args(settings)
        )

    def get_init_state(self, message_history: list[Any] | None = None) -> Any:
        """State of the benchmark's simulator: its instructions, and no message yet."""
        return self._simulator.get_init_state(message_history)

    def generate_next_message(self, message: Any, state: Any) -> tuple[Any, Any]:
        """Ask the model for the customer's next message.

        Raises:
            CustomerError: the endpoint gave no usable answer in all attempts, or one that no attempt can mend.
        """
        import tenacity

        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.settings.attempts) | tenacity.stop_when_event_set(self._cancelled),
            wait=tenacity.wait_random_exponential(FIRST_WAIT, LONGEST_WAIT),
            retry=tenacity.retry_if_exception(_is_passing),
            sleep=tenacity.sleep_using_event(self._cancelled),
            reraise=True,
        )
        try:
            return retrying(self._ask, message, state)
        except Exception as error:
            raise CustomerError(self._explain(error, retrying.statistics.get("attempt_number", 1))) from error

    def note_agent_call(self, name: str) -> None:
        """Not told: a customer does not see what the agent does."""

    def cancel(self) -> None:
        """Make no further attempt."""
        self._cancelled.set()

    def _ask(self, message: Any, state: Any) -> tuple[Any, Any]:
        # The simulator appends to the state before it asks, so an attempt that fails must leave it alone.
        attempt = state.model_copy(update={"messages": list(state.messages)})
        answer, attempt = self._simulator.generate_next_message(message, attempt)
        if answer.content is not None:
            answer.content = _without_thinking(answer.content)
        if not answer.tool_calls and not (answer.content or "").strip():
            raise UnusableReplyError("the reply is empty")
        return answer, attempt

    def _explain(self, error: Exception, attempts: int) -> str:
        where = self.settings.api_base or "the provider's own endpoint"
        times = f"{attempts} attempt{'s' if attempts > 1 else ''}"
        remedy = (
            "The request itself is refused: check the model's name, the key (TAU2_CUSTOMER_API_KEY) and what the "
            "endpoint serves."
            if not _is_passing(error)
            else "Check that the endpoint is up, has credit and can take this many conversations at once; a longer "
            "`timeout` or more `attempts` help against a slow one."
        )
        return (
            f"The simulated customer {self.settings.customer!r} at {where} gave no usable answer in {times}: "
            f"{type(error).__name__}: {_short(error)} {remedy}"
        )


def _llm_args(settings: CustomerSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "temperature": settings.temperature,
        "timeout": settings.timeout,
        # Attempts are counted in one place, above.
        "num_retries": 0,
        "max_retries": 0,
    }
    if settings.api_base:
        arguments["api_base"] = settings.api_base
    if settings.api_key or settings.api_base:
        arguments["api_key"] = settings.api_key or "none"  # endpoints of one's own ask for none
    return arguments


def _is_passing(error: BaseException) -> bool:
    """Whether the same request may succeed when made again: true of all but those the endpoint refuses."""
    status = getattr(error, "status_code", None)
    refused = isinstance(status, int) and 400 <= status < 500 and status not in PASSING_4XX
    return isinstance(error, Exception) and not refused


def _without_thinking(text: str) -> str:
    """What a thinking model says aloud: its thoughts would tell the agent what the customer was told to hide."""
    spoken = text.rpartition("</think>")[2]
    return "" if "<think>" in spoken else spoken.strip()


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else f"{text[:300]}…"
