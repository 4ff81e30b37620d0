"""Run directories: resolved config, plan, metrics, exported model."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotseat.checks.run_directory import CONFIG, LOCK, in_use, owner_of, run_directory
from hotseat.config import Config, loads_saved, to_saved
from hotseat.config.changes import Change
from hotseat.config.hiding import has_secrets, without_secrets
from hotseat.errors import CheckpointError, UserError
from hotseat.files import opened, write_whole
from hotseat.loop.state.checkpoints import STATE, CheckpointStore
from hotseat.loop.state.remote_checkpoints import newest_state
from hotseat.observe import RECORDS, SAMPLES, JsonLines

if TYPE_CHECKING:
    from hotseat.placement import Plan

LEDGER = "ledger.jsonl"
LOGS = "logs"  # of vLLM, a file per engine
CHANGES = "changes.jsonl"  # settings that were changed when the run was resumed
SPOOL = "spool"  # finished groups that wait for training, where rollout runs ahead; the same in checkpoints
ARRIVALS = "arrivals.jsonl"  # which groups were sampled when, and in which order they were trained
ROLLOUTS = "rollouts"  # groups that were trained or dropped, where they are kept
EPISODE_IMAGES = "episode_images"  # prepared images that environments and programs showed
NOTES = "notes.jsonl"  # notes of rollout hosts for the user
HANGS = "hangs.txt"  # what the doctor found, with stacks


def make_run_dir(config: Config) -> Path:
    """Make `run_dir/name`. Raises if it holds a run already, unless that is to be resumed or made no step."""
    config = named_run(config)
    path = run_directory(config)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; choose another run_dir") from None
    return path


@contextmanager
def without_empty_folders(*folders: Path) -> Iterator[None]:
    """Remove those of these folders that a refused run made in this block, and wrote nothing to but its lock."""
    new = [folder for folder in folders if not folder.exists()]
    try:
        yield
    except (UserError, CheckpointError):
        for folder in new:
            # Not that of a run which began at the same time, and has nothing in it but its lock yet.
            if folder.is_dir() and {path.name for path in folder.iterdir()} <= {LOCK} and owner_of(folder) is None:
                (folder / LOCK).unlink(missing_ok=True)
                folder.rmdir()
        raise


@contextmanager
def sole_owner(run_dir: Path, lock: Callable[[Any, int], object] = fcntl.flock) -> Iterator[None]:
    """Hold the lock of a directory for this process; it is free again however the process ends."""
    with opened(run_dir / LOCK, "a+") as file:
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise in_use(run_dir, owner_of(run_dir) or "another run") from None
        except OSError as error:
            raise UserError(
                f"{run_dir} is on a disk without locks (flock: {error.strerror}), so that two runs could write there at"
                " once: set run_dir, or checkpoint.path, to a disk that has them, or mount this one with them (Lustre:"
                " -o flock; NFS: without nolock)"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()}")
        file.flush()
        yield


def named_run(config: Config) -> Config:
    """Return the config with the name that its run will have, so that the directory is known beforehand."""
    if config.name is not None:
        return config
    numbered = (Path(config.run_dir) / f"{config.task}-{number}" for number in itertools.count(1))
    path = _run_of_checkpoints(config) or next(path for path in numbered if not path.exists())
    return config.model_copy(update={"run_dir": str(path.parent), "name": path.name})


def _run_of_checkpoints(config: Config) -> Path | None:
    """Return the folder of the run whose checkpoints are resumed from `checkpoint.path`; None if there is none.

    Run and checkpoints have to name each other: checkpoints that were copied elsewhere begin another run.
    """
    if not config.checkpoint.resume or config.checkpoint.path is None:
        return None
    if config.checkpoint.url is not None:
        state = newest_state(config.checkpoint.url)
        return None if state is None else folder_of_remote(config, state)
    folder = Path(config.checkpoint.path)
    try:
        steps = CheckpointStore(folder).steps()
        run = Path(json.loads((CheckpointStore(folder).path(steps[-1]) / STATE).read_text())["run"])
        kept = kept_config(run)
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return None  # a damaged checkpoint is named when it is opened
    if kept is None or kept.checkpoint.folder is None:
        return None
    return run if Path(kept.checkpoint.folder).resolve() == folder.resolve() else None


def folder_of_remote(config: Config, state: Mapping[str, Any]) -> Path:
    """Return the folder, below `run_dir`, of a run with the state of a checkpoint at the URL of a config.

    It is named as the run, unless the config has a name, and need not be there. Raises if another run is there.
    """
    path = Path(config.run_dir) / (config.name or Path(str(state["run"])).name)
    kept = kept_config(path)
    if kept is not None and (kept.checkpoint.url or "").rstrip("/") != (config.checkpoint.url or "").rstrip("/"):
        raise UserError(
            f"{path} holds another run than the one at {config.checkpoint.url}: choose another name (name=...), or"
            " another run_dir"
        )
    return path


def write_config(path: Path, config: Config) -> None:
    """Write the config as it was checked, without the options that resume a run."""
    how = {"resume": False, "allow_changes": []}
    kept = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=how)})
    write_whole(path / CONFIG, to_saved(kept), is_private=has_secrets(kept))


def forget_records(path: Path) -> None:
    """Remove the records of an earlier run that ended before its first checkpoint, and the groups that it sampled."""
    for name in (*RECORDS, LEDGER, HANGS, NOTES, CHANGES, ARRIVALS):
        (path / name).unlink(missing_ok=True)
    for name in (SPOOL, ROLLOUTS):
        if (path / name).exists():
            shutil.rmtree(path / name)


def record_changes(path: Path, last_step: int, changes: Sequence[Change]) -> None:
    """Record settings that change after `last_step`, and remove changes recorded of later steps."""
    file = path / CHANGES
    if not changes and not file.exists():
        return
    with JsonLines(file, last_step) as lines:
        for change in changes:
            lines.write(
                {
                    "step": last_step + 1,
                    "time": time.time(),
                    "key": change.key,
                    "from": without_secrets(change.before, change.key.rpartition(".")[2]),
                    "to": without_secrets(change.after, change.key.rpartition(".")[2]),
                    "is_allowed": change.is_allowed,
                }
            )


def kept_config(path: Path) -> Config | None:
    """Return the config in a run directory, with the changes that the run made itself; None if there is none."""
    file = path / CONFIG
    return loads_saved(file.read_text()) if file.is_file() else None


def save_plan(path: Path, plan: Plan) -> None:
    """Write the plan, for this user alone if it holds environment variables of nodes."""
    write_whole(path / "plan.json", plan.to_json(), is_private=any(node.env for node in plan.inventory.nodes))


# --- images of episodes -----------------------------------------------------------------------------------------------

_PREPARED = ".safetensors"
_THUMBNAIL = ".png"
_NAME = re.compile(rb"([0-9a-f]{40})\.safetensors")  # a path, wherever it stands in JSON
_DIGEST = re.compile(r"[0-9a-f]{40}")
_TENSORS = (_PREPARED, ".pt", ".distcp", ".bin")  # files that name no images, and are large


def remove_unneeded_images(run_dir: Path, checkpoints: Path) -> int:
    """Delete images that episodes showed, once a run has ended well and nothing refers to them; return how many.

    Those of the data lie beside the runs, and are left alone. What may refer to an image: groups in checkpoints and
    rollouts that are kept, whose pixels a later run reads, and samples in the report, which shows the thumbnail.
    checkpoints: the folder of the run's checkpoints.
    """
    folder = run_dir / EPISODE_IMAGES
    if not folder.is_dir():
        return 0
    needed = set(_names(_files(checkpoints, run_dir / SPOOL, run_dir / ROLLOUTS)))
    shown = set(_names([run_dir / SAMPLES]))
    num_deleted = 0
    for file in sorted(folder.iterdir()):
        if not _DIGEST.match(file.name):
            continue  # not ours
        is_shown = file.suffix == _THUMBNAIL and file.stem in shown
        if file.stem not in needed and not is_shown:
            file.unlink(missing_ok=True)
            num_deleted += 1
    if not any(folder.iterdir()):
        folder.rmdir()
    return num_deleted


def _files(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in folder.rglob("*") if path.is_file() and path.suffix not in _TENSORS)


def _names(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        if not file.is_file():
            continue
        with file.open("rb") as lines:
            for line in lines:
                yield from (name.decode() for name in _NAME.findall(line))
