"""Steps per second in ScienceWorld: this package's adapter against the simulator's stock Python `step()`, in one run.

    python examples/benchmarks/scienceworld_speed.py [--stock-steps 20]

Both play the same gold paths (successful episodes), the adapter first. Each gets a Java process of its own, and only
one of the two exists at a time. Loading a task is timed apart. Needs `pip install cope_trl[scienceworld]` and Java.
"""

import argparse
import time
from pathlib import Path
from typing import Any

from env_adapters.scienceworld import ScienceWorldEnv, gold_actions
from env_adapters.scienceworld.splits import draw_split

TASK_TYPES = ("find-living-thing", "use-thermometer", "power-component", "lifespan-longest-lived")


def resident_mb(pid: int | None) -> str:
    """Peak resident memory of a process, in MB (2^20 bytes); a dash where there is no /proc."""
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        return "-"
    peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    return str(int(peak.split()[1]) // 1024)


def time_adapter(episodes: dict[str, list[str]], rounds: int) -> tuple[float, float, str]:
    """Seconds a reset, steps a second, and memory of the Java process."""
    env = ScienceWorldEnv()
    env.reset(options={"task_id": "0"})  # starts Java
    resets, steps, in_reset, in_step = 0, 0, 0.0, 0.0
    for _ in range(rounds):
        for task_id, path in episodes.items():
            start = time.perf_counter()
            env.reset(options={"task_id": task_id})
            in_reset += time.perf_counter() - start
            resets += 1
            start = time.perf_counter()
            for action in path:
                steps += 1
                if env.step(f"Action: {action}")[2]:
                    break
            in_step += time.perf_counter() - start
    memory = resident_mb(env.java_pid)
    env.close()
    return in_reset / resets, steps / in_step, memory


def time_stock(episodes: dict[str, list[str]], limit: int) -> tuple[float, float, str]:
    """The same for the simulator's own Python class, as installed; stops after `limit` steps."""
    from scienceworld import ScienceWorldEnv as Stock

    entries = {entry.task_id: entry for entry in draw_split("all")}
    env: Any = Stock("boil")
    resets, steps, in_reset, in_step = 0, 0, 0.0, 0.0
    for task_id, path in episodes.items():
        start = time.perf_counter()
        env.load(entries[task_id].task_type, entries[task_id].variation)
        env.reset()
        in_reset += time.perf_counter() - start
        resets += 1
        start = time.perf_counter()
        for action in path[: limit // len(episodes)]:
            steps += 1
            if env.step(action)[2]:
                break
        in_step += time.perf_counter() - start
    process = env._gateway.java_process
    memory = resident_mb(process.pid)
    env.close()
    process.wait(timeout=60)
    return in_reset / resets, steps / in_step, memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="times the adapter plays each episode")
    parser.add_argument("--stock-steps", type=int, default=40, help="steps the stock class is timed on")
    args = parser.parse_args()
    ids = {entry.task_type: entry.task_id for entry in reversed(draw_split("all"))}  # variation 0 of each type
    episodes = {ids[name]: gold_actions(ids[name]) for name in TASK_TYPES}
    rows = {"adapter": time_adapter(episodes, args.rounds), "stock step()": time_stock(episodes, args.stock_steps)}
    print(f"{'':14}{'reset, s':>10}{'steps/s':>10}{'Java RSS, MB':>14}")
    for name, (reset, speed, memory) in rows.items():
        print(f"{name:14}{reset:10.2f}{speed:10.1f}{memory:>14}")
    print(f"the adapter steps {rows['adapter'][1] / rows['stock step()'][1]:.1f} times as fast")


if __name__ == "__main__":
    main()
