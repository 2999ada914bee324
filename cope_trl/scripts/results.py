"""Where a command leaves its numbers."""

import json
import os
from pathlib import Path
from typing import Any


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """Write `results.json` into a folder, whole or not at all."""
    temporary = folder / "results.json.tmp"
    temporary.write_text(json.dumps(results, indent=2), encoding="utf-8")
    os.replace(temporary, folder / "results.json")
