"""
One CUDA GPU in under four minutes: forecasting engines, rollouts, a whole step, vLLM. Writes one JSON file.

    python examples/benchmarks/gpu_check.py [--budget 230] [--tiny] [--output_dir out/benchmarks]

A random model of Qwen2-0.5B's shape in bfloat16, synthetic episodes, no network. The parts:

- update: the steps of a real `train()` on the same scripted episodes: policy only, with forecasting in the shared
  forward, and with forecasting as separate sequences; time, peak CUDA memory, and whether the losses agree;
- rollout: episodes with the KV cache kept from turn to turn, and with the history computed anew in every turn;
- train_step: rollout, loss and AdamW, all real;
- update_flex: as update, in the shared forward by FlexAttention, which is compiled first;
- vllm: the rollout on a colocated vLLM, where that is installed.

Every part has a process and a time limit of its own. What it has measured so far is in gpu_check.json at once, so
that a part which fails or hangs loses nothing but itself. `--tiny` tries everything out on a CPU.
"""

import argparse
import dataclasses
import importlib.util
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import apart
import measuring
from gpu_parts import NEEDS, PARTS, TINY, Sizes, run_part


def note(part: dict[str, Any], result: dict[str, Any], values: dict[str, Any]) -> None:
    """Put what a part reports where it belongs: single steps and rounds are collected, everything else is set."""
    if "about" in values:
        result["about"] = values["about"]
        return
    mode = part["modes"].setdefault(values.pop("mode"), {})
    for name, value in values.items():
        if name in ("step", "round"):
            mode.setdefault(f"{name}s", []).append(value)
        else:
            mode[name] = value


def step_seconds(step: Mapping[str, float]) -> float:
    """Seconds of an optimizer step without its rollout."""
    return step["step/seconds"] - step.get("time/rollout", 0.0)


def summarize(parts: Mapping[str, Any], tolerance: float) -> dict[str, Any]:
    """One figure a mode, and the ratios between them; what was not measured is left out.

    Args:
        parts: name → part with its `modes`.
        tolerance: largest relative difference of two engines' figures that still counts as agreement.
    """

    def modes(*names: str, having: str) -> dict[str, Any]:
        found = {mode: values for name in names for mode, values in parts.get(name, {}).get("modes", {}).items()}
        return {mode: values[having] for mode, values in found.items() if values.get(having)}

    steps, rounds = modes("update", "update_flex", having="steps"), modes("rollout", "vllm", having="rounds")
    # The first step compiles, allocates and warms up.
    seconds = {mode: min(map(step_seconds, values[1:])) for mode, values in steps.items() if values[1:]}
    played = {mode: min(one["seconds"] for one in values) for mode, values in rounds.items()}
    memory = {mode: max(step.get("step/cuda_mib", 0.0) for step in values) for mode, values in steps.items()}
    return {
        "update: seconds": seconds,
        "update: over policy only": ratios(seconds, "policy only"),
        "update: over shared prefix": ratios(seconds, "shared prefix"),
        "update: peak CUDA memory, MiB": memory if any(memory.values()) else {},
        "rollout: seconds": played,
        "rollout: over kept cache": ratios(played, "kept cache"),
        "rollout: every episode whole": {m: all(one["whole"] for one in values) for m, values in rounds.items()},
        **agreement({mode: values[0] for mode, values in steps.items()}, tolerance),
    }


def agreement(first: Mapping[str, Mapping[str, float]], tolerance: float) -> dict[str, Any]:
    """How far the modes' figures of the first step are from those of the shared prefix, relatively.

    Args:
        first: mode → what was logged of its first step.
        tolerance: largest difference that still counts as agreement.
    """
    differences: dict[str, Any] = {}
    for key in ("forecast/loss", "forecast/nll_k0", "forecast/nll_k1", "forecast/nll_k2", "grad_norm", "entropy"):
        base = first.get("shared prefix", {}).get(key)
        if not base:
            continue
        # Without forecasting the gradient is another one.
        others = [m for m in first if m != "shared prefix" and not (key == "grad_norm" and m == "policy only")]
        off = {mode: abs(first[mode][key] / base - 1) for mode in others if key in first[mode]}
        differences[f"{key}: relative difference from shared prefix"] = off
        allowed = 20 * tolerance if key == "grad_norm" else tolerance  # a norm in bfloat16 has 8 bits
        differences[f"{key}: agrees"] = {mode: value <= allowed for mode, value in off.items()}
    return differences


def ratios(values: Mapping[str, float], base: str) -> dict[str, float]:
    """Each value over that of `base`; empty without it."""
    return {name: value / values[base] for name, value in values.items() if name != base} if base in values else {}


def summary_table(summary: Mapping[str, Any]) -> str:
    rows = []
    for name, value in summary.items():
        pairs = value.items() if isinstance(value, Mapping) else [("", value)]
        rows += [(name, mode, one) for mode, one in pairs]
    return measuring.markdown_table(["figure", "mode", "value"], rows)


def check(names: Sequence[str], sizes: Sizes, budget: float, path: Path, here: bool = False) -> dict[str, Any]:
    """Run the parts one after another; everything reported is in the file at `path` at once.

    Args:
        names: of [`PARTS`].
        sizes: what is run.
        budget: seconds for all of them.
        path: of the JSON file.
        here: run them in this process, without time limits.
    """
    started = time.monotonic()
    result: dict[str, Any] = {"sizes": dataclasses.asdict(sizes), "about": {}, "parts": {}, "summary": {}}
    for name in names:
        part: dict[str, Any] = {"modes": {}, "seconds": 0.0, "error": None}
        result["parts"][name] = part

        def save(values: dict[str, Any], part: dict[str, Any] = part) -> None:
            note(part, result, values)
            measuring.save_json(path, result)

        limit = min(PARTS[name][1], budget - (time.monotonic() - started))
        asked = {"name": name, "sizes": sizes, "seconds": limit * 0.7}
        if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
            ending = apart.Ending(0.0, f"{NEEDS[name]} is not installed")
        elif limit < 5:
            ending = apart.Ending(0.0, f"not begun: the budget of {budget:.0f} s is used up")
        elif here:
            ending = apart.run_here(run_part, save, **asked)
        else:
            ending = apart.run_apart(run_part, save, timeout=limit, fork=False, **asked)
        part |= {"seconds": ending.seconds, "error": ending.error}
        measuring.save_json(path, result)
        print(f"{name}: {ending.seconds:.0f} s", flush=True)
        for where, error in {"": ending.error, **{m: v.get("error") for m, v in part["modes"].items()}}.items():
            if error:
                print(f"{name} {where} failed: {error}", flush=True)
    result["summary"] = summarize(result["parts"], sizes.tolerance)
    measuring.save_json(path, result)
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path(measuring.OUTPUT_DIR))
    parser.add_argument("--budget", type=float, default=230.0, help="seconds for all parts together")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--episodes", type=int, help="of a batch; fewer fit a smaller GPU")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on a CPU")
    parser.add_argument("--here", action="store_true", help="all in this process, without time limits")
    args = parser.parse_args(arguments)
    # For the parts' processes: one GPU, and nothing is asked of the network.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"
    sizes = TINY if args.tiny else Sizes()
    if args.episodes:
        sizes = dataclasses.replace(sizes, episodes=args.episodes)
    path = args.output_dir / "gpu_check.json"
    result = check(args.parts, sizes, args.budget, path, args.here)
    print(summary_table(result["summary"]))
    print(path)
    return result


if __name__ == "__main__":
    main()
