"""ScienceWorld, the elementary-science text world, played by one small Java process an environment."""

from env_adapters.scienceworld.env import ScienceWorldEnv, gold_actions

__all__ = ["ScienceWorldEnv", "gold_actions"]
