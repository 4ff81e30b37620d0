"""Memory snapshots: checkpoints of a run in a folder of a tmpfs, made between those on disk.

    MEMORY_PATH/hotseat-memory-XXXXXXXX/    for this user alone; the run's directory names it (`.memory`)
      .lock                                 held by the driver
      .run                                  the run's directory: those of a copied run are not the copy's
      step-000012/                          as on disk; one is kept

The folder outlives a driver that dies, for the one that is started again. It is removed when the run ends well or is
stopped; an hour after a driver that nobody started again, by that driver's supervisor; and by the next run with memory
snapshots, if that supervisor was killed as well. A run that is resumed on another machine names another folder, so an
older snapshot never counts there.
"""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from hotseat.checks.run_directory import LOCK, owner_of
from hotseat.config.schema.record_options import CheckpointConfig
from hotseat.errors import CheckpointError, UserError
from hotseat.files import opened, write_whole
from hotseat.loop.state.checkpoints import MODEL, Checkpoint, CheckpointStore
from hotseat.loop.state.run_dir import sole_owner
from hotseat.processes import supervisor

POINTER = ".memory"  # in a run's directory: the path of its snapshots
KEPT_S = 3600.0  # after the death of a driver
_RUN = ".run"
_PREFIX = "hotseat-memory-"
_VARIABLE = "HOTSEAT_MEMORY"  # which no process has: their supervisor ends none


class MemorySnapshots:
    """Memory snapshots that a run makes and resumes from; none without `checkpoint.memory_every`.

    A failure of one does not end the run: the checkpoint on disk is complete.
    """

    def __init__(self, run_dir: Path):
        self.is_needed = True  # should the run fail now, a resumed one would use its snapshot
        self.is_saving = False  # the save under way, or the last one, is of a snapshot
        self._run_dir = run_dir
        self._store: CheckpointStore | None = None
        self._has_warned = False

    def open(self, section: CheckpointConfig, stack: ExitStack) -> None:
        """Make the folder of snapshots, or take the one that a resumed run left, until the stack is closed."""
        if section.memory_every is None:
            forget_snapshots(self._run_dir)  # this run goes on without them, so that they are of a past that was left
        else:
            place = Path(section.memory_path)
            self._store = stack.enter_context(
                memory_snapshots(place, self._run_dir, is_resumed=section.resume, is_needed=lambda: self.is_needed)
            )

    def store_if_due(self, step: int, every: int | None) -> CheckpointStore | None:
        """Return where a snapshot after this step is saved; None: none is due."""
        return None if every is None or step % every != 0 else self._store

    def steps(self) -> list[int]:
        """Return the steps from whose snapshots a resumed run would continue, should this one fail now."""
        return self._store.steps() if self._store is not None and self.is_needed else []

    def newer_than(self, step: int, say: Callable[[str], object]) -> Checkpoint | None:
        """Return the snapshot, if it is of a later step. One that is damaged is deleted: the one on disk counts."""
        steps = [] if self._store is None else self._store.steps()
        if self._store is None or not steps or steps[-1] <= step:
            return None
        try:
            return self._store.newest()
        except CheckpointError as error:
            say(f"warning: {error}; it is deleted, and the newest checkpoint on disk counts")
            self._store.delete_all(but_with=MODEL)
            return None

    def clean(self) -> Callable[[str], object]:
        """Delete what was not finished; return what says warnings."""
        if self._store is None:
            return print
        self._store.clean()
        return self._store.warn

    def warn_once(self, error: CheckpointError) -> None:
        """Say the first time that a snapshot failed."""
        if self._store is not None and not self._has_warned:
            self._store.warn(f"no memory snapshot is made, but the run continues, and tries again: {error}")
        self._has_warned = True


@contextmanager
def memory_snapshots(
    place: Path, run_dir: Path, *, is_resumed: bool, is_needed: Callable[[], bool]
) -> Iterator[CheckpointStore]:
    """Yield the memory snapshots of a run; those of the driver before, if there are any and the run is resumed.

    is_needed: asked at the end of the block, tells whether they stay.
    """
    place = place.absolute()  # the supervisor has another working directory
    folder = folder_of(run_dir, place) if is_resumed else None
    _remove_abandoned(place, but=folder)
    if folder is None:
        try:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        except OSError as error:
            raise UserError(
                f"checkpoint.memory_path: {place} cannot be written: {error.strerror}; set it to a folder on a tmpfs"
            ) from None
    with sole_owner(folder):
        write_whole(folder / _RUN, f"{run_dir.resolve()}\n")
        write_whole(run_dir / POINTER, f"{folder}\n")
        taken = folder / LOCK
        guard = supervisor.start_supervisor(
            {
                "mark": (_VARIABLE, folder.name),
                "folders": [str(folder)],
                "kept": (str(taken), taken.read_text(), KEPT_S),
            },
            is_awaited=False,
        )
        store = CheckpointStore(folder, keep_last=1, option="checkpoint.memory_path")
        store.clean()
        try:
            yield store
        finally:
            if not (store.steps() and is_needed()):
                (run_dir / POINTER).unlink(missing_ok=True)
                supervisor.dismiss_supervisor(guard)
                supervisor.remove_folder(folder)


def folder_of(run_dir: Path, place: Path) -> Path | None:
    """Return the folder of a run's memory snapshots; None if there is none on this machine."""
    try:
        with opened(run_dir / POINTER) as file:
            folder = Path(file.read().strip())
        is_of_run = _is_ours(folder) and (folder / _RUN).read_text() == f"{run_dir.resolve()}\n"
    except (OSError, ValueError):
        return None
    return folder if is_of_run and folder.parent == place.absolute() else None


def forget_snapshots(run_dir: Path) -> None:
    """Have no later driver of a run use its memory snapshots. Their supervisor removes them."""
    (run_dir / POINTER).unlink(missing_ok=True)


def _is_ours(folder: Path) -> bool:
    """Tell whether it is a folder for memory snapshots that this user has made, and no link to one."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return folder.name.startswith(_PREFIX) and stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()


def _remove_abandoned(place: Path, but: Path | None) -> None:
    for folder in place.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another run removes it
            is_old = time.time() - folder.lstat().st_mtime > KEPT_S
            if is_old and folder != but and _is_ours(folder) and owner_of(folder) is None:
                supervisor.remove_folder(folder)
