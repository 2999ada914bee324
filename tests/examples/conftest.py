"""The benchmarks are scripts that import one another from their own folder; here that folder is on the path."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "examples" / "benchmarks"), str(HERE)]  # processes started by a test see both
