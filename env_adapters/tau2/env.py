"""The τ²-bench adapter."""

import copy
from collections.abc import Sequence
from typing import Any

from env_adapters.base import Outcome, Task, TextEnv
from env_adapters.errors import EnvAdapterError, EpisodeStateError
from env_adapters.protocols import Action, ToolCall
from env_adapters.tau2.calls import MalformedCallError, count_calls, read_call
from env_adapters.tau2.conversation import Conversation
from env_adapters.tau2.customers import choose
from env_adapters.tau2.library import check_package, load
from env_adapters.tau2.tasks import DOMAINS, SPLITS, find, parse_domains, split_ids

# The paper's prompt (Appendix C.5) up to the list of tools, which the chat template appends in its own words.
INSTRUCTION = """\
You are a customer service agent that helps the user according to the policy provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy.

<policy>
{policy}
</policy>"""


class Tau2Env(TextEnv):
    """Customer service in a shop, an airline and a phone company (Barres et al., 2025), as the paper plays it.

    A reply is a message to the customer, or one tool call in `<tool_call></tool_call>` tags; of several calls only the
    first is executed, and the rest and all other text is discarded. The observation is what the customer says next, or
    the tool's answer in `<tool_response></tool_response>` tags. The conversation ends when the customer ends it; the
    reward is then the binary verdict of the benchmark's own evaluator (`ALL`). A conversation the caller cuts off
    earlier is worth 0.

    Invalid are replies that hold a malformed call or nothing at all, and calls that a tool answers with an error.

    `info` also holds, at every step: `has_call`, `num_calls` (calls in the reply), `malformed`, `tool` (name of the
    tool that was called, or `None`), `wrote` (whether the call changed the database) and `writes` (how many did so
    far). At the end: `ended_by` (`"stop"`, `"transfer"` or `"out_of_scope"`), `reward_basis`, `reward_breakdown` and
    `tau2_version`.

    Args:
        customer: who plays the customer: a model behind an OpenAI-compatible endpoint, as `"openai/NAME"` or
            `"hosted_vllm/NAME"`; or `"scripted"`, which needs no model and is for tests and dry runs. Default: the
            environment variable `TAU2_CUSTOMER`.
        api_base: address of the endpoint. Default: `TAU2_CUSTOMER_API_BASE`, else the provider's own.
        api_key: its key. Default: `TAU2_CUSTOMER_API_KEY`, else the provider's own variable.
        temperature: sampling temperature of the customer (paper A.3).
        timeout: deadline of one request to the endpoint, in seconds.
        attempts: requests made for one answer before the episode is given up.

    Raises:
        MissingCustomerError: `customer` was given and cannot be a customer.
    """

    name = "tau2"
    protocol = ToolCall()
    instruction = INSTRUCTION
    score_range = (0.0, 1.0)
    splits = SPLITS
    max_turns = 50
    max_turns_eval = 50
    mean_over_families = True

    def __init__(
        self,
        customer: str | None = None,
        *,
        api_base: str | None = None,
        api_key: str | None = None,
        temperature: float = 0.7,
        timeout: float = 60.0,
        attempts: int = 5,
    ) -> None:
        if not timeout > 0:
            raise EnvAdapterError(f"`timeout` is {timeout!r}; it must be more than 0 seconds.")
        if attempts < 1:
            raise EnvAdapterError(f"`attempts` is {attempts!r}; at least one is needed.")
        self._chosen: dict[str, Any] = {
            "customer": customer,
            "api_base": api_base,
            "api_key": api_key,
            "temperature": temperature,
            "timeout": timeout,
            "attempts": attempts,
        }
        if customer is not None:
            choose(**self._chosen)
        self._conversation: Conversation | None = None
        self._writing_tools: frozenset[str] = frozenset()
        self._writes = 0
        self._num_calls = 0

    # ---------------------------------------------------------------- tasks

    @classmethod
    def tasks(cls, split: str, domain: str = "+".join(DOMAINS)) -> Sequence[Task]:
        """Tasks of `"train"` (178) or `"test"` (100), domain after domain as the paper joins them.

        The family is the domain. A task id is the domain and the benchmark's own id: `"retail_12"`.

        Args:
            split: `"train"` or `"test"`.
            domain: one or more of `retail`, `airline` and `telecom`, joined by `+`.

        Raises:
            UnknownSplitError: there is no such split.
            EnvAdapterError: there is no such domain.
            MissingDependencyError: the benchmark's package is not installed.
        """
        cls.check_split(split)
        return [Task(cls.name, task_id, family, split) for family, task_id in split_ids(split, parse_domains(domain))]

    @classmethod
    def check_requirements(cls) -> None:
        """Raise [`MissingDependencyError`] unless the package is installed and TAU2_CUSTOMER names a customer."""
        check_package()
        choose(None)

    @classmethod
    def check_task_id(cls, task_id: str) -> None:
        """Raise [`UnknownTaskError`] unless the id is that of a task, such as `retail_12`."""
        find(task_id)

    @classmethod
    def standing_messages(cls, task_id: str | None = None) -> list[dict[str, str]]:
        """The system message of a task: the instruction with the policy of its domain (paper C.5)."""
        if task_id is None:
            raise EnvAdapterError(
                "The system message of 'tau2' differs from domain to domain: pass `task_id`, for example 'retail_12'."
            )
        found, _ = find(task_id)
        return [{"role": "system", "content": cls.instruction.format(policy=found.policy)}]

    @classmethod
    def tools(cls, task_id: str | None = None) -> list[dict[str, Any]] | None:
        """OpenAI schemas of the agent's tools in a task, for the chat template to render."""
        if task_id is None:
            return None
        return copy.deepcopy(list(find(task_id)[0].tools))

    # ---------------------------------------------------------------- an episode

    def step(self, reply: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if isinstance(reply, str):
            self._num_calls = count_calls(reply)
        return super().step(reply)

    def expert_action(self) -> str | None:
        """What the task's own solution does next, as a whole reply."""
        return None if self._conversation is None else self._conversation.plan.expert_reply()

    def close(self) -> None:
        """End the environment; a `step` that waits for the customer gives up after its request. Any thread may."""
        super().close()
        conversation = self._conversation
        if conversation is not None:
            conversation.cancel()

    def _begin(self, task_id: str | None, seed: int | None) -> str:
        self._conversation = None
        check_package()
        settings = choose(**self._chosen)
        if task_id is None:
            ids = split_ids("train", DOMAINS)
            task_id = ids[int(self.np_random.integers(len(ids)))][1]
        found, task = find(task_id)
        self._writing_tools, self._writes, self._num_calls = found.writing_tools, 0, 0
        conversation = Conversation(load(), found.domain, task, settings)
        self._conversation = conversation
        if self._closed:
            raise EpisodeStateError("The 'tau2' environment was closed while it was to start a task.")
        return conversation.begin()

    def _act(self, action: Action) -> Outcome:
        conversation = self._conversation
        if conversation is None:
            raise EpisodeStateError("The 'tau2' environment has no task loaded; call `reset` first.")
        try:
            return self._call(conversation, action.text) if action.is_call else self._say(conversation, action.text)
        except Exception:
            self._playing = False  # what was said and done since is not known
            raise

    def _call(self, conversation: Conversation, span: str) -> Outcome:
        try:
            call = read_call(span)
        except MalformedCallError as error:
            # It reaches no tool and leaves no trace in the conversation that is evaluated.
            return Outcome(_tool_response(f"Error: {error}"), invalid=True, details={"malformed": True})
        answer, failed = conversation.call(call.name, call.arguments)
        wrote = not failed and call.name in self._writing_tools
        self._writes += wrote
        return Outcome(_tool_response(answer), invalid=failed, details={"tool": call.name, "wrote": wrote})

    def _say(self, conversation: Conversation, text: str) -> Outcome:
        answer = conversation.say(text.encode("utf-8", "replace").decode("utf-8"))
        if not conversation.ended_by:
            return Outcome(answer)
        verdict = conversation.evaluate()
        score = float(verdict.reward)
        details = {
            "ended_by": conversation.ended_by,
            "reward_basis": [basis.value for basis in verdict.reward_basis or ()],
            "reward_breakdown": {basis.value: value for basis, value in (verdict.reward_breakdown or {}).items()},
            "tau2_version": check_package(),
        }
        return Outcome(answer, score=score, success=score >= 1.0, done=True, details=details)

    def _info(self, outcome: Outcome, action: str) -> dict[str, Any]:
        always = {
            "has_call": self._num_calls > 0,
            "num_calls": self._num_calls,
            "malformed": False,
            "tool": None,
            "wrote": False,
            "writes": self._writes,
        }
        return {**always, **super()._info(outcome, action)}


def _tool_response(text: str) -> str:
    """A tool's answer as Qwen's chat template shows it: the other half of the protocol's `<tool_call>`."""
    return f"<tool_response>\n{text}\n</tool_response>"
