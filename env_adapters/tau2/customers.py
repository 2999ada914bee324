"""Who plays the customer: a language model behind an endpoint, or a script."""

import os
from dataclasses import dataclass, field
from typing import Any

from env_adapters.errors import did_you_mean
from env_adapters.tau2.errors import MissingCustomerError
from env_adapters.tau2.library import Library
from env_adapters.tau2.plan import Plan

SCRIPTED = "scripted"
PROVIDERS = ("openai", "hosted_vllm")
BOTH_WAYS = (
    'Name a language model behind an OpenAI-compatible endpoint, `customer="openai/gpt-4o-mini"` (the paper\'s) or '
    '`customer="hosted_vllm/NAME", api_base="http://localhost:8000/v1"`, or `customer="scripted"`, which replays the '
    "task's own solution offline (for tests and dry runs only). The environment variables TAU2_CUSTOMER, "
    "TAU2_CUSTOMER_API_BASE and TAU2_CUSTOMER_API_KEY do the same."
)


@dataclass(frozen=True, slots=True)
class CustomerSettings:
    """How the customer is played.

    Attributes:
        customer: `"scripted"`, or a model as LiteLLM names it: `"openai/NAME"` or `"hosted_vllm/NAME"`.
        api_base: address of the endpoint, or `None` for the provider's own.
        api_key: key of the endpoint, or `None` for the provider's own environment variable.
        temperature: sampling temperature of the model (paper A.3: 0.7).
        timeout: deadline of one request, in seconds.
        attempts: requests made for one answer before the episode is given up.
    """

    customer: str
    api_base: str | None = None
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.7
    timeout: float = 60.0
    attempts: int = 5


def choose(
    customer: str | None,
    api_base: str | None = None,
    api_key: str | None = None,
    **options: Any,
) -> CustomerSettings:
    """Settings from arguments, and from environment variables where an argument is `None`.

    Raises:
        MissingCustomerError: nothing was chosen, or something that cannot play a customer.
    """
    source = "`customer`" if customer is not None else "The environment variable TAU2_CUSTOMER"
    customer = customer if customer is not None else os.environ.get("TAU2_CUSTOMER")
    if not customer:
        raise MissingCustomerError(
            f"The environment 'tau2' needs a simulated customer, but none was chosen. {BOTH_WAYS}"
        )
    api_base = api_base or os.environ.get("TAU2_CUSTOMER_API_BASE") or None
    api_key = api_key or os.environ.get("TAU2_CUSTOMER_API_KEY") or None
    if customer != SCRIPTED:
        provider, _, model = str(customer).partition("/")
        if provider not in PROVIDERS or not model:
            known = [SCRIPTED, *(f"{name}/NAME" for name in PROVIDERS)]
            raise MissingCustomerError(
                f"{source} is {customer!r}, but a customer is one of {known}.{did_you_mean(customer, known)} "
                + BOTH_WAYS
            )
        _check_reachable(customer, provider, api_base, api_key)
    return CustomerSettings(str(customer), api_base, api_key, **options)


def _check_reachable(customer: str, provider: str, api_base: str | None, api_key: str | None) -> None:
    if provider == "hosted_vllm" and not (api_base or os.environ.get("HOSTED_VLLM_API_BASE")):
        raise MissingCustomerError(
            f"The customer is {customer!r}, but the address of its endpoint is not known. Pass `api_base` or set "
            "TAU2_CUSTOMER_API_BASE, for example to http://localhost:8000/v1."
        )
    if provider == "openai" and not (api_base or api_key or os.environ.get("OPENAI_API_KEY")):
        raise MissingCustomerError(
            f"The customer is {customer!r}, but there is no key for it. Pass `api_key`, or set TAU2_CUSTOMER_API_KEY "
            "or OPENAI_API_KEY; for an endpoint of your own, pass `api_base` or set TAU2_CUSTOMER_API_BASE."
        )


def make_customer(settings: CustomerSettings, library: Library, task: Any, tools: list[Any] | None, plan: Plan) -> Any:
    """A customer for one conversation.

    Args:
        settings: who plays it.
        library: the benchmark's package.
        task: the benchmark's task.
        tools: the customer's own tools, or `None` in domains where customers have none.
        plan: the task's solution, which only a scripted customer looks at.

    Returns:
        What the benchmark's orchestrator takes for a user, with a method `cancel` that any thread may call.
    """
    if settings.customer == SCRIPTED:
        from env_adapters.tau2.scripted import ScriptedCustomer

        return ScriptedCustomer(library, task, tools, plan)
    from env_adapters.tau2.endpoint import EndpointCustomer

    return EndpointCustomer(library, task, tools, settings)
