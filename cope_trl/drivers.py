"""Who rolls out: this package, which plays the environments that the rows name, or one of TRL's own loops."""

from collections.abc import Mapping
from typing import Any

from cope_trl.data.tasks import dataset_columns
from cope_trl.errors import ConfigError

# The rows name environments, this package plays them.
OWN = "environments"
# One completion a prompt.
SINGLE_TURN = "single_turn"


def find_driver(loops: Mapping[str, Any], environments: Any, dataset: Any, reward_funcs: Any, success_fn: Any) -> str:
    """Name of the argument that decides how episodes come about, [`OWN`] or [`SINGLE_TURN`].

    Args:
        loops: TRL's own `tools`, `rollout_func` and `environment_factory`, as the user passed them.
        environments: factories for this package's rollouts.
        dataset: the training dataset.
        reward_funcs, success_fn: as the user passed them.

    Raises:
        ConfigError: two ways were asked for at once, or an argument that only another way uses.
    """
    # TRL takes an empty list of tools for none.
    given = [name for name in ("rollout_func", "environment_factory", "tools") if loops.get(name)]
    if environments and given:
        raise ConfigError(
            f"`environments` and `{given[0]}` are both given. `environments` are played by this trainer, row by row "
            f"(columns 'environment' and 'task_id'); `{given[0]}` is run by TRL. Pass one of them."
        )
    driver = given[0] if given else OWN
    if driver == OWN and not environments and dataset is not None and reward_funcs is not None:
        columns = dataset_columns(dataset)
        if "environment" not in columns and "task_id" not in columns:
            driver = SINGLE_TURN
    if driver == OWN and success_fn is not None:
        raise ConfigError(
            "`success_fn` is given, but these episodes are played in environments that decide success themselves. "
            "Leave it out; it serves `tools`, `environment_factory`, `rollout_func` and single-turn training."
        )
    return driver
