"""Starts servers for the tests: imports the engine once, which takes seconds, and forks a process for each server.

Reads one JSON object a line: `{"run": [...]}` starts the command line `cope-trl ...` (or a function of this folder)
and answers with the process id and what it printed until it was ready; `{"wait": pid}` answers with the exit status
and what it printed since.
"""

import importlib
import json
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

import uvicorn  # noqa: F401

from cope_trl.cli import main
from env_adapters.openenv.server import build_app
from env_adapters.registry import register

READY = "Ctrl-C ends it."
outputs = {}


def start(request):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        outputs[pid] = open(reading, encoding="utf-8")  # noqa: SIM115 - read on by `wait`
        said = ""
        for line in outputs[pid]:
            said += line
            if READY in line:
                break
        return {"pid": pid, "said": said}
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    os.environ.update(request.get("environ", {}))
    for name in ("Moody", "Odd"):
        register(name.lower(), f"served_worlds:{name}")
    code = 1
    try:
        if "function" in request:
            module, function = request["function"].split(":")
            getattr(importlib.import_module(module), function)()
            code = 0
        else:
            code = main(request["run"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid):
    said = outputs.pop(pid).read()
    return {"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "said": said}


if __name__ == "__main__":
    build_app("household")  # the engine imports more when it makes its first application
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(wait(request["wait"]) if "wait" in request else start(request)), flush=True)
    os._exit(0)  # the engine's threads need no farewell
