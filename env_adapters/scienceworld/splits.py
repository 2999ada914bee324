"""The task pool of ScienceWorld and its splits: which (task type, variation) a running id stands for.

The pool is the one of the paper (Appendix A.3): every variation of 23 of the 30 task types, 4,639 pairs, numbered in
the order of the simulator's own task list. The ids the authors drew from it are not public; the draw below has their
counts (2,120 to train on from 22 types, 200 to test on from 12), shares no pair, and depends on nothing but SHA-256.
"""

import functools
import hashlib
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from env_adapters.errors import UnknownTaskError

# Only the simulator itself knows the numbers of variations, and listing tasks must not start it; a test compares this
# table with the simulator's answers. Left out as in the paper: 5-1, 5-2, 9-1, 9-2, 9-3, 10-1, 10-2.
TASK_TYPES: dict[str, int] = {
    "boil": 30,
    "melt": 30,
    "freeze": 30,
    "change-the-state-of-matter-of": 30,
    "use-thermometer": 540,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "find-animal": 300,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "lifespan-longest-lived": 125,
    "lifespan-shortest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
}
POOL_SIZE = sum(TASK_TYPES.values())
TRAIN_SIZE = 2_120
TEST_SIZE = 200

ID_PREFIX = "sciworld_"
_TASK_ID = re.compile(rf"(?:{ID_PREFIX})?([0-9]{{1,9}})", re.ASCII)
_NAMES = tuple(TASK_TYPES)
_ENDS = tuple(accumulate(TASK_TYPES.values()))


@dataclass(frozen=True, slots=True)
class PoolEntry:
    """One pair of the pool: its running id, the name of its task type, and the variation of that type."""

    index: int
    task_type: str
    variation: int

    @property
    def task_id(self) -> str:
        """The id that task lists and id files use, such as `"sciworld_17"`."""
        return f"{ID_PREFIX}{self.index}"


def find_entry(task_id: str) -> PoolEntry:
    """The pair behind an id, `"sciworld_17"` or `"17"`.

    Raises:
        UnknownTaskError: the text is not such an id, or the number is beyond the pool.
    """
    match = _TASK_ID.fullmatch(task_id)
    index = int(match.group(1)) if match else POOL_SIZE
    if index >= POOL_SIZE:
        raise UnknownTaskError(
            f"`task_id` is {task_id!r}, but the task ids of 'scienceworld' are '{ID_PREFIX}0' to "
            f"'{ID_PREFIX}{POOL_SIZE - 1}' (the number alone is accepted too)."
        )
    return _entry(index)


@functools.cache
def draw_split(split: str) -> tuple[PoolEntry, ...]:
    """The pairs of `"train"`, `"test"` or `"all"`, by running id.

    The test split takes every second task type, the first included: 12 types, from all of the benchmark's subjects.
    The training split leaves out the smallest of the other types, so that every tested type is trained. Each type gets
    a share of its split in proportion to its size (largest remainders, at least one). Within a type, variations are
    ordered by the SHA-256 of `"<type>:<variation>"`; the test split takes its share from the front, the training split
    the variations that follow.
    """
    if split == "all":
        return tuple(map(_entry, range(POOL_SIZE)))
    tested = _NAMES[::2]
    held_out = min((name for name in _NAMES if name not in tested), key=TASK_TYPES.__getitem__)
    test_shares = _shares(TEST_SIZE, tested)
    if split == "test":
        shares, skipped = test_shares, dict.fromkeys(tested, 0)
    else:
        shares, skipped = _shares(TRAIN_SIZE, [name for name in _NAMES if name != held_out]), test_shares
    starts = dict(zip(_NAMES, (0, *_ENDS), strict=False))
    drawn = [
        starts[name] + variation
        for name, share in shares.items()
        for variation in _shuffled(name)[skipped.get(name, 0) :][:share]
    ]
    return tuple(map(_entry, sorted(drawn)))


def _entry(index: int) -> PoolEntry:
    position = bisect_right(_ENDS, index)
    return PoolEntry(index, _NAMES[position], index - (_ENDS[position] - TASK_TYPES[_NAMES[position]]))


def _shares(total: int, names: list[str] | tuple[str, ...]) -> dict[str, int]:
    """Split a total over task types in proportion to their sizes, in whole numbers that add up."""
    size = sum(TASK_TYPES[name] for name in names)
    shares = {name: max(1, total * TASK_TYPES[name] // size) for name in names}
    by_remainder = sorted(names, key=lambda name: (-(total * TASK_TYPES[name] % size), name))
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


def _shuffled(name: str) -> list[int]:
    return sorted(
        range(TASK_TYPES[name]), key=lambda variation: hashlib.sha256(f"{name}:{variation}".encode()).digest()
    )
