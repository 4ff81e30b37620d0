"""A driver that forks its template, and has programs run as forks of it: `python driver_of_forks.py PROGRAM`.

PROGRAM is a file `main.py`, as one of Ray's. Prints a line of JSON with facts, then waits for its own end.
"""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import types

from hotseat.cluster._ray.template import Template
from hotseat.cluster._ray.template_process import num_threads
from hotseat.openmp import thread_env, wait_passively

MODULES = ["numpy", "xml.dom.minidom"]


def falls_back() -> dict[str, bool]:
    """Make templates where this process must not be forked, and tell of which cases they are programs."""
    programs, going_on = {}, threading.Event()
    thread = threading.Thread(target=going_on.wait)
    template = Template(MODULES, thread_env(1))
    programs["no command"] = template._fork is None
    template.close()
    sys.modules["torch"] = types.ModuleType("torch")
    template = Template(MODULES, thread_env(1), contextlib.nullcontext)
    programs["torch is loaded"] = template._fork is None
    template.close()
    del sys.modules["torch"]
    thread.start()
    template = Template(MODULES, thread_env(1), contextlib.nullcontext)
    programs["a thread"] = template._fork is None
    template.close()
    going_on.set()
    thread.join()
    while num_threads() > 1:  # the system ends a thread a moment after Python does
        time.sleep(0.001)
    return programs


def run(template: Template, program: str, *arguments: str) -> dict[str, object]:
    """Run a program as a fork of the template."""
    command = [sys.executable, *template.for_workers, program, *arguments]
    env = {**os.environ, **thread_env(1)}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)
    return {"code": done.returncode, "out": done.stdout, "err": done.stderr}


if __name__ == "__main__":
    wait_passively()
    programs = falls_back()
    print("printed before the fork")  # and not written yet: standard output is a pipe
    template = Template(["torch", *MODULES], thread_env(1), contextlib.nullcontext)
    own = sys.modules["torch"]
    facts = {
        "programs": programs,
        "is_fork": template._fork is not None,
        "templates": template.pids,
        "runs": [run(template, sys.argv[1], *arguments) for arguments in (("0",), ("3",), ("words",), ("raise",))],
        "threads": [own.get_num_threads(), len(os.sched_getaffinity(0))],
        "draw": float(own.rand(1)),
        "group": os.getpgid(template.pids[1]),  # after a run: the template has begun
        "env": os.environ.get("OPENBLAS_NUM_THREADS"),
    }
    print(json.dumps(facts), flush=True)
    sys.stdin.read()
