"""Limits that a worker puts on itself before it runs code nobody has read. Standard library only; run in the child.

Three layers, each for what the one before cannot do:

- resource limits of the kernel: memory, size of a file, number of processes;
- an audit hook, on every platform: Python code cannot open files outside two lists of folders, start programs, fork,
  signal other processes, or use the network;
- Landlock, on Linux 5.13 or later: the kernel enforces the same lists for all that the process runs, C code included.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
import sys
from typing import Any

# Started or spoken to from Python code by these audit events; each is refused.
_REFUSED = frozenset(
    (
        *("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system", "pty.spawn"),
        *("subprocess.Popen", "os.kill", "os.killpg", "signal.pthread_kill"),
        *("resource.setrlimit", "resource.prlimit", "fcntl.fcntl", "fcntl.ioctl", "sys.setprofile", "sys.settrace"),
        *("ctypes.dlopen", "ctypes.dlsym", "ctypes.dlsym/handle", "ctypes.call_function"),
        *("socket.connect", "socket.bind", "socket.sendto", "socket.sendmsg"),
        *("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request", "webbrowser.open"),
        *("gc.get_objects", "gc.get_referrers", "gc.get_referents", "sqlite3.enable_load_extension"),
    )
)
# Events that change files, and how many of their first arguments are paths.
_CHANGES = {
    "os.mkdir": 1,
    "os.remove": 1,
    "os.rmdir": 1,
    "os.truncate": 1,
    "os.chmod": 1,
    "os.chown": 1,
    "os.lchown": 1,
    "os.chflags": 1,
    "os.utime": 1,
    "os.setxattr": 1,
    "os.removexattr": 1,
    "os.rename": 2,
    "os.link": 2,
    "shutil.rmtree": 1,
}
_LISTS = frozenset(("os.listdir", "os.scandir", "os.chdir"))
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC


def set_limits(memory_mb: int | None = None, file_mb: int | None = None, processes: int | None = None) -> None:
    """Set resource limits of this process; none can be raised again.

    Args:
        memory_mb: address space, in MB (2^20 bytes); beyond it, Python raises MemoryError.
        file_mb: size of any one file it writes, in MB (2^20 bytes).
        processes: how many processes and threads the user may start beyond those running now. The kernel counts all of
            the user's, and does not count at all for root.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_mb is not None:
        _lower(resource.RLIMIT_AS, memory_mb << 20)
    if file_mb is not None:
        _lower(resource.RLIMIT_FSIZE, file_mb << 20)
    if processes is not None:
        _lower(resource.RLIMIT_NPROC, _tasks_of_user() + processes)


def _lower(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:
        value = min(value, hard)
    resource.setrlimit(kind, (value, value))


def _tasks_of_user() -> int:
    """Number of this user's threads; 0 where there is no /proc."""
    count, user = 0, os.getuid()
    try:
        entries = os.listdir("/proc")
    except OSError:
        return 0
    for entry in filter(str.isdecimal, entries):
        try:
            if os.stat(f"/proc/{entry}").st_uid == user:
                count += len(os.listdir(f"/proc/{entry}/task"))
        except OSError:  # ended meanwhile
            continue
    return count


def shut_in(readable: list[str], writable: list[str]) -> dict[str, Any]:
    """Leave this process nothing but computing, and files in the given folders; cannot be undone.

    Args:
        readable: files and folders that may be read, besides those this interpreter needs.
        writable: folders that may be read and written.

    Returns:
        `{"landlock": version}`, the version of the kernel's Landlock; 0 where there is none.
    """
    reading = tuple(os.path.realpath(path) for path in [*readable, *_interpreter_paths()])
    writing = tuple(os.path.realpath(path) for path in writable)
    version = _landlock(reading, writing)
    _remove_fork_exec()
    sys.addaudithook(_make_hook(reading, writing))
    return {"landlock": version}


def _interpreter_paths() -> list[str]:
    """What Python itself reads when it imports a module late, and time zones."""
    paths = [sys.prefix, sys.base_prefix, *(path for path in sys.path if path), os.path.dirname(os.__file__)]
    paths += ["/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/mime.types"]
    paths += ["/dev/null", "/dev/urandom", "/dev/random", "/dev/zero", "/proc/self", "/proc/meminfo", "/proc/cpuinfo"]
    return [path for path in paths if os.path.exists(path)]


def _remove_fork_exec() -> None:
    """Take away the one way to a new process that raises no audit event."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise PermissionError("starting processes is not allowed here")

    import subprocess  # loads the module that holds it, so that a later import finds it changed

    for module in (sys.modules["_posixsubprocess"], subprocess):
        for attribute in ("fork_exec", "_fork_exec"):
            if hasattr(module, attribute):
                setattr(module, attribute, refused)


def _make_hook(reading: tuple[str, ...], writing: tuple[str, ...]) -> Any:
    """The audit hook. It looks up nothing outside itself, so that replacing names in modules does not disarm it."""
    refused, changes, lists, writing_flags = _REFUSED, dict(_CHANGES), _LISTS, _WRITING
    realpath, fspath, fsdecode = _private_realpath(), os.fspath, os.fsdecode
    both = reading + writing
    null = os.path.realpath(os.devnull)
    denied, isinstance_, str_, bytes_, int_ = PermissionError, isinstance, str, bytes, int

    def check(path: Any, folders: tuple[str, ...], event: str) -> None:
        if path is None or isinstance_(path, int_):
            return
        given = fsdecode(path) if isinstance_(path, bytes_) else fspath(path)
        real = realpath(given)
        for folder in folders:
            if real == folder or real.startswith(folder.rstrip("/") + "/"):
                return
        if real == null:
            return
        raise denied(f"{event} on {given!r} is not allowed here")

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            check(path, writing if flags is not None and flags & writing_flags else both, event)
        elif event in refused:
            raise denied(f"{event} is not allowed here")
        elif event in changes:
            for path in args[: changes[event]]:
                check(path, writing, event)
        elif event == "os.symlink":  # where it points to is checked when it is followed
            check(args[1], writing, event)
        elif event in lists:
            check(args[0] if args else ".", both, event)
        elif event == "sqlite3.connect":
            path = args[0]
            name = fsdecode(path) if isinstance_(path, (bytes_, str_)) else fspath(path)
            if name.startswith("file:"):
                if "mode=memory" not in name and not name.startswith("file::memory:"):
                    check(name[5:].split("?")[0], both, event)
            elif name and name != ":memory:":
                check(name, both, event)
        elif event == "object.__setattr__" and (args[0] is hook or args[0] is check):
            raise denied("this function cannot be changed")

    return hook


def _private_realpath() -> Any:
    """`os.path.realpath` with functions of its own: the code that is being watched may replace those of `os`."""
    lstat, readlink, getcwd = os.lstat, os.readlink, os.getcwd
    error = OSError

    def realpath(path: str) -> str:
        pending = [part for part in (path if path[:1] == "/" else f"{getcwd()}/{path}").split("/")[::-1] if part]
        done: list[str] = []
        links = 0
        while pending:
            part = pending.pop()
            if part == ".":
                continue
            if part == "..":
                if done:
                    done.pop()
                continue
            here = "/" + "/".join([*done, part])
            try:
                is_link = (lstat(here).st_mode & 0o170000) == 0o120000
            except (error, ValueError):
                is_link = False
            if not is_link:
                done.append(part)
                continue
            links += 1
            if links > 40:
                raise error("too many links")
            target = readlink(here)
            if target[:1] == "/":
                done = []
            pending += [piece for piece in target.split("/")[::-1] if piece]
        return "/" + "/".join(done)

    return realpath


# ------------------------------------------------------------------------------------------------- Landlock

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on every architecture
_PATH_BENEATH, _NO_NEW_PRIVS = 1, 38
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Rights a kernel knows, by version; 1: everything up to making block devices and links.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_DEVICE_RIGHTS = 1 << 15  # ioctl on devices, from version 5
_EXECUTE = 1
_FOR_FILES = (1 << 0) | (1 << 1) | (1 << 2) | (1 << 14) | (1 << 15)


def _landlock(reading: tuple[str, ...], writing: tuple[str, ...]) -> int:
    """Restrict this thread and what it starts; return the kernel's Landlock version, 0 for none."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    version = int(libc.syscall(_CREATE_RULESET, None, 0, 1))
    if version < 1:
        return 0
    rights = _FILE_RIGHTS[min(version, 4)] | (_DEVICE_RIGHTS if version >= 5 else 0)
    network = 3 if version >= 4 else 0  # binding and connecting TCP sockets
    scope = 3 if version >= 6 else 0  # abstract Unix sockets and signals stay inside
    attributes = struct.pack("QQQ", rights, network, scope)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "Landlock refused its rules")
    try:
        for folders, allowed in ((reading, _READ_FILE | _READ_DIR), (writing, rights & ~_EXECUTE)):
            for path in folders:
                _allow(libc, ruleset, path, allowed)
        if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise OSError(ctypes.get_errno(), "Landlock could not be switched on")
    finally:
        os.close(ruleset)
    return version


def _allow(libc: Any, ruleset: int, path: str, allowed: int) -> None:
    if path == os.devnull:
        allowed |= 1 << 1  # writing to it is harmless, and libraries do
    descriptor = os.open(path, getattr(os, "O_PATH", os.O_RDONLY) | os.O_CLOEXEC)
    try:
        if not os.path.isdir(path):
            allowed &= _FOR_FILES
        rule = struct.pack("=Qi", allowed, descriptor)
        if libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock refused a rule for {path!r}")
    finally:
        os.close(descriptor)
