"""Saves checkpoints of a run, and finds the one to resume from."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from hotseat import faults, interrupts
from hotseat.config import Config, to_saved
from hotseat.config.changes import NUM_STEPS, Change, changes_between
from hotseat.config.hiding import has_secrets
from hotseat.errors import CheckpointError, HotseatError, StoreError, UserError
from hotseat.loop.state.background_save import BackgroundSave
from hotseat.loop.state.checkpoints import (
    BACKEND,
    MODEL,
    Checkpoint,
    CheckpointStore,
    chosen_metric,
    critic_folder,
    digest_of_checkpoint,
    shown_bytes,
)
from hotseat.loop.state.memory_snapshots import MemorySnapshots
from hotseat.loop.state.remote_checkpoints import RemoteCheckpoints
from hotseat.loop.state.remote_copies import RemoteCopies
from hotseat.loop.state.run_dir import sole_owner, write_config
from hotseat.loop.state.save_schedule import SaveSchedule
from hotseat.loop.state.uploads import Say
from hotseat.machine import available_bytes
from hotseat.observe import Journal
from hotseat.processes import kept_driver
from hotseat.processes.kept_driver import tell

# Free host memory that a copy of the state requires, in multiples of its size: the rest of the run needs some too.
_ROOM_FOR_A_COPY = 2
# Wait for a background save when a run fails: long enough to be worthwhile, short enough not to delay the error much.
_LAST_WAIT_S = 30.0

# training: the first signal lets the current step finish. stopped: that step was finished and saved, and the run ends.
# exporting: all steps are made, and the first signal lets the export finish. exported: the run is complete.
Phase = Literal["idle", "training", "stopped", "exporting", "exported"]


@dataclass(frozen=True)
class CheckpointSource:
    """Calls to the groups of a task that write its checkpoint."""

    num_bytes: Callable[[], int]  # size of what `write` will write
    write: Callable[[Path], object]  # into the checkpoint's folder; backend state into `BACKEND` there
    export: Callable[[Path], object]
    state: Callable[[], Mapping[str, Any]]  # facts of the loop, as JSON
    # As `write`, but returns once the state is copied, with a call that tells whether all is written, or raises.
    snapshot: Callable[[Path], Callable[[], bool]] | None = None
    # By folder of the checkpoint: how many ranks write into it; a checkpoint without the files of any is not committed.
    num_ranks: Mapping[str, int] = field(default_factory=dict)


def for_ranks(path: Path) -> str:
    """Return a path for ranks: absolute, because on an existing cluster they have another working directory."""
    return str(path.absolute())


class Saver:
    """Writes checkpoints as the config asks, and finds the one to resume from.

    At most one is being written: the next save, an export and the end of the run wait for it first.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        tokenizer: Any = None,
        *,
        num_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Make a saver for a run directory. `tokenizer` is exported beside each model. num_steps: those of the run."""
        section = config.checkpoint
        self._config = config
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._schedule = SaveSchedule(config, num_steps, clock)
        self._timeout_s = config.cluster.call_timeout_s
        self._background_save: BackgroundSave | None = None
        self._stood_still_s: float | None = None  # time that saves held up the run since the last `metrics`
        self.changes: list[Change] = []  # since the checkpoint that `find` returned
        self._clock = clock
        self._last_made: int | None = None  # the last step that was finished
        self._has_told_standby = False
        self.phase: Phase = "idle"
        self.is_stopping = False  # the run ends after the current step; a signal sets it, at any moment
        self._stops_unsaved = False  # it does so even if it makes no checkpoints
        self.is_ending = False  # the current step is the last one, whatever the number of steps
        self._store = CheckpointStore(
            Path(section.folder) if section.folder else run_dir / "checkpoints",
            keep_last=section.keep_last,
            max_bytes=None if section.max_gib is None else int(section.max_gib * 2**30),
            is_private=has_secrets(config),
        )
        self._memory = MemorySnapshots(run_dir)
        self._copies: RemoteCopies | None = None
        if section.url is not None:
            remote = RemoteCheckpoints(
                section.url, run=run_dir.name, keep_last=self._store.keep_last, max_bytes=self._store.max_bytes
            )
            self._copies = RemoteCopies(remote, self._store, clock)

    def find(
        self, stack: ExitStack, say: Callable[[str], object], show: Callable[[str], object] = str
    ) -> Checkpoint | None:
        """Return the checkpoint to resume from, if any, and hold the folder of checkpoints for this process.

        show: called with how far a download is.
        """
        section = self._config.checkpoint
        self._memory.open(section, stack)
        is_named = section.is_asked_for or section.resume or section.path is not None
        if not is_named and not self._store.directory.exists():
            return None  # by default the folder is made with the first checkpoint
        self._store.prepare()
        if section.folder is not None:
            stack.enter_context(sole_owner(self._store.directory))
        for name in self._store.clean():
            say(f"{name} was not finished, and is removed")
        if self._copies is not None:
            try:
                self._copies.begin(section.resume, say, show)
            except StoreError as error:
                if not (kept_driver.restarts and self._store.steps()):
                    raise
                say(f"warning: the newest checkpoint on disk counts, since there is no other to be had: {error}")
        if not self._config.checkpoint.resume:
            if self._store.steps():
                raise UserError(
                    f"{self._store.directory} holds checkpoints of another run: set checkpoint.resume=true to resume"
                    " from them, or checkpoint.path to another place"
                )
            return None
        checkpoint = self._newest(say)
        if checkpoint is None:
            where = "" if self._copies is None else f"{self._copies.url}, as "
            say(f"{where}{self._store.directory} has no checkpoint to resume from: this run starts from its first step")
            return None
        if not (checkpoint.path / BACKEND).is_dir():
            raise CheckpointError(
                f"{checkpoint.path} holds a model but not what resuming needs (it was written with"
                " checkpoint.save_state=false): start anew with that model"
            )
        self.changes = changes_between(str(checkpoint.state["config"]), self._config)
        for change in self.changes:
            say(f"{change}{' (allowed)' * change.is_allowed}")
        schedule = self._config.actor.optimizer.schedule
        if any(change.key in NUM_STEPS for change in self.changes) and schedule != "constant":
            say(f"learning rate: from the next step on that of the {schedule} schedule over the new number of steps")
        say(f"resuming from {checkpoint.path}, after step {checkpoint.step}")
        tell(saved=checkpoint.step)
        return checkpoint

    def _newest(self, say: Callable[[str], object]) -> Checkpoint | None:
        """Return the memory snapshot if it is newer than the newest checkpoint on disk, else that, if there is one."""
        return self._memory.newer_than(max(self._store.steps(), default=0), say) or self._store.newest()

    def uploading(self, say: Say, show: Callable[[str], object]) -> AbstractContextManager[None]:
        """Upload checkpoints to their URL, if they have one, inside the context; see `RemoteCopies.uploading`."""
        if self._copies is None:
            return nullcontext()
        return self._copies.uploading(say, show, self.last_step, lambda: self.phase == "stopped")

    def upload_facts(self) -> Mapping[str, Any] | None:
        """Return facts about uploads; None if checkpoints have no URL."""
        return None if self._copies is None else self._copies.facts()

    def keep(self, config: Config) -> None:
        """Use from now on a config that the run has changed: in the run directory and in later checkpoints."""
        self._config = config
        self._schedule.change(config)
        write_config(self._run_dir, config)

    def last_step(self) -> int | None:
        """Return the step of the newest checkpoint that can be resumed; None if there is none."""
        steps = self._store.steps() if self._config.checkpoint.save_state else []
        return steps[-1] if steps else None

    def resumable_step(self) -> int | None:
        """Return the step after which a resumed run would continue, by a memory snapshot, too; None: at the first."""
        return max([*self._memory.steps(), *filter(None, [self.last_step()])], default=None)

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step."""
        return self._store.path(step)

    @property
    def folder(self) -> Path:
        """Return the folder of checkpoints, which may not be there yet."""
        return self._store.directory

    @property
    def can_save(self) -> bool:
        return self._schedule.can_save

    def is_due(self, step: int, is_stopping: bool) -> bool:
        """Tell whether a checkpoint is to be made after a step."""
        is_made_at_stop = is_stopping and self.can_save
        return self._schedule.is_due(step) or is_made_at_stop or self._schedule.is_last(step, self.is_ending)

    def stop_when_finished(self) -> str | None:
        """Have the run end once its current work is saved, and return what that is, for the user.

        None: there is nothing to save, or the run was asked before. A signal calls this at any moment.
        """
        if self.is_stopping or not (self.phase == "exporting" or (self.phase == "training" and self.can_save)):
            return None
        self.is_stopping = True
        return "the model is exported" if self.phase == "exporting" else "this step is finished and saved"

    def stop_after_step(self) -> None:
        """Have the run end once the current step is finished, and saved if the run makes checkpoints."""
        self._stops_unsaved = self.is_stopping = True

    def end_after_step(self) -> None:
        """Have the run end after the current step as after its last one: it is saved, and the model exported."""
        self.is_ending = True

    @property
    def last_made(self) -> int:
        """Return the last step that was finished; 0 if there is none."""
        return self._last_made or 0

    def made(self, step: int) -> None:
        """Take note that a step was finished. After the first one, a standby no longer takes time from the start."""
        if not self._has_told_standby:
            self._has_told_standby = True
            tell(standby=self._config.run.standby)
        self._last_made = step

    def ending(self, command: str) -> str:
        """Describe which steps are lost if the run is interrupted now, and how to resume it."""
        if self.phase == "exported":
            return "nothing is lost: the run is finished, and its model is exported"
        saved = self.resumable_step()
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
        lost = "nothing is lost" if self.phase == "stopped" else "nothing is lost but the step under way"
        if made > saved:
            lost = f"step {made} is lost" if made == saved + 1 else f"steps {saved + 1} to {made} are lost"
        return f"{lost}: the last checkpoint is of step {saved}. Resume with: {command}"

    def after_step(
        self,
        step: int,
        source: CheckpointSource,
        evaluation: Mapping[str, float],
        journal: Journal,
        must_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Save if a checkpoint is due or the run is to stop; then stop. Raises if the previous save failed.

        must_stop: whether another process that trains got a signal to stop.
        """
        self.made(step)
        interrupts.current().check()
        # Read once: a signal that comes later must not end the run without a save.
        is_stopping = self.is_stopping or must_stop()
        path = self.save_if_due(step, source, evaluation, journal, is_stopping)
        if path is not None and (is_stopping or self.is_stopping or must_stop()):
            self.stop(path, journal)
        if self._stops_unsaved:
            raise KeyboardInterrupt

    def save_if_due(
        self, step: int, source: CheckpointSource, evaluation: Mapping[str, float], journal: Journal, is_stopping: bool
    ) -> Path | None:
        """Save if due; return the path of the checkpoint, which a thread may still be writing, or None."""
        if self._background_save is not None and self._background_save.done.done():
            self.wait()
        if not self.is_due(step, is_stopping):
            self._save_in_memory(step, source, journal)
            return None
        self._store.warn = lambda text: journal.say(text, kind="warning")
        # The last step's, if nobody asked for it, must not cost the model that is exported next.
        is_asked_for = self._config.checkpoint.is_asked_for and self._schedule.is_due(step)
        if not (is_asked_for or is_stopping or self._schedule.has_room(source.num_bytes(), self.folder, journal)):
            return None
        journal.phase("save")
        started_s = self._clock()
        try:
            path = self.save(step, source, evaluation)
        except HotseatError as error:
            if is_asked_for or is_stopping or not self._schedule.is_last(step, self.is_ending):
                raise
            journal.say(f"no checkpoint of the last step is made, and the model is exported: {error}", kind="warning")
            return None
        self._stood_still_s = (self._stood_still_s or 0.0) + self._schedule.saved(started_s)
        return path

    def _save_in_memory(self, step: int, source: CheckpointSource, journal: Journal) -> None:
        """Make a memory snapshot if one is due. A failure does not end the run: the disk is complete."""
        store = self._memory.store_if_due(step, self._config.checkpoint.memory_every)
        if store is None:
            return
        if self._background_save is not None and not self._memory.is_saving:
            return  # the run does not wait for the disk, whose error is not one of the snapshot
        store.warn = lambda text: journal.say(text, kind="warning")
        journal.phase("save")
        started_s = self._clock()
        try:
            self.save(step, source, {}, store)
        except CheckpointError as error:
            self._memory.warn_once(error)
        self._stood_still_s = (self._stood_still_s or 0.0) + self._clock() - started_s

    def digest(self, step: int) -> str | None:
        """Return the digest of the checkpoint of a step; None if there is none."""
        return digest_of_checkpoint(self._store.path(step)) if step in self._store.steps() else None

    def finish(self, say: Callable[[str], object]) -> None:
        """Name the last checkpoint and its size at the end of a run, or delete what `keep_final` does not keep."""
        self._memory.is_needed = False
        if not self._config.checkpoint.keep_final:
            if self._copies is not None:
                self._copies.delete_all(MODEL, say)
            deleted = self._store.delete_all(but_with=MODEL)
            if deleted:
                say(f"checkpoints deleted (checkpoint.keep_final is false): {', '.join(map(str, deleted))}")
            return
        step = self.last_step()
        if step is not None:
            size = shown_bytes(self._store.size(step))
            say(
                f"checkpoint: {self._store.path(step)}, {size}; the run can be extended from it"
                " (checkpoint.keep_final=false deletes it)"
            )

    def stop(self, path: Path, journal: Journal) -> NoReturn:
        """End the run once that checkpoint is complete. Raises `KeyboardInterrupt`."""
        self.wait()
        self.phase, self._memory.is_needed = "stopped", False
        journal.say(f"saved {path}")
        raise KeyboardInterrupt

    def metrics(self) -> dict[str, float]:
        """Return the seconds that saves held up the run since the last call, if there was a save, and uploads."""
        seconds, self._stood_still_s = self._stood_still_s, None
        figures = {} if self._copies is None else dict(self._copies.metrics())
        return figures if seconds is None else {"time/save": seconds, **figures}

    def save(
        self,
        step: int,
        source: CheckpointSource,
        evaluation: Mapping[str, float],
        store: CheckpointStore | None = None,
    ) -> Path:
        """Save everything that resuming after `step` needs; return the path at which the checkpoint will be.

        store: the memory snapshots; None: the checkpoints on disk.
        """
        self.wait()
        section, is_on_disk, store = self._config.checkpoint, store is None, store or self._store
        faults.reach("save.before")
        saves_state = section.save_state or not is_on_disk
        num_bytes = source.num_bytes() if saves_state else 0
        is_alone = self.is_ending or self._schedule.is_end(step)  # nothing runs beside it
        snapshot = source.snapshot if self._saves_in_background(num_bytes) and not is_alone else None
        state = {
            "step": step,
            "task": self._config.task,
            "config": to_saved(self._config),
            "run": str(self._run_dir.absolute()),
            "best_metric": chosen_metric(section.best_metric, evaluation) if is_on_disk else None,
            **copy.deepcopy(dict(source.state())),  # a copy: the run may change it before it is written
        }
        is_written: Callable[[], bool] | None = None
        with store.writing(step, num_bytes) as path:
            if is_on_disk and (section.export_each or not section.save_state):
                source.export(path / MODEL)
                folders = [path / MODEL, *([critic_folder(path / MODEL)] if section.export_critic else [])]
                for folder in folders if self._tokenizer is not None else ():
                    self._tokenizer.save_pretrained(folder)
            if saves_state and snapshot is not None:
                is_written = snapshot(path)
            elif saves_state:
                source.write(path)
        num_ranks = source.num_ranks if saves_state else {}
        if is_written is None:
            return self._commit(store, step, state, num_ranks)

        def ask() -> bool:
            with store.explained(step):
                return is_written()

        def commit(when_current: AbstractContextManager[None]) -> None:
            self._commit(store, step, state, num_ranks, when_current)

        self._background_save = BackgroundSave(step, ask, commit, self._timeout_s)
        self._memory.is_saving = not is_on_disk
        return store.path(step)

    def _commit(
        self,
        store: CheckpointStore,
        step: int,
        state: Mapping[str, Any],
        num_ranks: Mapping[str, int],
        when_current: AbstractContextManager[None] | None = None,
    ) -> Path:
        path = store.commit(step, state, num_ranks, when_current)
        tell(saved=step, in_vain=0)
        if self._copies is not None and store is self._store:
            self._copies.wake()
        return path

    def _saves_in_background(self, num_bytes: int) -> bool:
        if self.is_stopping:
            return False
        background = self._config.checkpoint.background
        return _ROOM_FOR_A_COPY * num_bytes <= available_bytes() if background is None else background

    def wait(self) -> None:
        """Wait until no checkpoint is being written. Raises if the save failed."""
        if self._background_save is None:
            return
        try:
            self._background_save.wait(self._timeout_s)
        except KeyboardInterrupt:
            raise  # `settled` gives it up
        except BaseException as error:
            self._background_save = None
            if not (self._memory.is_saving and isinstance(error, CheckpointError)):
                raise
            self._memory.warn_once(error)
        self._background_save = None

    def go_back(self) -> Checkpoint | None:
        """Return the newest checkpoint, from which the run continues in this process; None if it has none.

        One that is being written is completed if possible.
        """
        self._give_up_saving()
        self._store.clean()
        checkpoint = self._newest(self._memory.clean())
        if checkpoint is None or not (checkpoint.path / BACKEND).is_dir():
            return None
        self._last_made, self._stood_still_s = checkpoint.step, None
        return checkpoint

    def _give_up_saving(self) -> None:
        background_save, self._background_save = self._background_save, None
        if background_save is not None:
            with suppress(BaseException):  # the error of the run counts, not that of its last save
                background_save.wait(min(self._timeout_s, _LAST_WAIT_S))
            background_save.give_up()

    @contextmanager
    def exporting(self) -> Iterator[None]:
        """Enclose the export of the model, which completes the run. Then raises KeyboardInterrupt if a signal came."""
        self.phase = "exporting"
        try:
            yield
        except BaseException:
            self.phase = "idle"
            raise
        self.phase = "exported"
        if self.is_stopping:
            raise KeyboardInterrupt

    @contextmanager
    def settled(self, journal: Journal) -> Iterator[None]:
        """Enclose the steps of a run: however they end, a checkpoint that is being written is completed if possible."""
        self.phase = "training"
        try:
            yield
            self.phase = "exporting"  # nothing after the last step is saved
            if self._background_save is not None:
                journal.phase("save")
            self.wait()
        except KeyboardInterrupt:
            if self._background_save is not None:
                self._background_save.give_up()  # the next run removes its remains
            raise
        except BaseException:
            self._give_up_saving()
            raise
        finally:
            if self.phase == "training":
                self.phase = "idle"  # a step that failed is not finished
