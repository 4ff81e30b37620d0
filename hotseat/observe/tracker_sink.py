"""Metrics for W&B, MLflow and Trackio, which may be slow, unreachable or broken without an effect on the run.

A tracker runs in a process of its own (`tracker_process.py`), because it can hang, and leaves exit hooks and services
behind in the process that starts it. A thread feeds that process from a bounded queue. Keys stay in the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hotseat import extensions
from hotseat.config import Config
from hotseat.config.hiding import without_secrets
from hotseat.files import write_whole
from hotseat.observe.metric_files import Value
from hotseat.observe.tracker_process import KEY as KEY
from hotseat.processes import ChildProcess, Closed, WorkerDied
from hotseat.processes.supervisor import TRACKER, end_marked

_PROGRAM = Path(__file__).with_name("tracker_process.py")
_ROOT = str(Path(__file__).parents[2])  # which the program imports from, wherever this package was found


@dataclass(frozen=True)
class Tracker:
    """A kind of tracker, with its limits in seconds."""

    kind: str  # also the name of its package, and of the extra that installs it
    label: str
    close_s: float  # limits at the end of a run: for it to have started, and again for sending the rest
    start_s: float = 60.0  # limit for its first answer, while the run continues
    max_waiting: int = 1000  # records

    @property
    def hint(self) -> str:
        return f"the {self.kind} package is not installed: pip install 'hotseat[{self.kind}]'"

    def is_installed(self) -> bool:
        """Return whether the package is installed. A folder of its name that a run left behind does not count."""
        spec = importlib.util.find_spec(self.kind)
        return spec is not None and spec.origin is not None


WANDB = Tracker("wandb", "Weights & Biases", 5.0)
MLFLOW = Tracker("mlflow", "MLflow", 30.0)  # makes the tables of a new data base first
TRACKIO = Tracker("trackio", "Trackio", 15.0)


def is_wandb_requested(is_enabled: bool, environment: Mapping[str, str]) -> bool:
    """Return whether the config, or a key in the environment, turns W&B on; WANDB_MODE=disabled overrides the key."""
    return is_enabled or bool(environment.get(KEY) and environment.get("WANDB_MODE") != "disabled")


class TrackerSink:
    """Passes the metrics of each step to a tracker. It never waits or raises, and prints at most one line on failures.

    The feeding thread takes records from the queue and waits for the process to read them; `close` and the death of
    the process wake it. The hearing thread reads the process's messages until it ends.
    """

    def __init__(
        self,
        tracker: Tracker,
        run_dir: Path,
        config: Mapping[str, Any],
        say: Callable[..., object],  # (text), or (text, "warning")
        *,
        is_resumed: bool = False,
        where: Mapping[str, str | None] | None = None,  # its own names for the place of the run, such as `project`
    ):
        self._tracker = tracker
        id_path = run_dir / f"{tracker.kind}.json"
        self._say = say
        self._waiting: deque[dict[str, Any]] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._has_failed = self._has_warned = False
        self._num_dropped = 0
        self._has_started = threading.Event()  # or ended before it did
        saved_id = None  # None: a new run, or the tracker was off before
        if is_resumed:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                saved_id = str(json.loads(id_path.read_text())["id"])
        task = {
            **dict.fromkeys(("entity", "project", "group", "name", "uri", "space")),
            **(where or {}),
            "kind": tracker.kind,
            "id": saved_id,
            "dir": str(run_dir),
            "config": without_secrets(config),
            "start_s": tracker.start_s,
            "grace_s": 2 * tracker.close_s,
        }
        self._mark = secrets.token_hex(8)
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _ROOT)))
        self._process: ChildProcess | None = None
        self._threads: list[threading.Thread] = []
        try:
            self._process = ChildProcess(
                _PROGRAM,
                task,
                command=(sys.executable, "-P"),
                env={**os.environ, "PYTHONPATH": path, "WANDB_SILENT": "true", TRACKER: self._mark},
                is_closed=lambda: self._has_failed,
            )
        except OSError as error:
            self._fail(f"could not be started: {error}")
            return
        for target in (self._feed, partial(self._hear, id_path)):
            self._threads.append(threading.Thread(target=target, args=(self._process,), daemon=True))
            self._threads[-1].start()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        with self._changed:
            if self._has_failed or self._is_closing or not numbers:
                return
            if len(self._waiting) == self._tracker.max_waiting:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append({"step": step, "values": numbers})
            self._changed.notify_all()

    def close(self) -> None:
        """Send the remaining records, for a few seconds at most, and end the tracker's processes."""
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.notify_all()
        if self._process is None or not is_first:
            return
        close_s = self._tracker.close_s
        self._has_started.wait(close_s)
        try:
            if self._process.process.wait(close_s if self._has_started.is_set() else 0) != 0:
                self._fail("ended unexpectedly, and may lack the end of this run")
        except subprocess.TimeoutExpired:
            self._fail("did not finish in time, and may lack the end of this run")
            end_marked(TRACKER, [self._mark])
        for thread in self._threads:
            thread.join(1.0)
        self._process.end()
        if self._num_dropped:
            self._warn(f"was too slow: {self._num_dropped} records were not sent")

    # --- in the threads -----------------------------------------------------------------------------------------------

    def _feed(self, process: ChildProcess) -> None:
        with contextlib.suppress(Closed, WorkerDied):  # the hearing thread receives why
            while True:
                with self._changed:
                    while not (self._waiting or self._is_closing or self._has_failed):
                        self._changed.wait()
                    if self._has_failed or not self._waiting:
                        break
                    record = self._waiting.popleft()
                process.send(record)
        with contextlib.suppress(OSError):
            process.socket.shutdown(socket.SHUT_WR)  # it may still send why it failed

    def _hear(self, id_path: Path, process: ChildProcess) -> None:
        with contextlib.suppress(Closed, WorkerDied):
            while True:
                message = process.receive()
                if "started" in message:
                    try:
                        write_whole(id_path, json.dumps({"id": message["id"]}) + "\n")
                    except OSError as error:
                        self._warn(f"would begin a new run at a resume: {id_path.name}: {error}")
                    self._has_started.set()
                    self._say(f"{self._tracker.label}: {message['started']}")
                else:
                    self._fail(f"failed: {message['failed']}")
        if not self._is_closing:
            self._fail("ended unexpectedly")
        self._has_started.set()

    def _fail(self, what: str) -> None:
        """Give up on the tracker: drop waiting records, wake the feeding thread, and warn once."""
        with self._changed:
            self._has_failed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._warn(what)

    def _warn(self, what: str) -> None:
        with self._changed:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            text = f"warning: {self._tracker.label} {what}; the run is not affected, and metrics.jsonl has every number"
            self._say(text, "warning")


def trackers(config: Config, run_dir: Path, say: Callable[..., object], is_resumed: bool) -> list[TrackerSink]:
    """Make the sinks of trackers that the config, or a key for W&B in the environment, asks for."""
    wandb, mlflow, trackio = config.log.wandb, config.log.mlflow, config.log.trackio
    places: dict[Tracker, dict[str, str | None]] = {}
    if is_wandb_requested(wandb.enabled, os.environ):
        if WANDB.is_installed():
            place = {"entity": wandb.org, "project": wandb.project, "group": wandb.group}
            places[WANDB] = place | {"name": wandb.run_name or run_dir.name}
        else:
            say(f"{KEY} is set, but {WANDB.hint}")
    if mlflow.enabled:
        places[MLFLOW] = {"uri": mlflow.uri, "project": mlflow.experiment, "name": mlflow.run_name or run_dir.name}
    if trackio.enabled:
        place = {"project": trackio.project, "space": trackio.space, "group": trackio.group}
        places[TRACKIO] = place | {"name": trackio.run_name or run_dir.name}
    settings = config.model_dump(mode="json")
    return [
        TrackerSink(tracker, run_dir, settings, say, is_resumed=is_resumed, where=place)
        for tracker, place in places.items()
    ]


def renaming(config: Config) -> Callable[[int, Mapping[str, Any]], Mapping[str, Any]]:
    """Return what adds OpenRLHF's names to the metrics that trackers get."""
    if not config.log.openrlhf_names:
        return lambda step, values: values
    algorithm = config.algorithm
    kl = algorithm.kl.coef if algorithm.kl.as_loss else 0.0
    # Those of other tasks are unset.
    terms = (
        kl,
        algorithm.entropy_coef,
        algorithm.distill_coef,
        algorithm.distill.coef,
        algorithm.dpo.nll_coef,
        algorithm.aux_loss_coef,
    )
    is_plain = not any(terms)
    with_names = extensions.load(extensions.METRIC_NAMES)
    return lambda step, values: with_names(config.task, step, values, is_plain_loss=is_plain)
