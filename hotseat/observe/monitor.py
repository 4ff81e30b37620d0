"""Watches over a run from within: measures the machine, and writes a sign of life into the run's directory.

`hotseat status` reads that file, wherever it runs. The thread takes no lock of the loop, and a disk that is full or
slow holds nobody up.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from hotseat.files import write_whole
from hotseat.observe.machine_use import MACHINE, DeviceUse, MachineUse, UseHistory, summary
from hotseat.observe.run_progress import RunProgress
from hotseat.words import without_url_secrets

HEARTBEAT = "heartbeat.json"
SAMPLE_EVERY_S = 2.0
BEAT_EVERY_S = 5.0
State = Literal["running", "finished", "stopped", "failed"]


class Monitor:
    """Samples the machine and writes signs of life, in a thread, until it is closed.

    run_progress: of the run. endpoint: the address at which the run serves its metrics, if it does.
    """

    def __init__(self, run_dir: Path, run_progress: RunProgress, *, every_s: float = SAMPLE_EVERY_S):
        self.endpoint: str | None = None
        self._run_dir = run_dir
        self._progress = run_progress
        self._every_s = every_s
        self._use = MachineUse()
        self._history = UseHistory(run_dir / MACHINE, every_s)
        self._samples: deque[Mapping[str, float]] = deque(maxlen=4096)  # since the last step
        self._newest = self._use.sample()  # without shares of time, which begin here
        self._started_s = time.time()
        self._ended = threading.Event()
        self._beat("running")
        self._thread = threading.Thread(target=self._watch, name="monitor", daemon=True)
        self._thread.start()

    @property
    def newest(self) -> Mapping[str, float]:
        """Return the newest figures of the machine, by the names of their metrics."""
        return self._newest

    def watch_devices(self, devices: Mapping[int, DeviceUse]) -> None:
        """Measure these devices, too, from now on."""
        self._use.devices = dict(devices)

    def serves_at(self, address: str) -> None:
        """Take note of the address at which the run serves its metrics."""
        self.endpoint = address
        self._beat("running")

    def metrics(self) -> dict[str, float]:
        """Return the use of the machine since the last call; after a short time, the newest figures."""
        samples = []
        with suppress(IndexError):
            while True:
                samples.append(self._samples.popleft())
        return summary(samples) if samples else dict(self._newest)

    @contextmanager
    def until_the_end(self) -> Iterator[None]:
        """Enclose the run: however it ends, the last sign of life says so."""
        try:
            yield
        except KeyboardInterrupt:
            self._end("stopped")
            raise
        except BaseException as error:
            self._end("failed", f"{type(error).__name__}: {error}")
            raise
        self._end("finished")

    def _end(self, state: State, error: str | None = None) -> None:
        self._ended.set()
        self._thread.join(5.0)  # a disk that hangs must not hold up the end
        self._beat(state, error)

    def _watch(self) -> None:
        beaten_s = time.monotonic()
        while not self._ended.wait(self._every_s):
            self._newest = self._use.sample()
            self._samples.append(self._newest)
            with suppress(OSError):
                self._history.add(self._progress.steps_made, self._newest)
            if time.monotonic() - beaten_s >= BEAT_EVERY_S:
                beaten_s = time.monotonic()
                self._beat("running")

    def _beat(self, state: State, error: str | None = None) -> None:
        if state == "running" and self._ended.is_set():
            return  # the last sign of life is written
        now_s, made = time.time(), self._progress
        beat: dict[str, Any] = {
            "time": now_s,
            "state": state,
            "error": None if error is None else without_url_secrets(error)[:2000],
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": self._started_s,
            "step": made.steps_made,
            "num_steps": made.num_steps,
            "doing": made.doing,
            "since": made.since_s,
            "progress": now_s - made.quiet_s,
            "limit_s": made.limit_s,
            "endpoint": self.endpoint if state == "running" else None,
            "machine": dict(self._newest),
            "uploads": made.uploads(),
        }
        with suppress(OSError):  # full, or gone: that is for the run to say
            write_whole(self._run_dir / HEARTBEAT, json.dumps(beat, indent=1) + "\n")
