"""Start, reset, step, score and memory of AppWorld, one environment and several at once.

    python examples/benchmarks/appworld_speed.py [--root FOLDER] [--python INTERPRETER] [--workers 4] [--episodes 20]

Plays training tasks in AppWorld's own engine: look around, call APIs, complete the task without doing it. Times are of
the wall clock, medians where there are several; those named CPU are the player's processor time (a mean over its
steps). Memory is the private part of each process (what it would give back) and the whole of the warm process that all
of them share. Needs `cope-trl envs install appworld` and a data root; the last line is JSON.
"""

import argparse
import json
import os
import statistics
import threading
import time
import warnings
from pathlib import Path

from env_adapters.appworld import AppWorldEnv

LOOK = (
    "print(apis.supervisor.show_profile())",
    "print(apis.api_docs.show_app_descriptions())",
    "print(apis.api_docs.show_api_doc(app_name='spotify', api_name='login'))",
    "numbers = [n * n for n in range(1000)]",
    "print(sum(numbers))",
)
DONE = "apis.supervisor.complete_task(answer='nothing')"


def memory_mb(pid: int | None, field: str) -> float:
    """A field of the kernel's account of a process, in MB (2^20 bytes)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def cpu_seconds(pid: int | None) -> float:
    """Processor time a process has used, which other load on the machine lengthens less than the wall clock."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(function, *args, **kwargs):
    start = time.perf_counter()
    result = function(*args, **kwargs)
    return time.perf_counter() - start, result


def play(env: AppWorldEnv, task_ids: list[str], times: dict[str, list[float]]) -> None:
    """Play the tasks, and add what each reset, step and last step with its scoring took, in seconds."""
    for task_id in task_ids:
        times["reset"].append(timed(env.reset, options={"task_id": task_id})[0])
        times["private MB"].append(memory_mb(env.player_pid, "Private"))
        times["reset CPU"].append(used := cpu_seconds(env.player_pid))
        for code in LOOK:
            times["step"].append(timed(env.step, f"```python\n{code}\n```")[0])
        times["step CPU"].append((cpu_seconds(env.player_pid) - used) / len(LOOK))
        times["last step and score"].append(timed(env.step, f"```python\n{DONE}\n```")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="data root; default as for the environment")
    parser.add_argument("--python", help="AppWorld's interpreter; default as for the environment")
    parser.add_argument("--workers", type=int, default=4, help="environments in parallel in the second part")
    parser.add_argument("--episodes", type=int, default=20, help="episodes of one environment in the first part")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "AppWorld's split")  # a test root has fewer tasks, and the same speed
    ids = [task.task_id for task in AppWorldEnv.tasks("train", root=args.root)]

    env = AppWorldEnv(root=args.root, python=args.python)
    start, _ = timed(env.reset, options={"task_id": ids[0]})
    warm = env.warm_pid
    before = memory_mb(warm, "Rss")
    measured = ("reset", "reset CPU", "step", "step CPU", "last step and score", "private MB")
    times: dict[str, list[float]] = {name: [] for name in measured}
    whole, _ = timed(play, env, [ids[n % len(ids)] for n in range(args.episodes)], times)
    result: dict[str, float | int] = {"start_s": round(start, 2)}
    for name in measured[:-1]:
        result[f"{name.lower().replace(' ', '_')}_s"] = round(statistics.median(times[name]), 4)
    result["step_s_slowest"] = round(max(times["step"]), 4)
    result["episodes_per_minute"] = round(60 * args.episodes / whole, 1)
    result["player_private_mb_first"] = round(times["private MB"][0], 1)
    result["player_private_mb_last"] = round(times["private MB"][-1], 1)
    result["warm_mb_before"] = round(before, 1)
    result["warm_mb_after"] = round(memory_mb(warm, "Rss"), 1)

    environments = [AppWorldEnv(root=args.root, python=args.python) for _ in range(args.workers)]
    share = max(1, args.episodes // args.workers)
    others: dict[str, list[float]] = {name: [] for name in times}
    threads = [
        threading.Thread(target=play, args=(one, [ids[n % len(ids)] for n in range(share)], others))
        for one in environments
    ]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    together, _ = timed(run)
    result["load_average"] = round(os.getloadavg()[0], 1)
    result["workers"] = args.workers
    result["workers_episodes_per_minute"] = round(60 * share * args.workers / together, 1)
    result["workers_step_s"] = round(statistics.median(others["step"]), 4)
    for one in [env, *environments]:
        one.close()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
