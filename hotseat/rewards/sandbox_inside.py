"""The program that runs first in the sandbox: it takes on the limits, and then runs the generated code in its process.

Files beside it: `program.py`, the generated code, and `task.json` with `user` (id to become; null: stay), `limits`
(resource limits by name) and `call` (an expression; null: none). Nothing here is secret: the generated code can read
and change all of it in memory. The expected results are outside.
"""

import json
import os
import resource
import sys

STARTED = b"hotseat: started\n"  # the first line of output: what follows is the generated code's doing


def main(folder: str) -> None:
    with open(os.path.join(folder, "task.json"), encoding="utf-8") as file:
        task = json.load(file)
    with open(os.path.join(folder, "program.py"), encoding="utf-8") as file:
        program = file.read()
    if task["user"] is not None:
        os.setgroups([])
        os.setresgid(task["user"], task["user"], task["user"])
        os.setresuid(task["user"], task["user"], task["user"])
    for name, value in task["limits"].items():
        resource.setrlimit(getattr(resource, name), (value, value))
    os.write(1, STARTED)
    variables = {"__name__": "__main__", "__builtins__": __builtins__}
    sys.argv[:] = ["program.py"]
    if task["call"] is None:
        exec(compile(program, "program.py", "exec"), variables)
        return
    results = os.dup(1)
    os.dup2(2, 1)  # the result is the only output
    variables["__name__"] = "program"
    exec(compile(program, "program.py", "exec"), variables)
    result = json.dumps(eval(compile(task["call"], "call", "eval"), variables))
    os.write(results, result.encode())


main(os.path.dirname(os.path.abspath(__file__)))
