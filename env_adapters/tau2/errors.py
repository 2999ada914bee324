"""What may go wrong with a simulated customer."""

from env_adapters.errors import EnvAdapterError, MissingDependencyError


class MissingCustomerError(MissingDependencyError):
    """No simulated customer was chosen, or what was chosen cannot be one."""


class CustomerError(EnvAdapterError, RuntimeError):
    """The simulated customer gave no usable answer: the episode is lost, through no fault of the agent."""
