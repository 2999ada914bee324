"""The embedded household environment and its scripted expert."""

from env_adapters.household.env import HouseholdEnv
from env_adapters.household.expert import HouseholdExpert, expert_actions

__all__ = ["HouseholdEnv", "HouseholdExpert", "expert_actions"]
