"""Steps per second in WebShop, build time of the shop, and memory of one more environment.

    python examples/benchmarks/webshop_speed.py [--root FOLDER] [--tasks 200] [--rounds 3]

Plays the scripted expert's episodes (recorded first, so that the expert is not timed) in the generated catalogue, or
with `--root` in a data folder. All times are CPU time of this process, which uses one core. The original is not run:
its 62 ms a step and 3.1 s to build are recorded figures, taken as CPU time on 1,000 products (BeautifulSoup, Jinja and
a Java search engine). Needs `pip install cope_trl[webshop]`. The last line is JSON.
"""

import argparse
import json
import time
import tracemalloc

from env_adapters.webshop import WebShopEnv
from env_adapters.webshop.shop import open_shop

ORIGINAL_STEP_MS = 62.0
ORIGINAL_BUILD_S = 3.1


def time_build(data: str, root: str | None) -> tuple[float, float]:
    """Seconds to read or make the catalogue, and to import the text libraries and build the search index."""
    start = time.process_time()
    shop = open_shop(data, root)
    middle = time.process_time()
    shop.index.search("lamp", 1)
    return middle - start, time.process_time() - middle


def record(env: WebShopEnv, task_ids: list[str]) -> dict[str, list[str]]:
    """The expert's actions in each task."""
    episodes: dict[str, list[str]] = {}
    for task_id in task_ids:
        env.reset(options={"task_id": task_id})
        actions, done = [], False
        while not done:
            actions.append(str(env.expert_action()))
            done = env.step(f"Action: {actions[-1]}")[2]
        episodes[task_id] = actions
    return episodes


def time_play(env: WebShopEnv, episodes: dict[str, list[str]]) -> tuple[float, float]:
    """Milliseconds a reset and a step."""
    steps, in_reset, in_step = 0, 0.0, 0.0
    for task_id, actions in episodes.items():
        start = time.process_time()
        env.reset(options={"task_id": task_id})
        in_reset += time.process_time() - start
        start = time.process_time()
        for action in actions:
            env.step(f"Action: {action}")
        in_step += time.process_time() - start
        steps += len(actions)
    return 1000 * in_reset / len(episodes), 1000 * in_step / steps


def second_environment_kb(task_id: str, data: str, root: str | None, count: int = 20) -> float:
    """Python memory of one more environment in the middle of an episode, in kB (10^3 bytes)."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    others = [WebShopEnv(data, root) for _ in range(count)]
    for other in others:
        other.reset(options={"task_id": task_id})
        other.step("Action: search[red lamp]")
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return used / count / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="data folder; the generated catalogue without it")
    parser.add_argument("--tasks", type=int, default=200, help="test tasks to play")
    parser.add_argument("--rounds", type=int, default=3, help="times each is played; the best round counts")
    args = parser.parse_args()
    data = "real" if args.root else "synthetic"
    catalogue, index = time_build(data, args.root)
    task_ids = [task.task_id for task in WebShopEnv.tasks("test", data=data, root=args.root)][: args.tasks]
    env = WebShopEnv(data, args.root)
    episodes = record(env, task_ids)
    reset, step = min((time_play(env, episodes) for _ in range(args.rounds)), key=lambda times: times[1])
    shop = open_shop(data, args.root)
    result = {
        "data": data,
        "products": len(shop.products),
        "goals": len(shop.goals),
        "build_s": round(catalogue + index, 2),
        "reset_ms": round(reset, 3),
        "step_ms": round(step, 3),
        "steps_per_s": round(1000 / step),
        "times_as_fast_as_original": round(ORIGINAL_STEP_MS / step, 1),
        "second_environment_kb": round(second_environment_kb(task_ids[0], data, args.root), 1),
    }
    print(f"{len(shop.products)} products, {len(shop.goals)} goals, {len(episodes)} episodes, one core, CPU time")
    print(f"{'':20}{'build, s':>10}{'reset, ms':>11}{'step, ms':>10}{'steps/s':>9}")
    print(f"{'adapter':20}{catalogue + index:10.2f}{reset:11.3f}{step:10.3f}{1000 / step:9.0f}")
    recorded = f"{ORIGINAL_BUILD_S:10.2f}{'-':>11}{ORIGINAL_STEP_MS:10.3f}{1000 / ORIGINAL_STEP_MS:9.0f}"
    print(f"{'original (recorded)':20}{recorded}")
    print(f"the adapter steps {ORIGINAL_STEP_MS / step:.0f} times as fast")
    print(f"one more environment takes {result['second_environment_kb']} kB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
