"""`hotseat run` and `hotseat resume` start their driver again when it dies, from the newest checkpoint.

The process that the user started stays small: it forks the driver (`hotseat/processes/kept_driver.py`), judges its end,
and starts it again, as long as there is a new checkpoint within `run.max_restarts` restarts.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from hotseat.cli.ending import REFUSED
from hotseat.interrupts import STOPPED
from hotseat.processes.kept_driver import DriverEnd, DriverKeeper, Restart, show_cursor
from hotseat.processes.supervisor import clean_up

# Exit code of a command whose run died and would continue if it were started again: EX_TEMPFAIL of sysexits.h.
DIED = 75
# Pauses before the first, second and later restarts in a row without a new checkpoint: a lost node may come back.
PAUSES_S = (0.0, 10.0, 30.0)
COMMANDS = ("run", "resume")


@dataclass(frozen=True)
class DriverVerdict:
    """Meaning of an end of a driver. text: why it died, if it did."""

    kind: Literal["over", "death", "comes again"]
    text: str = ""


def is_kept(argv: Sequence[str]) -> bool:
    """Tell whether a command starts a driver that is to be started again."""
    return bool(argv) and argv[0] in COMMANDS and not {"-h", "--help"} & set(argv)


def keep(argv: Sequence[str]) -> list[str]:
    """Fork the driver of a command, and again after each death.

    Returns in the forked drivers alone, with the arguments of each. In the process that the user started it never
    returns: it raises `SystemExit` once no further driver is to be started.
    """
    with closing(DriverKeeper(_prepare)) as keeper:
        return _keep(keeper, list(argv))


def _prepare(facts: Mapping[str, Any]) -> Callable[[], object]:
    from hotseat.loop.start import prepare_driver

    return prepare_driver(Path(facts["run"]))


def _keep(keeper: DriverKeeper, arguments: Sequence[str]) -> list[str]:
    book = RestartBook()
    while True:
        end = keeper.run(book.restarts, arguments)
        if end is None:
            return keeper.arguments
        verdict = judge(end, is_restart=bool(book.restarts))
        book.note(end.facts)
        if verdict.kind != "death" or keeper.stopped_by is not None:
            if verdict.kind == "comes again":
                _say("it is not started again: this error would come again")
            sys.exit(exit_code(end))
        show_cursor()
        problem = book.problem()
        if problem is not None:
            _say(f"{verdict.text}; {problem}")
            sys.exit(DIED)
        text = book.count(verdict.text)
        _say(text)
        if book.remains:
            clean_up(book.remains)  # its own supervisor does that too, and may have died with it
        if keeper.pause(book.pause_s):
            _say("stopped")
            sys.exit(STOPPED)
        arguments = book.arguments


def judge(end: DriverEnd, *, is_restart: bool = False) -> DriverVerdict:
    """Say what an end of a driver means. A driver that ends in order announces that as its last fact.

    What is refused at a restart was accepted before: something has changed around the run, such as a node that is lost.
    """
    error = end.facts.get("error")
    if error is not None:
        return DriverVerdict("comes again" if end.facts["comes_again"] else "death", error)
    if is_restart and end.facts.get("over") == REFUSED:
        return DriverVerdict("death", "it could not begin again")
    if "over" in end.facts or end.code == STOPPED:  # a second Ctrl-C ends it at once
        return DriverVerdict("over")
    if end.code < 0:
        name = signal.Signals(-end.code).name
        hint = " (if nobody did that, memory may have run out)" if end.code == -signal.SIGKILL else ""
        return DriverVerdict("death", f"its driver was ended by {name}{hint}")
    if "run" not in end.facts:
        return DriverVerdict("over")  # such as a wrong command line
    return DriverVerdict("death", f"its driver exited with code {end.code}, without an error")


def exit_code(end: DriverEnd) -> int:
    """Return the exit code by which a shell knows how a process ended."""
    return end.code if end.code >= 0 else 128 - end.code


@dataclass
class RestartBook:
    """Facts that drivers told of their run, and the restarts so far."""

    run_dir: str | None = None
    max_restarts: int = 0
    allowed: Sequence[str] = ()  # keys of `--allow-change`
    remains: Any = None  # what a dead driver left behind; see `supervisor.clean_up`
    saved: int = -1  # the newest step that has a checkpoint; -1: there is none
    restarts: list[Restart] = field(default_factory=list)
    _num_in_vain: int = 0  # restarts since the last new checkpoint

    def note(self, facts: Mapping[str, Any]) -> None:
        """Update these facts by those that a driver told."""
        self.run_dir = facts.get("run", self.run_dir)
        self.max_restarts = facts.get("max_restarts", self.max_restarts)
        self.allowed = facts.get("allowed", self.allowed)
        self.remains = facts.get("remains")
        saved = facts.get("saved", -1)
        if saved > self.saved:
            self.saved, self._num_in_vain = saved, 0
        self._num_in_vain += facts.get("in_vain", 0)  # restarts of groups, by the driver itself

    def problem(self) -> str | None:
        """Return why the driver is not started again; None if it is."""
        if self.run_dir is None:
            return "no run had begun: start it again with the same command"
        again = f"resume it with: hotseat resume {self.run_dir}"
        if self.saved < 0:
            again = (
                "it has no checkpoint to resume from: start it again with the same command and checkpoint.resume=true"
            )
        if self.max_restarts == 0:
            return f"run.max_restarts is 0, so it is not started again; {again}"
        if self._num_in_vain >= self.max_restarts:
            times = "once" if self.max_restarts == 1 else f"{self.max_restarts} times"
            return f"it was started again {times} without a new checkpoint (run.max_restarts), and is given up; {again}"
        return None

    def count(self, cause: str) -> str:
        """Count one more restart, and return the line that announces it."""
        self._num_in_vain += 1
        where = f"resumes after step {self.saved}" if self.saved >= 0 else "begins at its first step"
        number = f"restart {self._num_in_vain} of {self.max_restarts} without a new checkpoint"
        text = f"{cause}; started again, {where} ({number})"
        self.restarts.append(Restart(time.time(), text))
        return text

    @property
    def pause_s(self) -> float:
        """Return how long to wait before the next restart."""
        return PAUSES_S[min(self._num_in_vain, len(PAUSES_S)) - 1]

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of the next driver."""
        assert self.run_dir is not None
        return ["resume", self.run_dir, *(word for key in self.allowed for word in ("--allow-change", key))]


def _say(text: str) -> None:
    print(f"hotseat: {text}", file=sys.stderr, flush=True)
