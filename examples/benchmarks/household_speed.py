"""
Steps a second of the embedded household, one environment on one core.

    python examples/benchmarks/household_speed.py

Plays whole episodes by the expert's commands, recorded beforehand, so that every timed step is a valid one. Prints the
rate with and without the list of admissible actions, and one JSON line.
"""

import argparse
import json
import time

from env_adapters.household import HouseholdEnv


def recorded(tasks: int) -> list[tuple[str, list[str]]]:
    """Task ids with the replies that solve them."""
    env, episodes = HouseholdEnv(), []
    for task in HouseholdEnv.tasks("train")[:tasks]:
        env.reset(options={"task_id": task.task_id})
        replies, done = [], False
        while not done:
            replies.append(f"Action: {env.expert_action()}")
            done = env.step(replies[-1])[2]
        episodes.append((task.task_id, replies))
    return episodes


def steps_per_second(episodes: list[tuple[str, list[str]]], seconds: float, admissible: bool) -> float:
    """Steps by the time they took, resets not counted."""
    env, steps, spent = HouseholdEnv(), 0, 0.0
    while spent < seconds:
        for task_id, replies in episodes:
            env.reset(options={"task_id": task_id, "admissible_actions": admissible})
            started = time.perf_counter()
            for reply in replies:
                env.step(reply)
            spent += time.perf_counter() - started
            steps += len(replies)
    return steps / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps, for each of the two figures")
    args = parser.parse_args()
    episodes = recorded(args.tasks)
    result = {
        "tasks": len(episodes),
        "steps_per_second": round(steps_per_second(episodes, args.seconds, admissible=False)),
        "steps_per_second_with_admissible_actions": round(steps_per_second(episodes, args.seconds, admissible=True)),
    }
    plain, listed = (f"{value:,}" for name, value in result.items() if name != "tasks")
    print(f"{plain} steps/s; {listed} with the list of admissible actions")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
