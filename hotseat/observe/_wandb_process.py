"""The process that runs W&B. Run as a program; needs only the standard library and `wandb`.

It reads JSON lines: first its settings, then one record per step, until the pipe closes. It writes at most two JSON
lines to standard output: that it started, and the first failure. Once the pipe is closed, by `close` or by the death of
the run, it has some seconds to finish, and then ends itself and all that it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from typing import Any

KEY = "WANDB_API_KEY"
PROJECT = "hotseat"
# Numbers and config only: no console, no code, nothing about machine or repository.
SETTINGS = {
    "silent": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
}


def main() -> None:
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)  # drop the output of wandb and its processes
    os.dup2(nowhere, 2)
    task = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_when_alone, args=(task["grace_s"],), daemon=True).start()
    try:
        run = _start(task)
        # W&B's own step counter cannot go back, but a resumed run repeats some steps.
        run.define_metric("*", step_metric="step")
        _tell(out, {"started": str(getattr(run, "url", None) or getattr(run, "dir", ""))})
        for line in sys.stdin:
            record = json.loads(line)
            run.log({**record["values"], "step": record["step"]})
        run.finish()
        _tear_down()
    except BaseException as error:
        _tell(out, {"failed": _without_key(f"{type(error).__name__}: {error}")})
    end_with_children(os.getpid(), 0)


def _start(task: dict[str, Any]) -> Any:
    import wandb

    known = getattr(wandb.Settings, "model_fields", SETTINGS)
    settings = {**SETTINGS, "init_timeout": task["start_s"]}
    return wandb.init(
        id=task["id"],
        resume="allow",
        entity=task["entity"],
        project=task["project"] or os.environ.get("WANDB_PROJECT") or PROJECT,
        group=task["group"],
        name=task["name"],
        dir=task["dir"],
        config=task["config"],
        settings=wandb.Settings(**{name: value for name, value in settings.items() if name in known}),
    )


def _tear_down() -> None:
    """Wait for W&B's service to end: it may still hold what it has not written to the disk."""
    import wandb

    if hasattr(wandb, "teardown"):
        wandb.teardown()


def _end_when_alone(grace_s: float) -> None:
    """Wait until the pipe's other end is closed, even if not all is read, and end this process after a grace period."""
    poll = select.poll()
    poll.register(0, 0)  # no events: the closing of a pipe is reported anyway
    while not poll.poll():
        pass
    time.sleep(grace_s)
    end_with_children(os.getpid(), 1)


def end_with_children(pid: int, code: int | None = None) -> None:
    """End a process and all that it started. code: exit code if `pid` is this process; None for another one."""
    if code is None:
        _stop(pid)
    for child in reversed(_stopped_descendants(pid)):
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)
    if code is not None:
        os._exit(code)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _stop(pid: int) -> None:
    """Stop a process, so that it starts no more children."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGSTOP)


def _stopped_descendants(pid: int) -> list[int]:
    """Stop and list all descendants, parents first. W&B's service has its own session and group."""
    descendants: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                for child in map(int, file.read().split()):
                    _stop(child)
                    descendants += [child, *_stopped_descendants(child)]
    return descendants


def _tell(out: int, message: dict[str, str]) -> None:
    with contextlib.suppress(OSError):
        os.write(out, json.dumps(message).encode() + b"\n")


def _without_key(text: str) -> str:
    key = os.environ.get(KEY)
    return " ".join((text.replace(key, "***") if key else text).split())[:300]


if __name__ == "__main__":
    main()
