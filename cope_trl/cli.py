"""The `cope-trl` command."""

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status.

    Errors this package raises on purpose are printed as one line; any other one keeps its traceback.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="cope-trl", description="Train and evaluate language agents with action forecasting."
    )
    parser.add_argument(
        "command", choices=["train", "eval", "envs"], help="what to do; `cope-trl COMMAND --help` for more"
    )
    parser.add_argument("--version", action="version", version=_version())
    if not argv or argv[0].startswith("-"):
        parser.parse_args(argv or ["--help"])
    command = parser.parse_args(argv[:1]).command
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Deprecation notes of libraries about each other are nothing a user of this command can act on.
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("cope_trl").setLevel(logging.INFO)
    from cope_trl.errors import CoPEError
    from env_adapters.errors import EnvAdapterError

    try:
        _run(command, argv[1:])
    except (CoPEError, EnvAdapterError) as error:
        print(f"cope-trl {command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _run(command: str, argv: list[str]) -> None:
    if command == "train":
        from cope_trl.scripts.train import main as train

        train(argv)
    elif command == "eval":
        from cope_trl.scripts.evaluate import main as evaluate

        evaluate(argv)
    else:
        from cope_trl.scripts.envs import main as envs

        envs(argv)


def _version() -> str:
    from cope_trl import __version__

    return f"cope-trl {__version__}"


if __name__ == "__main__":
    raise SystemExit(main())
