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
from contextlib import contextmanager, suppress
from pathlib import Path

from hotseat.checks.run_directory import LOCK, owner_of
from hotseat.errors import UserError
from hotseat.files import opened, write_whole
from hotseat.loop.state.checkpoints import CheckpointStore
from hotseat.loop.state.run_dir import sole_owner
from hotseat.processes import supervisor

POINTER = ".memory"  # in a run's directory: the path of its snapshots
KEPT_S = 3600.0  # after the death of a driver
_RUN = ".run"
_PREFIX = "hotseat-memory-"
_VARIABLE = "HOTSEAT_MEMORY"  # which no process has: their supervisor ends none


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
