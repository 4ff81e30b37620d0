"""When a run saves itself, what it saves, and how it goes on from there."""

from __future__ import annotations

import concurrent.futures
import copy
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hotseat import faults
from hotseat.config import Config, to_saved
from hotseat.config.changes import Change, changes_between
from hotseat.errors import CheckpointError, DeadlineError, UserError
from hotseat.loop.devices.memory import available_bytes
from hotseat.loop.state.checkpoints import Checkpoint, CheckpointStore
from hotseat.loop.state.run_dir import LOCK, in_use, owner_of, write_config
from hotseat.observe import Journal

BACKENDS = {"actor": "actor", "critic": "critic_state"}  # folders of a checkpoint that hold what backends saved
BACKEND = BACKENDS["actor"]
MODEL, CRITIC = "model", "critic"  # folders of a run or a checkpoint that hold Hugging Face models

# Host memory that must be there for a copy of the state, in times its size: the rest of the run wants some too.
_ROOM_FOR_A_COPY = 2
# For a save that is under way when a run fails. Long enough to be worth it, and an error is not kept back for long.
_LAST_WAIT_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
# Of checkpoints that nobody asked for: a run stands still for at most one part in so many, and they take at most one
# part in so many of the free disk.
_TIME_PARTS, _DISK_PARTS = 20, 2


@dataclass(frozen=True)
class Parts:
    """What a task has to save, as calls to its groups."""

    num_bytes: Callable[[], int]  # that `write` will need
    write: Callable[[Path], object]  # into the checkpoint's folder; the backend's into `BACKEND` there
    export: Callable[[Path], object]
    state: Callable[[], Mapping[str, Any]]  # facts of the loop, as JSON
    # As `write`, but only until it is copied; what it gives says whether all of it is written, or raises why not.
    snapshot: Callable[[Path], Callable[[], bool]] | None = None


def critic_folder(model: Path) -> Path:
    """Where the critic of a model is exported to."""
    return model.with_name(CRITIC) if model.name == MODEL else model.with_name(f"{model.name}_{CRITIC}")


class _Flight:
    """A checkpoint that a thread completes while the run goes on.

    Takes what says whether the ranks have written their shares, and asks until they have; then commits. Ends with the
    error of either, or when it is given up: then nothing is committed, unless that had begun.
    """

    def __init__(self, step: int, is_written: Callable[[], bool], commit: Callable[[], object], timeout_s: float):
        self.step = step
        self.done: Future[None] = Future()
        self._is_written = is_written
        self._commit = commit
        self._timeout_s = timeout_s
        self._is_given_up = threading.Event()
        threading.Thread(target=self._run, name=f"checkpoint of step {step}", daemon=True).start()

    def wait(self, timeout_s: float) -> None:
        """Until it is there. Raises why it is not."""
        concurrent.futures.wait([self.done], timeout=timeout_s)
        if not self.done.done():
            raise self._late(timeout_s)
        self.done.result()

    def give_up(self) -> None:
        self._is_given_up.set()

    def _run(self) -> None:
        try:
            if self._wait_for_ranks():
                self._commit()
        except BaseException as error:  # what torch raises is no `Exception`; whoever waits gets it
            self.done.set_exception(error)
        else:
            self.done.set_result(None)

    def _wait_for_ranks(self) -> bool:
        until, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._is_written():
            if time.monotonic() > until:
                raise self._late(self._timeout_s)
            if self._is_given_up.wait(pause_s):
                break
            pause_s = min(_LONGEST_PAUSE_S, pause_s * 1.5)
        return not self._is_given_up.is_set()

    def _late(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"the checkpoint of step {self.step} was not written in {timeout_s:.1f} s: set cluster.call_timeout_s"
            " higher if the disk takes that long"
        )


class Saver:
    """Writes checkpoints as the config asks, and finds the one to go on from.

    At most one is being written: whoever wants another, a model or the end of the run waits for it first.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tokenizer: Any = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`tokenizer`: what is exported beside each model."""
        section = config.checkpoint
        self._config = config
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._timeout_s = config.cluster.call_timeout_s
        self._flight: _Flight | None = None
        self._stood_still_s: float | None = None  # since `metrics` was asked
        self.changes: list[Change] = []  # since the checkpoint that `find` returned
        self._clock = clock
        self._saved_s = clock()  # when last, or when the run began
        self._cost_s = 0.0  # for which the last save held the run up
        self._warned_of_room = False
        self._last_made: int | None = None  # the last step that was finished
        self.has_begun = False  # steps are being made: a signal lets the one under way come to its end
        self._has_stopped = False  # the step under way was finished and saved, and the run ends
        self.is_stopping = False  # after the step that is under way; set by a signal, so at any moment
        self._store = CheckpointStore(
            Path(section.path) if section.path else run_dir / "checkpoints",
            keep_last=section.keep_last,
            max_bytes=None if section.max_gib is None else int(section.max_gib * 2**30),
        )

    def find(self, stack: ExitStack, say: Callable[[str], object]) -> Checkpoint | None:
        """The checkpoint to go on from, if the run is to go on and there is one. Nobody else may write here then."""
        section = self._config.checkpoint
        is_named = section.is_asked_for or section.resume or section.path is not None
        if not is_named and not self._store.directory.exists():
            return None  # by default the folder is made with the first checkpoint
        self._store.prepare()
        if self._config.checkpoint.path is not None:
            stack.enter_context(sole_owner(self._store.directory))
        for name in self._store.clean():
            say(f"{name} was not finished, and is removed")
        if not self._config.checkpoint.resume:
            if self._store.steps():
                raise UserError(
                    f"{self._store.directory} holds checkpoints of another run: set checkpoint.resume=true to go on"
                    " from them, or checkpoint.path to another place"
                )
            return None
        found = self._store.newest()
        if found is None:
            say(f"{self._store.directory} has no checkpoint to resume from: this run starts from its first step")
            return None
        if not (found.path / BACKEND).is_dir():
            raise CheckpointError(
                f"{found.path} holds a model but not what resuming needs (it was written with"
                " checkpoint.save_state=false): start anew with that model"
            )
        self.changes = changes_between(str(found.state["config"]), self._config)
        for change in self.changes:
            say(f"{change}{' (allowed)' * change.is_allowed}")
        say(f"resuming from {found.path}, after step {found.step}")
        return found

    def keep(self, config: Config) -> None:
        """Take over a config in which the run has changed something: into its folder, and into later checkpoints."""
        self._config = config
        write_config(self._run_dir, config)

    def last_step(self) -> int | None:
        """Of the newest checkpoint that can be gone on from."""
        steps = self._store.steps() if self._config.checkpoint.save_state else []
        return steps[-1] if steps else None

    @property
    def can_save(self) -> bool:
        """Whether the config asks for checkpoints."""
        return self._config.checkpoint.every is not None or self._config.checkpoint.minutes is not None

    def is_due(self, step: int, is_stopping: bool) -> bool:
        """Whether a checkpoint is to be made after a step."""
        every = self._config.checkpoint.every
        is_at_step = every is not None and step % every == 0
        return is_at_step or self._is_late() or (is_stopping and self.can_save)

    def _is_late(self) -> bool:
        """Tell whether a checkpoint is due by time: minutes since the last, and it stops the run for little of them."""
        section = self._config.checkpoint
        if section.minutes is None:
            return False
        least_s = section.minutes * 60
        if section.every_minutes is None:
            least_s = max(least_s, _TIME_PARTS * self._cost_s)
        return self._clock() - self._saved_s >= least_s

    def made(self, step: int) -> None:
        """Note that a step was finished."""
        self._last_made = step

    def ending(self, command: str) -> str:
        """Word what of a run that is interrupted now is lost, and how it is resumed."""
        saved = self.last_step()
        made = self._last_made or saved or 0
        if saved is None and not made:
            return "it made no step: start it again with the same command"
        if saved is None:
            section = self._config.checkpoint
            first = f"the first would have come after {section.minutes:g} minutes; " if section.minutes else ""
            return (
                f"{made} {'step is' if made == 1 else 'steps are'} lost: there is no checkpoint to resume from ({first}"
                "checkpoint.every=1 makes one after each step)"
            )
        lost = "nothing is lost" if self._has_stopped else "nothing is lost but the step under way"
        if made > saved:
            lost = f"step {made} is lost" if made == saved + 1 else f"steps {saved + 1} to {made} are lost"
        return f"{lost}: the last checkpoint is of step {saved}. Resume with: {command}"

    def after_step(self, step: int, parts: Parts, evaluation: Mapping[str, float], journal: Journal) -> None:
        """Save if it is time to, or if the run is asked to stop; then stop. Raises if the save before went wrong."""
        self.made(step)
        is_stopping = self.is_stopping  # asked once: whoever is told later must not end here without a save
        path = self.save_if_due(step, parts, evaluation, journal, is_stopping)
        if path is not None and (is_stopping or self.is_stopping):
            self.stop(path, journal)

    def save_if_due(
        self, step: int, parts: Parts, evaluation: Mapping[str, float], journal: Journal, is_stopping: bool
    ) -> Path | None:
        """Where the checkpoint of a step is, or soon will be, if there is one."""
        if self._flight is not None and self._flight.done.done():
            self.wait()
        if not self.is_due(step, is_stopping):
            return None
        if not (self._config.checkpoint.is_asked_for or is_stopping or self._has_room(parts, journal)):
            self._saved_s = self._clock()
            return None
        journal.phase("save")
        started_s = self._clock()
        path = self.save(step, parts, evaluation)
        self._saved_s = self._clock()
        self._cost_s = self._saved_s - started_s
        self._stood_still_s = (self._stood_still_s or 0.0) + self._cost_s
        return path

    def _has_room(self, parts: Parts, journal: Journal) -> bool:
        """Tell whether a checkpoint by default leaves enough of the disk to others; warn once if it does not."""
        folder = next(
            path for path in (self._store.directory, *self._store.directory.absolute().parents) if path.exists()
        )
        num_bytes, free = parts.num_bytes(), shutil.disk_usage(folder).free
        if _DISK_PARTS * num_bytes <= free:
            return True
        if not self._warned_of_room:
            journal.say(
                f"no checkpoint is made: it takes {num_bytes / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free; set"
                " checkpoint.path to a larger disk and checkpoint.every, or checkpoint.every_minutes to 0",
                kind="warning",
            )
        self._warned_of_room = True
        return False

    def stop(self, path: Path, journal: Journal) -> NoReturn:
        """As soon as that checkpoint is there."""
        self.wait()
        self._has_stopped = True
        journal.say(f"saved {path}")
        raise KeyboardInterrupt

    def metrics(self) -> dict[str, float]:
        """The seconds that steps waited for saves since this was last asked, if there was one."""
        seconds, self._stood_still_s = self._stood_still_s, None
        return {} if seconds is None else {"time/save": seconds}

    def save(self, step: int, parts: Parts, evaluation: Mapping[str, float]) -> Path:
        """Everything that going on after `step` needs, in one checkpoint: where it is, or soon will be."""
        self.wait()
        section = self._config.checkpoint
        faults.reach("save.before")
        num_bytes = parts.num_bytes() if section.save_state else 0
        snapshot = parts.snapshot if self._is_safe_behind(num_bytes) else None
        state = {
            "step": step,
            "task": self._config.task,
            "config": to_saved(self._config),
            "best_metric": _best(section.best_metric, evaluation),
            **copy.deepcopy(dict(parts.state())),  # of now, whatever the run does until it is written
        }
        is_written: Callable[[], bool] | None = None
        with self._store.writing(step, num_bytes) as path:
            if section.export_each or not section.save_state:
                parts.export(path / MODEL)
                folders = [path / MODEL, *([critic_folder(path / MODEL)] if section.export_critic else [])]
                for folder in folders if self._tokenizer is not None else ():
                    self._tokenizer.save_pretrained(folder)
            if section.save_state and snapshot is not None:
                is_written = snapshot(path)
            elif section.save_state:
                parts.write(path)
        if is_written is None:
            return self._store.commit(step, state)

        def ask() -> bool:
            with self._store.explained(step):
                return is_written()

        self._flight = _Flight(step, ask, lambda: self._store.commit(step, state), self._timeout_s)
        return self._store.path(step)

    def _is_safe_behind(self, num_bytes: int) -> bool:
        """Whether the run may go on while a checkpoint is written."""
        if self.is_stopping:
            return False
        wanted = self._config.checkpoint.background
        return _ROOM_FOR_A_COPY * num_bytes <= available_bytes() if wanted is None else wanted

    def wait(self) -> None:
        """Until no checkpoint is being written. Raises what went wrong with it."""
        if self._flight is None:
            return
        try:
            self._flight.wait(self._timeout_s)
        except KeyboardInterrupt:
            raise  # `settled` gives it up
        except BaseException:
            self._flight = None
            raise
        self._flight = None

    @contextmanager
    def settled(self, journal: Journal) -> Iterator[None]:
        """Around the steps of a run: however they end, no checkpoint is left halfway that could be completed."""
        self.has_begun = True
        try:
            yield
            self.has_begun = False  # what is left to do after the last step is not saved
            if self._flight is not None:
                journal.phase("save")
            self.wait()
        except KeyboardInterrupt:
            if self._flight is not None:
                self._flight.give_up()  # the next run removes its remains
            raise
        except BaseException:
            flight, self._flight = self._flight, None
            if flight is not None:
                with suppress(BaseException):  # why the run failed is what is told
                    flight.wait(min(self._timeout_s, _LAST_WAIT_S))
                flight.give_up()
            raise


def _best(name: str | None, evaluation: Mapping[str, float]) -> float | None:
    if name == "none" or not evaluation:
        return None
    if name is None:
        name = "eval/accuracy" if "eval/accuracy" in evaluation else next(iter(evaluation))
    value = evaluation.get(name, evaluation.get(f"eval/{name}"))
    if value is None:
        raise UserError(f"checkpoint.best_metric {name!r} was not measured; there are {', '.join(evaluation)}")
    return -value if name.endswith("loss") else value


@contextmanager
def sole_owner(run_dir: Path) -> Iterator[None]:
    """Holds the directory for this process, until it ends in whatever way."""
    with (run_dir / LOCK).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(run_dir, owner_of(run_dir) or "another run") from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield
