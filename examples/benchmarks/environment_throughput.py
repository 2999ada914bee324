"""
Steps per second and memory of 1 to 32 environments at once, and of the stock packages' own step, in one run.

    python examples/benchmarks/environment_throughput.py --environments household,scienceworld --counts 1,8,32

Plays recorded, valid replies. First one environment in this thread, in turns with the stock package where there is one
("direct", "stock"). Then N environments in the threads of a rollout's pool: all play the same task at once, as a group
of GRPO does, turn by turn. Resets are timed apart. CPU time is that of this process and of everything it started;
memory is the proportional set size of the same processes. Each adapter gets a process of its own; what is not
installed is skipped, and says why. Prints tables; writes `environment_throughput.json` and `.png` to `--output_dir`.
ALFWorld makes games where there are none; AppWorld needs its interpreter and a data root (docs/environments).
"""

import argparse
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from environment_players import Play, prepared

from cope_trl.rollout.pool import Call, EnvHandle, EnvironmentPool, Failure
from env_adapters.errors import EnvAdapterError

ENVIRONMENTS = ("household", "scienceworld", "alfworld", "webshop", "tau2", "appworld")
COUNTS = (1, 2, 4, 8, 16, 32)
LEAST_FREE_MB = 3 * 1024  # of the machine's memory, in MB (2^20 bytes)


class Processes:
    """This process and all it started, as they were at the last `refresh`."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._all = [self._own]
        self.refresh()

    def refresh(self) -> None:
        self._all = [self._own, *self._own.children(recursive=True)]

    def cpu(self) -> float:
        """Seconds of processor time, those of ended children included where their parent waited for them."""
        ended = sum(self._own.cpu_times()[2:4])
        running = sum(sum(times[:4]) for times in self._each(psutil.Process.cpu_times, self._all[1:]))
        return time.process_time() + ended + running  # this process's own time in finer steps than the kernel's ticks

    def memory_mb(self) -> float:
        """Proportional set size, or where the system has none the resident one, in MB (2^20 bytes)."""
        infos = self._each(psutil.Process.memory_full_info, self._all)
        return sum(getattr(info, "pss", info.rss) for info in infos) / 2**20

    def largest_child_mb(self) -> float:
        """Peak resident size of the largest child; 0 where there is no child or no /proc."""
        return max(self._each(_peak_mb, self._all[1:]), default=0.0)

    @staticmethod
    def _each(read: Callable[[psutil.Process], Any], processes: list[psutil.Process]) -> list[Any]:
        found = []
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, OSError):
                found.append(read(process))
        return found


def _peak_mb(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


@dataclass
class Clock:
    """Adds up steps, and the seconds and processor seconds they took."""

    steps: int = 0
    wall: float = 0.0
    cpu: float = 0.0

    def add(self, steps: int, wall: float, cpu: float) -> None:
        self.steps += steps
        self.wall += wall
        self.cpu += max(0.0, cpu)  # the account of a process that has ended is lost unless its parent waited for it

    def row(self) -> dict[str, float]:
        return {
            "steps": self.steps,
            "steps_per_s": _significant(self.steps / self.wall),
            "cpu_ms_per_step": _significant(1000 * self.cpu / self.steps),
        }


def _significant(value: float, digits: int = 4) -> float:
    return round(value, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0.0


def rounds(episodes: Iterable[Any], seconds: float, warm_up: int, spent: Callable[[], float]) -> Iterable[tuple]:
    """Every episode, and whether it is timed: `warm_up` rounds that are not, then whole rounds for `seconds`."""
    episodes = list(episodes)
    number = 0
    while number <= warm_up or spent() < seconds:
        for episode in episodes:
            yield episode, number >= warm_up
        number += 1


# ---------------------------------------------------------------- one environment, and the stock one


def compare(play: Play, seconds: float, warm_up: int) -> dict[str, Any]:
    """One environment without a pool, taking turns with the stock package, episode by episode."""
    env = play.make()
    stock = play.stock() if play.stock is not None else None
    sides: dict[str, tuple[Callable[[str], Any], Callable[[str], Any]]] = {
        "direct": (lambda task_id: env.reset(options={"task_id": task_id}), env.step)
    }
    if stock is not None:
        sides["stock"] = (stock.reset, stock.step)
    clocks = {side: Clock() for side in sides}
    processes = Processes()
    for (task_id, replies), timed in rounds(
        play.episodes.items(), seconds, warm_up, lambda: min(clock.wall for clock in clocks.values())
    ):
        for side, (reset, step) in sides.items():
            reset(task_id)
            processes.refresh()
            cpu, wall = processes.cpu(), time.perf_counter()
            for reply in replies:
                step(reply)
            wall = time.perf_counter() - wall
            if timed:
                clocks[side].add(len(replies), wall, processes.cpu() - cpu)
    result: dict[str, Any] = {side: clock.row() for side, clock in clocks.items()}
    env.close()
    if stock is None:
        return {**result, "why_no_stock": play.why_no_stock}
    stock.close()
    direct, slow = result["direct"], result["stock"]
    result["times_as_fast"] = _significant(direct["steps_per_s"] / slow["steps_per_s"], 3)
    result["times_as_fast_by_cpu"] = _significant(slow["cpu_ms_per_step"] / direct["cpu_ms_per_step"], 3)
    return result


# ---------------------------------------------------------------- many environments in a pool


def checked(results: list[Any]) -> list[Any]:
    for result in results:
        if isinstance(result, Failure):
            raise RuntimeError(result.message) from result.cause
        if result[-1]["invalid"]:
            raise RuntimeError(f"a recorded reply is not valid any more: {result[-1]}")
    return results


def play_at_once(pool: EnvironmentPool, handles: list[EnvHandle], play: Play, seconds: float) -> dict[str, float]:
    """Rates of these environments, all of which play each task together; one untimed round comes first."""
    clock, processes, memory = Clock(), Processes(), 0.0
    resets, in_reset = 0, 0.0
    for (task_id, replies), timed in rounds(play.episodes.items(), seconds, 1, lambda: clock.wall):
        start = time.perf_counter()
        checked(pool.run([Call(handle, "reset", kwargs={"options": {"task_id": task_id}}) for handle in handles]))
        wall = time.perf_counter() - start
        if timed:
            resets, in_reset = resets + len(handles), in_reset + wall
        # In two parts: some processes live until the last reply, and their memory is read before it.
        for part in (replies[:-1], replies[-1:]):
            processes.refresh()
            memory = max(memory, processes.memory_mb())
            cpu, start = processes.cpu(), time.perf_counter()
            for reply in part:
                checked(pool.run([Call(handle, "step", (reply,)) for handle in handles]))
            wall = time.perf_counter() - start
            if timed:
                clock.add(len(handles) * len(part), wall, processes.cpu() - cpu)
    row = {"environments": len(handles), **clock.row(), "resets_per_s": _significant(resets / in_reset)}
    return {**row, "memory_mb": memory, "largest_child_peak_mb": processes.largest_child_mb()}


def curve(name: str, play: Play, counts: list[int], seconds: float) -> dict[str, Any]:
    """The rows for each count, ascending; ends early where the machine's memory would run out."""
    pool = EnvironmentPool(lambda _: play.make(), timeout=600.0)
    handles: list[EnvHandle] = []
    rows: list[dict[str, float]] = []
    result: dict[str, Any] = {"counts": rows}
    empty = Processes().memory_mb()
    try:
        for count in sorted(counts):
            each = rows[-1]["mb_each"] if rows else 0.0
            free = psutil.virtual_memory().available / 2**20 - each * (count - len(handles))
            if free < LEAST_FREE_MB:
                result["stopped"] = f"{count} environments would leave {free:.0f} MB of memory, less than 3 GiB"
                break
            handles.extend(pool.acquire(name) for _ in range(count - len(handles)))
            row = play_at_once(pool, handles, play, seconds)
            base, others = (rows[0]["memory_mb"], count - rows[0]["environments"]) if rows else (empty, count)
            row["mb_each"] = (row["memory_mb"] - base) / others
            rows.append(row)
    finally:
        for handle in handles:
            pool.release(handle)
        pool.close()
    for row in rows:
        row.update({key: round(row[key], 2) for key in ("memory_mb", "mb_each", "largest_child_peak_mb")})
    return result


def measure(name: str, counts: list[int], seconds: float, warm_up: int) -> dict[str, Any]:
    """Everything about one adapter; runs in a process of its own."""
    try:
        with prepared(name) as play:
            return {**curve(name, play, counts, seconds), **compare(play, seconds, warm_up)}
    except EnvAdapterError as error:
        return {"skipped": str(error)}


# ---------------------------------------------------------------- what is shown


def table(name: str, result: dict[str, Any]) -> str:
    if "skipped" in result:
        return f"{name}: skipped. {result['skipped']}\n"
    lines = [f"{name:16}{'steps/s':>10}{'CPU ms/step':>13}{'resets/s':>10}{'MB each':>9}{'MB, largest child':>19}"]
    for side in ("stock", "direct"):
        if side in result:
            lines.append(f"  {side:14}{result[side]['steps_per_s']:10.4g}{result[side]['cpu_ms_per_step']:13.4g}")
    for row in result["counts"]:
        lines.append(
            f"  N = {row['environments']:<10}{row['steps_per_s']:10.4g}{row['cpu_ms_per_step']:13.4g}"
            f"{row['resets_per_s']:10.4g}{row['mb_each']:9.1f}{row['largest_child_peak_mb'] or '-':>19}"
        )
    if "times_as_fast" in result:
        lines.append(
            f"  direct is {result['times_as_fast']} times as fast as stock by the clock, "
            f"{result['times_as_fast_by_cpu']} times by processor time"
        )
    else:
        lines.append(f"  not compared: {result['why_no_stock']}")
    if "stopped" in result:
        lines.append(f"  ended early: {result['stopped']}")
    return "\n".join(lines) + "\n"


def draw(results: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    speed, memory = figure.subplots(1, 2)
    for name, result in results.items():
        rows = result.get("counts", [])
        numbers = [row["environments"] for row in rows]
        for axes, key in ((speed, "steps_per_s"), (memory, "mb_each")):
            axes.plot(numbers, [row[key] for row in rows], marker="o", label=name)
    for axes, label in ((speed, "steps per second, all together"), (memory, "MB of one more environment")):
        axes.set(
            xlabel="environments at once", ylabel=label, xscale="log", yscale="symlog" if axes is memory else "log"
        )
        axes.set_xticks(COUNTS, [str(count) for count in COUNTS])
    if results:
        speed.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environments", default=",".join(ENVIRONMENTS), help="registry names, joined by commas")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="environments at once")
    parser.add_argument("--seconds", type=float, default=2.0, help="of steps for each figure; whole rounds of tasks")
    parser.add_argument("--warm_up", type=int, default=2, help="untimed rounds before direct and stock are timed")
    parser.add_argument("--output_dir", default="out/benchmarks")
    args = parser.parse_args()
    counts = sorted({int(count) for count in args.counts.split(",")})
    spawn = multiprocessing.get_context("spawn")
    results = {}
    for name in args.environments.split(","):
        started = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=spawn) as executor:
            results[name] = executor.submit(measure, name, counts, args.seconds, args.warm_up).result()
        results[name]["seconds"] = round(time.perf_counter() - started, 1)
        print(table(name, results[name]), flush=True)
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    report = {"cpu_count": os.cpu_count(), "load_average": os.getloadavg()[0], "environments": results}
    (folder / "environment_throughput.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(results, folder / "environment_throughput.png")
    print(f"Written: {folder / 'environment_throughput.json'} and .png")


if __name__ == "__main__":
    main()
