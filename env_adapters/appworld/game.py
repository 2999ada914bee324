"""AppWorld as its own interpreter sees it; loaded there by path (see [`~env_adapters.isolated.worker`]).

Nothing of this package and none of the trainer's dependencies can be imported here. One object is made in a process
that never runs a policy's code, [`warm_up`] does once what takes seconds, and the process is then forked: into
players, which run such code in a data root without ground truth, and into scorers, which run none and read the root
that has it.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import tempfile
from typing import Any

EXPERIMENT = "play"
FAILED = ("Execution failed. Traceback:", "No code available to execute.")


class Game:
    """Plays and scores AppWorld tasks, one world a process.

    Args:
        folder: a folder of this object's own; IPython and AppWorld write to it.
    """

    def __init__(self, folder: str) -> None:
        self._live_in(folder)
        # AppWorld reads a `.env` file from any folder above its own; what a user keeps there is no business of agents.
        before = dict(os.environ)
        from appworld import AppWorld

        for name in set(os.environ) - set(before) - {"APPWORLD_ROOT", "APPWORLD_CACHE"}:
            del os.environ[name]
        self._class: Any = AppWorld
        self._world: Any = None

    def warm_up(self, task_id: str) -> None:
        """Open a world, let it run a line, and close it: what is imported and compiled for that stays in memory.

        Args:
            task_id: a task in this object's folder, which needs no ground truth.
        """
        importlib.import_module("appworld.evaluator")  # what `score` needs
        self.begin(os.environ["APPWORLD_ROOT"], task_id, code_timeout=60)
        # The first call to an app builds its documentation, which then stays with the app.
        self.act(
            "print(apis.supervisor.show_profile())\nprint(apis.api_docs.show_app_descriptions())\n"
            f"for name in {sorted(self._world.task.allowed_apps)}:\n"
            "    try: getattr(apis, name).login(username='nobody', password='none')\n"
            "    except Exception: pass",
            max_chars=100,
        )
        self._world._save_state(self._world.output_db_home_path_on_disk)
        self._world.close()
        self._class.close_all()
        self._world = None
        _forget_roots()

    def begin(self, folder: str, task_id: str, code_timeout: int) -> dict[str, Any]:
        """Open the world of a task.

        Args:
            folder: the player's folder, a data root in which the task was laid out without its ground truth.
            task_id: the task.
            code_timeout: seconds after which AppWorld interrupts a piece of code.

        Returns:
            `instruction`: the task in words.
        """
        self._live_in(folder)
        _forget_roots()
        self._world = self._class(
            task_id,
            experiment_name=EXPERIMENT,
            load_ground_truth=False,
            timeout_seconds=code_timeout,
        )
        # AppWorld writes databases and logs after every piece of code; only the last state of the databases is read.
        self._save = self._world._save_state
        self._world._save_state = _nothing
        self._world.save_logs = _nothing
        return {"instruction": self._world.task.instruction}

    def act(self, code: str, max_chars: int) -> dict[str, Any]:
        """Run a piece of code.

        Args:
            code: the code, whatever it holds.
            max_chars: length at which the output is cut.

        Returns:
            `output`: what it printed, or its traceback. `failed`: whether it is a traceback. `completed`: whether the
            task was declared complete; the state to be scored is then on disk.
        """
        code = code.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair, which no parser takes
        try:
            output = str(self._world.execute(code))
        except BaseException as error:  # KeyboardInterrupt and its like go right through AppWorld
            signal.alarm(0)
            self._world.safety_guard.disable()  # which it then leaves on
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise  # the machine's fault, not the code's
            output = f"{FAILED[0]}\n{type(error).__name__}: {error}"
        self._world.environment_io.clear()
        completed = bool(self._world.task_completed())
        if completed:
            self._save(self._world.output_db_home_path_on_disk)
        return {"output": _cut(output, max_chars), "failed": output.startswith(FAILED), "completed": completed}

    def score(self, folder: str, task_id: str) -> dict[str, Any]:
        """Run the task's state tests on what a player left on disk.

        Args:
            folder: a data root that holds the ground truth and, under `experiments`, the player's output.
            task_id: the task.

        Returns:
            `success`: whether all tests passed. `passed`, `total`: how many. `failures`: the requirements not met.
        """
        from appworld import evaluator

        os.environ["APPWORLD_ROOT"] = folder
        _forget_roots()
        # For its report, which is not saved, AppWorld quotes the source of every frame of the stack, and fails where
        # it cannot read one.
        evaluator.build_fail_trace = _no_trace
        # An error inside a test is a test that failed; any other error is raised.
        tracker = evaluator.evaluate_task(task_id, EXPERIMENT, suppress_errors=True, save_report=False)
        return {
            "success": bool(tracker.success),
            "passed": int(tracker.pass_count),
            "total": int(tracker.num_tests),
            "failures": [str(failure["requirement"]) for failure in tracker.failures],
        }

    def _live_in(self, folder: str) -> None:
        """Make a folder the place for everything that is written."""
        os.chdir(folder)
        tempfile.tempdir = folder
        cache = os.path.join(folder, "cache")
        os.environ.update(
            APPWORLD_ROOT=folder,
            APPWORLD_CACHE=cache,
            IPYTHONDIR=os.path.join(folder, "ipython"),
            HOME=folder,
            TMPDIR=folder,
        )


def _forget_roots() -> None:
    """Drop what AppWorld remembers of a data root: open databases, and where databases are."""
    model_lib = importlib.import_module("appworld.apps.model_lib")
    model_lib.CachedDBHandler.reset()
    model_lib.get_db_home_path.cache_clear()


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def _no_trace(exception: Exception) -> str:
    return ""


def _cut(output: str, max_chars: int) -> str:
    if len(output) <= max_chars:
        return output
    return (
        f"{output[:max_chars]}\n[The output was cut: {max_chars} of {len(output)} characters are shown. Print less.]"
    )
