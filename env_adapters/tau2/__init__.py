"""τ²-bench: customer service in three domains, played against a simulated customer."""

from env_adapters.tau2.env import Tau2Env
from env_adapters.tau2.errors import CustomerError, MissingCustomerError

__all__ = ["CustomerError", "MissingCustomerError", "Tau2Env"]
