"""The same numbers for Weights & Biases, which may be slow, unreachable or broken without the run noticing.

All of W&B happens in a process of its own (`_wandb_process`): it can hang, and it leaves exit hooks and a service
behind where it was started. A thread feeds that process from a bounded queue. The key stays in the environment.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotseat.observe._wandb_process import KEY as KEY
from hotseat.observe._wandb_process import end_with_children
from hotseat.observe.hiding import without_secrets
from hotseat.observe.metrics import Value

ID_FILE = "wandb.json"
HINT = "the wandb package is not installed: pip install 'hotseat[wandb]'"
MAX_WAITING = 1000  # records
START_S = 60.0  # for W&B to answer at all, while the run goes on
CLOSE_S = 5.0  # at the end of a run: for W&B to have started, and again for what it still has to send


def is_installed() -> bool:
    """A folder `wandb` that an earlier run left in the working directory is not the package."""
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


def is_wanted(is_enabled: bool, environment: Mapping[str, str]) -> bool:
    """By the config, or by a key in the environment unless W&B is turned off there."""
    return is_enabled or bool(environment.get(KEY) and environment.get("WANDB_MODE") != "disabled")


class WandbSink:
    """Takes the metrics of each step and never waits, raises or says more than one line about what went wrong.

    The feeding thread takes records from the queue and waits for the process to read them; `close` and the death of
    the process wake it. The hearing thread waits for what the process tells, until that ends.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        say: Callable[..., object],  # (text), or (text, "warning")
        *,
        is_resumed: bool = False,
        entity: str | None = None,
        project: str | None = None,
        group: str | None = None,
        name: str | None = None,
        start_s: float = START_S,
        close_s: float = CLOSE_S,
        max_waiting: int = MAX_WAITING,
    ):
        self._say = say
        self._close_s = close_s
        self._waiting: deque[bytes] = deque()
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._is_closing = self._has_failed = self._has_warned = False
        self._num_dropped = 0
        self._has_started = threading.Event()  # or ended before it did
        task = {
            "id": _run_id(run_dir / ID_FILE, is_resumed),
            "dir": str(run_dir),
            "config": without_secrets(config),
            "entity": entity,
            "project": project,
            "group": group,
            "name": name,
            "start_s": start_s,
            "grace_s": 2 * close_s,
        }
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("_wandb_process.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run
                env={**os.environ, "WANDB_SILENT": "true"},
            )
        except OSError as error:
            self._fail(f"could not be started: {error}")
            return
        self._feeder = threading.Thread(target=self._feed, args=(self._process, _line(task)), daemon=True)
        self._hearer = threading.Thread(target=self._hear, args=(self._process,), daemon=True)
        self._feeder.start()
        self._hearer.start()

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        with self._changed:
            if self._has_failed or self._is_closing or not numbers:
                return
            if len(self._waiting) == self._max_waiting:
                self._waiting.popleft()
                self._num_dropped += 1
            self._waiting.append(_line({"step": step, "values": numbers}))
            self._changed.notify_all()

    def close(self) -> None:
        """Send what is left, for a few seconds at most, and end everything of W&B's."""
        with self._changed:
            is_first, self._is_closing = not self._is_closing, True
            self._changed.notify_all()
        if self._process is None or not is_first:
            return
        self._has_started.wait(self._close_s)
        try:
            if self._process.wait(self._close_s if self._has_started.is_set() else 0) != 0:
                self._fail("ended unexpectedly, and may lack the end of this run")
        except subprocess.TimeoutExpired:
            self._fail("did not finish in time, and may lack the end of this run")
            end_with_children(self._process.pid)
            self._process.wait()
        self._feeder.join(1.0)
        self._hearer.join(1.0)
        if self._num_dropped:
            self._warn(f"was too slow: {self._num_dropped} records were not sent")

    # --- in the threads -----------------------------------------------------------------------------------------------

    def _feed(self, process: subprocess.Popen[bytes], task: bytes) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(task)
            process.stdin.flush()
            while True:
                with self._changed:
                    while not (self._waiting or self._is_closing or self._has_failed):
                        self._changed.wait()
                    if self._has_failed or not self._waiting:
                        return
                    record = self._waiting.popleft()
                process.stdin.write(record)
                process.stdin.flush()
        except OSError:
            pass  # it has ended: the other thread hears why
        finally:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                message = json.loads(line)
                if "started" in message:
                    self._has_started.set()
                    self._say(f"Weights & Biases: {message['started']}")
                else:
                    self._fail(f"failed: {message['failed']}")
        if not self._is_closing:
            self._fail("ended unexpectedly")
        self._has_started.set()

    def _fail(self, what: str) -> None:
        """It is of no more use: nothing waits for it, and nothing more is said."""
        with self._changed:
            self._has_failed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._warn(what)

    def _warn(self, what: str) -> None:
        with self._changed:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            text = f"warning: Weights & Biases {what}; the run is not affected, and metrics.jsonl has every number"
            self._say(text, "warning")


def _run_id(path: Path, is_resumed: bool) -> str:
    """The one under which the run is known there; a run that goes on keeps it."""
    if is_resumed:
        try:
            return str(json.loads(path.read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # it was not reported before
    found = secrets.token_hex(4)
    path.write_text(json.dumps({"id": found}) + "\n")
    return found


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
