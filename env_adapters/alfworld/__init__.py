"""ALFWorld, household tasks in text games, played by a faster copy of its own engine."""

from env_adapters.alfworld.env import AlfWorldEnv

__all__ = ["AlfWorldEnv"]
