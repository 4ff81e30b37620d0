"""Runs that pause at a fault point, so that a test acts exactly there, however busy the machine is."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import preloaded
from loop_cases import rl_yaml

from hotseat import faults
from hotseat.faults import VARIABLE, Fault
from hotseat.processes.supervisor import process_state


def wait_for(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def held(point: str, wait: Callable[[], bool]) -> Iterator[None]:
    """Pause this process at a point, the first time it is reached. `wait` returns whether its condition came true."""
    reach, arrivals = faults.reach, itertools.count()

    def reach_and_wait(name: str) -> None:
        if name == point and next(arrivals) == 0:
            assert wait(), f"held at {point} for too long"
        reach(name)

    faults.reach = reach_and_wait
    try:
        yield
        assert next(arrivals) > 0, f"{point} was not reached"
    finally:
        faults.reach = reach


def arm(directory: Path, planned: Sequence[Fault]) -> None:
    directory.mkdir(exist_ok=True)
    for number, fault in enumerate(planned):
        fault.arm(directory, f"{number}-{fault.point}")


@contextmanager
def started(task: Path, *overrides: str, planned: Sequence[Fault], name: str = "run") -> Iterator[preloaded.Process]:
    """Start `hotseat run` in a process, with faults."""
    arm(task / "faults", planned)
    (task / f"{name}.yaml").write_text(rl_yaml(task, name=name))
    with preloaded.popen(
        [sys.executable, "-m", "hotseat.cli.main", "run", str(task / f"{name}.yaml"), *overrides],
        env={**os.environ, VARIABLE: str(task / "faults")},
        stdout=preloaded.PIPE,
        stderr=preloaded.PIPE,
        text=True,
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def wait_until_stopped(process: preloaded.Process, *others: preloaded.Process) -> None:
    """Wait until a fault has stopped a process, while the others live.

    The fault's `.happened` file exists a moment earlier, when a SIGCONT would still be lost.
    """

    def is_stopped() -> bool:
        assert all(each.poll() is None for each in (process, *others))
        return process_state(process.pid) == "stopped"

    assert wait_for(is_stopped, 240)


def end_stopped(process: preloaded.Process) -> None:
    """Send SIGTERM to a stopped process, and let it continue."""
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
