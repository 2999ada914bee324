"""Players and scorers: forks of one warm process that has AppWorld imported and has run no policy's code.

The warm process (one for each interpreter and data root, shared by all environments of this process) takes seconds to
start. A fork of it is ready in milliseconds, shares its memory, and starts from the same state whatever was played
before. So every episode gets a player of its own and, when it is over, a scorer of its own.
"""

import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

from env_adapters.appworld.interpreter import APPWORLD
from env_adapters.appworld.root import SHARED, SPLITS, lay_out_for_play, lay_out_for_scoring, task_ids
from env_adapters.errors import EnvDataError
from env_adapters.isolated.process import Access, Limits, Worker, WorkerError
from env_adapters.isolated.starting import ForkingWorker, confine, start_worker

GAME = Path(__file__).with_name("game.py")
START_SECONDS = 300.0  # on a machine where a hundred of them start at once
BEGIN_SECONDS = 60.0
SCORE_SECONDS = 60.0


def own_folder(owner: Any) -> tuple[Path, "weakref.finalize[..., Any]"]:
    """A new temporary folder, and what removes it: when called, when its owner is dropped, and at a normal exit."""
    folder = Path(tempfile.mkdtemp(prefix="cope-appworld-"))
    return folder, weakref.finalize(owner, _remove, folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child, which holds a copy of the owner
        shutil.rmtree(folder, ignore_errors=True)


class Engine:
    """The warm process of one interpreter and data root. Use [`acquire`] and [`release`]."""

    def __init__(self, python: str, root: Path) -> None:
        self.python = python
        self.root = root
        self.users = 0
        self._lock = threading.Lock()
        self._worker: ForkingWorker | None = None
        self._folder, self._remove_folder = own_folder(self)

    def fork(self, name: str, limits: Limits, access: Access) -> Worker:
        """A new process of the game, limited and shut in; starts the warm process if there is none."""
        worker = self._warm().fork(name)
        try:
            confine(worker, limits, access)
        except BaseException:
            worker.stop()
            raise
        return worker

    def stop(self) -> None:
        """End the warm process; those forked from it live on."""
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()
        self._remove_folder()

    @property
    def pid(self) -> int | None:
        """Process id of the warm process, or `None` while there is none."""
        worker = self._worker
        return worker.pid if worker is not None and worker.running else None

    def _warm(self) -> ForkingWorker:
        with self._lock:
            if self._worker is not None and self._worker.alive:
                return self._worker
            if self._worker is not None:
                self._worker.stop()
            play = Path(tempfile.mkdtemp(dir=self._folder))
            task_id = self._any_task()
            lay_out_for_play(self.root, task_id, play)
            worker = start_worker(
                "The AppWorld process",
                (GAME, "Game"),
                {"folder": str(play)},
                python=self.python,
                packages=[APPWORLD.partition("=")[0]],
                deadline=START_SECONDS,
            )
            try:
                worker.call("warm_up", START_SECONDS, task_id=task_id)
            except BaseException:
                worker.stop()
                raise
            self._worker = worker
            return worker

    def _any_task(self) -> str:
        for split in SPLITS:
            for task_id in task_ids(self.root, split):
                return task_id
        raise EnvDataError(f"AppWorld's data root {str(self.root)!r} lists no task in any split.")


_engines: dict[tuple[str, Path], Engine] = {}
_engines_lock = threading.Lock()


def acquire(python: str, root: Path) -> Engine:
    """The engine of an interpreter and a data root; give it back with [`release`]."""
    with _engines_lock:
        engine = _engines.setdefault((python, root), Engine(python, root))
        engine.users += 1
        return engine


def release(engine: Engine) -> None:
    """Give an engine back; its warm process ends when nobody uses it."""
    with _engines_lock:
        engine.users -= 1
        unused = engine.users == 0 and _engines.pop((engine.python, engine.root), None) is not None
    if unused:
        engine.stop()


class Episode:
    """One task being played: the player's process and the folders it lives in.

    Args:
        engine: where the player comes from.
        task_id: the task.
        limits: what the player may use.
        code_timeout: seconds after which AppWorld interrupts a piece of code.
    """

    def __init__(self, engine: Engine, task_id: str, limits: Limits, code_timeout: int) -> None:
        self.task_id = task_id
        self.instruction = ""
        self._engine = engine
        self._limits = limits
        self._code_timeout = code_timeout
        self._folder, self._remove_folder = own_folder(self)
        self._player: Worker | None = None
        self._stopped = False

    @property
    def pid(self) -> int | None:
        """Process id of the player, or `None` while there is none."""
        player = self._player
        return None if player is None else player.pid

    def open(self) -> None:
        """Start the player and open the world; `instruction` then holds the task."""
        play = self._folder / "play"
        lay_out_for_play(self._engine.root, self.task_id, play)
        shared = tuple(str(self._engine.root / "data" / name) for name in SHARED)
        player = self._engine.fork("The AppWorld player", self._limits, Access(shared, (str(play),)))
        self._player = player
        if self._stopped:  # by another thread, which found no player yet
            player.stop()
        answer = player.call(
            "begin", BEGIN_SECONDS, folder=str(play), task_id=self.task_id, code_timeout=self._code_timeout
        )
        self.instruction = str(answer["instruction"])

    def act(self, code: str, max_chars: int, deadline: float) -> dict[str, Any]:
        """Run a piece of code; see `Game.act`."""
        if self._player is None:
            raise WorkerError("The AppWorld player was not started.")
        return dict(self._player.call("act", deadline, code=code, max_chars=max_chars))

    def score(self) -> dict[str, Any]:
        """Run the state tests in a process that has the ground truth; see `Game.score`. Ends the player."""
        self._end_player()
        play, folder = self._folder / "play", self._folder / "score"
        lay_out_for_scoring(self._engine.root, play, folder)
        access = Access((str(self._engine.root / "data"), str(self._folder)))
        scorer = self._engine.fork("The AppWorld scorer", self._limits, access)
        try:
            return dict(scorer.call("score", SCORE_SECONDS, folder=str(folder), task_id=self.task_id))
        finally:
            scorer.stop()

    def stop(self) -> None:
        """End the player and remove its folders. May be called again, and from any thread."""
        self._stopped = True
        self._end_player()
        self._remove_folder()

    def _end_player(self) -> None:
        if self._player is not None:
            self._player.stop()
