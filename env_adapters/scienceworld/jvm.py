"""One Java process that runs the ScienceWorld simulator, and the certainty that it ends.

The process is small (see [`JAVA_OPTIONS`]), belongs to one environment, and cannot outlive this Python process: its
standard input is a pipe from here, and it exits when that pipe breaks, whatever ended the writer. A death signal set
by the kernel would not do: it fires when the *thread* that started the process ends, and environments start in the
threads of a pool.
"""

import contextlib
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from env_adapters.errors import EnvAdapterError, MissingDependencyError

MIN_JAVA = 8
# Largest Java heap, in MB (2^20 bytes). A loaded world takes up to 25; finding the gold path of some takes more than
# 160. Without a limit, one process grows to 0.8 GB.
PLAY_HEAP_MB = 48
GOLD_HEAP_MB = 512
JAVA_OPTIONS = (
    "-XX:+UseSerialGC",  # no helper threads: many of these processes share the machine
    # Out of memory ends the process, hence the episode, instead of leaving a simulator in an unknown state.
    "-XX:+ExitOnOutOfMemoryError",
    "-XX:-UsePerfData",  # leaves no file in the temporary directory when killed
    # The simulator seeds its random generator with the variation at each load, yet the order in which it lists and
    # matches objects (so also which of them "0" chooses) comes from identity hashes, which by default differ with what
    # the process did before. With a constant hash the order is that of insertion, always.
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
    "-XX:+IgnoreUnrecognizedVMOptions",  # for runtimes that name these otherwise
)

# What the simulator's Python interface answers itself, after trimming as Java does; everything else is the agent's.
_ASKS_INTERFACE = frozenset(("help", "objects", "task"))
_TRIMMED = "".join(map(chr, range(33)))
_NOTHING_TO_SAY = (
    "Unknown action.  Type 'help' for a list of actions, and 'objects' for a list of possible object referents. "
)

_INSTALL_PACKAGE = "pip install cope_trl[scienceworld]"
_INSTALL_JAVA = "`apt-get install default-jre-headless`, or `conda install -c conda-forge openjdk`"


def check_packages() -> None:
    """Raise [`MissingDependencyError`] unless `scienceworld` and `py4j` are installed; imports neither of them."""
    for package in ("scienceworld", "py4j"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"The environment 'scienceworld' needs the package `{package}`, which is not installed: "
                f"`{_INSTALL_PACKAGE}`."
            )


def find_java() -> str:
    """Path of the Java launcher: that of `JAVA_HOME` if set, else the first on `PATH`.

    Raises:
        MissingDependencyError: there is none, or it is older than Java 8.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home, "bin"))) if home else None
    java = java or shutil.which("java")
    if java is None:
        raise MissingDependencyError(
            f"The environment 'scienceworld' needs a Java runtime (version {MIN_JAVA} or later), but no `java` was "
            f"found in JAVA_HOME or on PATH: {_INSTALL_JAVA}."
        )
    version = _java_version(java)
    if version < MIN_JAVA:
        found = f"is version {version}" if version else "is not a working Java runtime"
        raise MissingDependencyError(
            f"The environment 'scienceworld' needs a Java runtime (version {MIN_JAVA} or later), but {java!r} "
            f"{found}: {_INSTALL_JAVA}."
        )
    return java


@functools.cache
def _java_version(java: str) -> int:
    """Major version of a Java launcher; 0 if it does not say one (macOS has a placeholder that only prints advice)."""
    try:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)  # Java 8 calls itself 1.8
    return int(match.group(1)) if match else 0


class Simulator:
    """A running simulator process. The constructor starts it; [`connect`] waits until it answers.

    Args:
        heap_mb: largest Java heap, in MB (2^20 bytes); the process takes about 90 MB more.

    Attributes:
        process: the Java process.
        scienceworld: after `connect`, the simulator's Java interface; its methods are called directly, because the
            Python package's own `step` lists every valid action at each call.
        agent: after `load`, what the interface hands an action on to. `step` calls it without the interface, which at
            each step also looks around, lists the inventory, prints all names of all objects and keeps a history.

    Raises:
        MissingDependencyError: a package or Java is missing; nothing was started.
    """

    def __init__(self, heap_mb: int = PLAY_HEAP_MB) -> None:
        check_packages()
        java = find_java()
        spec = importlib.util.find_spec("scienceworld")
        assert spec is not None  # checked above
        home = Path((spec.submodule_search_locations or [""])[0])
        from py4j.java_gateway import find_jar_path

        jars = os.pathsep.join((find_jar_path(), str(home / "scienceworld.jar")))
        gateway = ("py4j.GatewayServer", "--die-on-broken-pipe", "--enable-auth", "0")
        self.process = subprocess.Popen(
            [java, "-classpath", jars, f"-Xmx{heap_mb}m", *JAVA_OPTIONS, *gateway],
            cwd=home,  # the simulator reads a table beside the jar
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the trainer, which may want to finish its step
        )
        self.scienceworld: Any = None
        self.agent: Any = None
        self._progress = 0.0, False  # of the last step
        self._gateway: Any = None
        self._said: deque[str] = deque(maxlen=20)
        # Also ends the process when the environment is dropped without `close`, and at a normal exit.
        self._end = weakref.finalize(self, _end_process, self.process, os.getpid())

    @property
    def alive(self) -> bool:
        """Whether the process is running and was not stopped."""
        return self._end.alive and self.process.poll() is None

    def connect(self) -> None:
        """Wait for the process to answer, and create the Java interface.

        Raises:
            EnvAdapterError: the process ended first, or was stopped by another thread.
        """
        from env_adapters.scienceworld.client import open_gateway

        stdout = self.process.stdout
        assert stdout is not None
        for line in stdout:  # the port comes first, unless the Java runtime has something to say before it
            self._said.append(line.strip())
            if self._said[-1].isdecimal():
                break
        else:
            raise self.failure("start")
        port, token = int(self._said[-1]), stdout.readline().strip()
        threading.Thread(target=_drain, args=(stdout, self._said), daemon=True).start()

        self._gateway = open_gateway(port, token)
        self.scienceworld = self.call("start", self._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface)

    def load(self, task_type: str, variation: int, simplifications: str, *, gold: bool = False) -> None:
        """Load a task afresh; with `gold`, find its gold path too, which takes much longer.

        Raises:
            EnvAdapterError: the simulator refused, or its process ended.
        """
        if self.agent is not None:  # else the process would keep the old world beside the new one
            agent, self.agent = self.agent, None
            self.call("load", self._gateway.detach, agent)
        answer = self.call("load", self.scienceworld.load, task_type, variation, simplifications, gold)
        if answer:
            raise EnvAdapterError(f"ScienceWorld could not load {task_type!r}, variation {variation}: {answer}")
        option = self.call("load", self.scienceworld.agentInterface)
        self.agent = self.call("load", option.get)
        self.call("load", self._gateway.detach, option)
        self._progress = 0.0, False

    def step(self, action: str) -> tuple[str, float, bool]:
        """Execute one action; return the observation, the score in [-1, 1], and whether the task says it is over."""
        # A tokenizer can produce half a surrogate pair, which no socket carries.
        sendable = action.encode("utf-8", "replace").decode("utf-8")
        if sendable.strip(_TRIMMED).lower() in _ASKS_INTERFACE:
            return str(self.call("step", self.scienceworld.step, sendable)), *self._progress
        answer = self.call("step", self.agent.step, sendable)
        # A tuple as text, "(observation,score,over)": one call instead of three.
        observation, score, over = self.call("step", answer.toString)[1:-1].rsplit(",", 2)
        self.call("step", self._gateway.detach, answer)
        self._progress = float(score), over == "true"
        return observation or _NOTHING_TO_SAY, *self._progress

    def description(self) -> str:
        """The task of the episode, in words."""
        return str(self.call("load", self.scienceworld.getTaskDescription))

    def valid_actions(self) -> list[str]:
        """Every action the simulator would accept now (hundreds to thousands; takes up to a second)."""
        answer = json.loads(self.call("list actions", self.scienceworld.getValidActionObjectCombinationsJSON))
        return list(dict.fromkeys(str(entry["action"]) for entry in answer["validActions"]))

    def gold_actions(self) -> list[str]:
        """The gold path of the task loaded last, which must have been loaded with `gold=True`."""
        actions = self.call("list gold actions", self.scienceworld.getGoldActionSequence)
        path = [str(action) for action in actions]
        self._gateway.detach(actions)
        return path

    def call(self, purpose: str, function: Any, *args: Any) -> Any:
        """Call into Java; whatever goes wrong there becomes an [`EnvAdapterError`]."""
        from py4j.protocol import Py4JError

        try:
            return function(*args)
        except (Py4JError, OSError) as error:
            raise self.failure(purpose, error) from error

    def failure(self, purpose: str, error: Exception | None = None) -> EnvAdapterError:
        """The error to raise after a failed call, with what the process said last if it ended."""
        stopped = not self._end.alive
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=1.0 if error is None or not self._answered(error) else 0.0)
        code = self.process.returncode
        if code is None:
            return EnvAdapterError(f"ScienceWorld failed to {purpose}: {str(error).strip()}")
        if stopped:
            return EnvAdapterError(f"ScienceWorld was stopped (`close` or `kill`) while it was to {purpose}.")
        said = " | ".join(line for line in self._said if line and not line.isdecimal())[-600:]
        return EnvAdapterError(
            f"The Java process of ScienceWorld ended (exit code {code}) while it was to {purpose}; the next `reset` "
            f"starts a new one. Its last words: {said or 'none'}"
        )

    @staticmethod
    def _answered(error: Exception) -> bool:
        """Whether the error is an exception inside Java, so that the process lives on."""
        return hasattr(error, "java_exception")

    def stop(self) -> None:
        """End the process at once, from any thread, also while another waits for an answer. May be called again."""
        self._end()
        if self._gateway is not None:
            with contextlib.suppress(Exception):  # the sockets of a process that is gone
                self._gateway.close()


def _end_process(process: "subprocess.Popen[str]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child holds a copy of the environment, not the process
        return
    process.kill()  # it has nothing to save, and does not answer while it steps
    process.wait()
    with contextlib.suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()


def _drain(stream: Any, last_words: "deque[str]") -> None:
    """Read what the simulator prints, so that it never blocks on a full pipe, and keep the end of it."""
    with contextlib.suppress(OSError, ValueError):
        for line in stream:
            last_words.append(line.strip())
        stream.close()
