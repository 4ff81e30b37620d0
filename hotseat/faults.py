"""Named points at which a test can make a process die, stop, fail or wait. They cost nothing unless armed.

`HOTSEAT_FAULTS` names a directory. A file `NAME.fault` in it, with a `Fault` as JSON, arms one fault. The first process
that reaches the point and matches `by` renames the file, so a fault happens once. Processes write their ids there, so
that a point reached in one process can end another.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from hotseat.errors import RunError

VARIABLE = "HOTSEAT_FAULTS"

POINTS = {
    "start-up": "driver: processes are starting",
    "generation.before": "driver: before a rollout",
    "generation.during": "engine: between two tokens of a rollout",
    "group.first": "agents: the first group of a rollout is complete and scored",
    "scoring.during": "agents: a group was given to the reward function",
    "evaluation.during": "agents: the first group of an evaluation is complete and scored",
    "prepare.before": "driver: before experience is prepared",
    "update.before": "driver: before an update",
    "update.micro-batch": "actor: between two micro-batches",
    "update.middle": "actor: gradients are there, the optimizer has not stepped",
    "push.before": "driver: before a push",
    "push.during": "driver: the engines have the first bucket",
    "push.after": "driver: the engines' digests were compared with the trainer's",
    "offload": "driver: before a part is offloaded",
    "onload": "driver: before a part is onloaded",
    "save.before": "driver: before a checkpoint is written",
    "save.during": "actor: while a checkpoint is written",
    "save.commit": "driver: all is written and hashed, before the rename",
    "save.after": "driver: after the rename",
}

# Points before the first step and after the last one, each of which a run passes once.
EDGE_POINTS = {
    "inputs": "driver: before tokenizer and data are read",
    "ray": "driver: before a daemon of Ray is started",
    "export": "driver: before the model is exported",
    "closing": "driver: before the cluster is closed",
}

# Points that only runs with simulators reach.
SIMULATOR_POINTS = {"simulators.during": "env: a stage of simulators is about to step"}

# Points of the thread that uploads checkpoints, where `checkpoint.path` is a URL.
UPLOAD_POINTS = {
    "upload.file": "driver: before a file of a checkpoint is uploaded",
    "upload.manifest": "driver: all other files are uploaded",
    "upload.after": "driver: the manifest is uploaded, and older checkpoints are not deleted yet",
    "upload.delete": "driver: the manifest of an old checkpoint is deleted, and its other files are not",
}

# Points at which a model may run out of device memory. Some runs and steps never reach some of them.
MEMORY_POINTS = {
    "update.forward": "before a micro-batch that is learned from",
    "update.backward": "between its forward and its backward",
    "score.forward": "before a micro-batch that is scored",
    "trial.forward": "before a micro-batch that is tried out; on a CPU only if a fault is armed here",
}

_directory = Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None
_seen: dict[str, int] = {}  # file name of a fault to how often this process reached its point
_ignored: set[str] = set()  # points that this process does not reach now
_me = "driver"


@dataclass(frozen=True)
class Fault:
    """A failure to inject at a point.

    to: name of the process that it happens to, or `self`. by: name of the process that has to reach the point
    (`actor:0`); any process if empty.
    """

    point: str
    do: str  # kill, stop, raise, die (raise what reports a death), out-of-memory, or a number of seconds to sleep
    to: str = "self"
    by: str = ""
    skip: int = 0  # how many times the point is passed before the fault happens

    def arm(self, directory: Path, name: str) -> None:
        assert self.point in POINTS | EDGE_POINTS | SIMULATOR_POINTS | UPLOAD_POINTS | MEMORY_POINTS, self.point
        writing = directory / f".{name}"
        writing.write_text(json.dumps(asdict(self)))
        writing.rename(directory / f"{name}.fault")


def register(name: str, pid: int | None = None) -> None:
    """Write the id of a process under a name. Without an id it is this process, which has that name from now on."""
    global _me
    if _directory is None:
        return
    if pid is None:
        _me, pid = name, os.getpid()
    writing = _directory / f".{name}.{pid}"
    writing.write_text(str(pid))
    writing.rename(_directory / f"{name}.pid")


def is_armed(point: str) -> bool:
    paths = [] if _directory is None else _directory.glob("*.fault")
    return any(Fault(**json.loads(path.read_text())).point == point for path in paths)


@contextlib.contextmanager
def ignoring(point: str) -> Iterator[None]:
    """Disable a fault point inside the context."""
    _ignored.add(point)
    try:
        yield
    finally:
        _ignored.discard(point)


def reach(point: str) -> None:
    """Inject the faults that are armed at a point, which this process has reached."""
    if _directory is None or point in _ignored:
        return
    for path in sorted(_directory.glob("*.fault")):
        with contextlib.suppress(FileNotFoundError):
            fault = Fault(**json.loads(path.read_text()))
            if fault.point != point or (fault.by and fault.by != _me):
                continue
            _seen[path.name] = _seen.get(path.name, 0) + 1
            if _seen[path.name] <= fault.skip:
                continue
            path.rename(path.with_suffix(".happened"))
            _happen(_directory, fault)


def _pid_of(directory: Path, name: str) -> int:
    """Return a process's id, waiting for a process that has not registered yet."""
    path = directory / f"{name}.pid"
    until = time.monotonic() + 60.0
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)
    return int(path.read_text())


def _happen(directory: Path, fault: Fault) -> None:
    if fault.do in ("raise", "die"):
        error = RunError(f"a fault at {fault.point}")
        error.is_death = fault.do == "die"
        raise error
    if fault.do == "out-of-memory":
        import torch

        raise torch.OutOfMemoryError(f"CUDA out of memory, as a fault at {fault.point} has it")
    if fault.do in ("kill", "stop"):
        pid = os.getpid() if fault.to == "self" else _pid_of(directory, fault.to)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if fault.do == "kill" else signal.SIGSTOP)
    else:
        time.sleep(float(fault.do))
