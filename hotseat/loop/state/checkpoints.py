"""Checkpoints on disk: one exists or it does not.

    checkpoints/
      .writing-step-000020/   being written; of no value, and removed by the next run
      step-000010/            complete: made by one rename after every byte was written and hashed
        manifest.json         size and hash of every file; checked before any of them is opened
        state.json            facts of the loop: step, order of prompts, KL coefficient, config
        actor/                what the backend saved; that of a critic in critic_state/

The newest complete one is current. Older ones go after a newer one is there, never before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat import faults
from hotseat.errors import CheckpointError, HotseatError, UserError

MANIFEST = "manifest.json"
STATE = "state.json"
FORMAT = 1
_COMPLETE = re.compile(r"step-(\d{6,})")
_WRITING, _DELETING = ".writing-", ".deleting-"
_CHUNK = 1 << 20
# Beside the tensors a checkpoint holds small files, and a file system wants room for itself.
_SPARE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_INTACT = "earlier checkpoints are intact"
_MAKE_ROOM = "Make room, or set checkpoint.path to another disk"


@dataclass(frozen=True)
class Checkpoint:
    """A complete one whose manifest was checked."""

    path: Path
    step: int
    state: Mapping[str, Any]


class CheckpointStore:
    """The checkpoints of one run.

    keep_last: how many stay; the best by `metric` stays beside them. max_bytes: of all of them together, the newest
    excepted.
    """

    def __init__(self, directory: Path, *, keep_last: int = 3, max_bytes: int | None = None):
        self.directory = directory
        self._keep_last = keep_last
        self._max_bytes = max_bytes

    # --- writing --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory and see that it can be written, before there is anything to lose."""
        with self._writable(UserError):
            self.directory.mkdir(parents=True, exist_ok=True)
            trial = self.directory / f"{_WRITING}nothing"
            trial.mkdir(exist_ok=True)
            trial.rmdir()

    def begin(self, step: int, num_bytes: int) -> Path:
        """An empty directory to write step `step` into. Raises if `num_bytes` more would not fit on the disk."""
        path = self._writing(step)
        with self._writable(CheckpointError):
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free
            if num_bytes + _SPARE_BYTES > free:
                raise CheckpointError(
                    f"no room for the checkpoint of step {step} in {self.directory}: it needs"
                    f" {num_bytes + _SPARE_BYTES:,} bytes, {free:,} are free; {_INTACT}. {_MAKE_ROOM}"
                )
            path.mkdir()
        return path

    @contextmanager
    def writing(self, step: int, num_bytes: int) -> Iterator[Path]:
        """`begin`, and what fails until the end of the block explained: others may fill the disk meanwhile."""
        path = self.begin(step, num_bytes)
        with self.explained(step):
            yield path

    def path(self, step: int) -> Path:
        """Where the checkpoint of a step is once it is complete."""
        return self.directory / _name(step)

    def commit(self, step: int, state: Mapping[str, Any]) -> Path:
        """Make what was written since `begin` the current checkpoint, then let go of old ones."""
        writing = self._writing(step)
        target = self.path(step)
        if target.exists():
            raise CheckpointError(f"{target} is there already: a checkpoint is never overwritten")
        with self.explained(step):
            (writing / STATE).write_text(json.dumps(state, indent=1) + "\n")
            files = {str(path.relative_to(writing)): _facts(path) for path in _files(writing)}
            manifest = {"format": FORMAT, "step": step, "files": files}
            (writing / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            for path in [*_files(writing), *(path for path in writing.rglob("*") if path.is_dir()), writing]:
                _sync(path)
            faults.reach("save.commit")
            writing.rename(target)
            faults.reach("save.after")
            _sync(self.directory)
        self._let_go(target)
        return target

    def _writing(self, step: int) -> Path:
        return self.directory / f"{_WRITING}{_name(step)}"

    @contextmanager
    def _writable(self, kind: type[HotseatError]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise kind(
                f"{self.directory} cannot be written: {error.strerror}; set checkpoint.path to another place"
            ) from None

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """A write that failed for want of room says so, whoever it was that wrote; its remains make room again."""
        try:
            yield
        except BaseException as error:
            # A process of a group, or torch, whose own error is no `Exception`, tells of it in words only.
            is_full = any(os.strerror(number) in str(error) for number in _FULL)
            if not (is_full or isinstance(error, OSError)):
                raise
            writing = self._writing(step)
            if isinstance(error, OSError) and not is_full:
                raise CheckpointError(
                    f"the checkpoint of step {step} could not be written to {writing}: {error.strerror or error};"
                    f" {_INTACT}"
                ) from error
            free = shutil.disk_usage(self.directory).free
            written = sum(path.stat().st_size for path in _files(writing))
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"no room for the checkpoint of step {step} in {self.directory}: the disk was full after"
                f" {written:,} bytes, {free:,} are free; {_INTACT}. {_MAKE_ROOM}"
            ) from error

    def clean(self) -> list[str]:
        """Remove what earlier runs left unfinished; their names."""
        if not self.directory.is_dir():
            return []
        unfinished = [path for path in self.directory.iterdir() if path.name.startswith((_WRITING, _DELETING))]
        for path in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(path.name.removeprefix(_WRITING) for path in unfinished if path.name.startswith(_WRITING))

    # --- reading --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Of the complete ones, oldest first."""
        if not self.directory.is_dir():
            return []
        found = (_COMPLETE.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in found if match)

    def newest(self) -> Checkpoint | None:
        """The current one, every byte of it checked; None if there is none. A damaged one is an error."""
        steps = self.steps()
        if not steps:
            return None
        earlier = f"; remove it to resume from {_name(steps[-2])}" if len(steps) > 1 else ""
        return self._checked(steps[-1], earlier)

    def _checked(self, step: int, advice: str) -> Checkpoint:
        path = self.directory / _name(step)

        def broken(file: str, why: str) -> CheckpointError:
            return CheckpointError(f"{path} is damaged: {file} {why}{advice}")

        try:
            manifest = json.loads((path / MANIFEST).read_text())
            files = manifest["files"]
            if not isinstance(files, dict):
                raise TypeError("no table of files")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise broken(MANIFEST, f"cannot be read ({error})") from None
        if manifest.get("format") != FORMAT:
            raise broken(MANIFEST, f"has format {manifest.get('format')}, this version reads {FORMAT}")
        if manifest.get("step") != step:
            raise broken(MANIFEST, f"is of step {manifest.get('step')}")
        present = {str(found.relative_to(path)) for found in _files(path)} - {MANIFEST}
        for name in sorted(present - set(files)):
            raise broken(name, "is not in the manifest")
        for name, expected in files.items():
            file = path / name
            if name not in present or file.is_symlink() or not file.resolve().is_relative_to(path.resolve()):
                raise broken(name, "is missing")
            if not isinstance(expected, dict) or not {"bytes", "hash"} <= expected.keys():
                raise broken(MANIFEST, f"does not say what {name} holds")
            found = _facts(file)
            if found["bytes"] != expected["bytes"]:
                raise broken(name, f"has {found['bytes']} bytes, {expected['bytes']} were written")
            if found["hash"] != expected["hash"]:
                raise broken(name, "has other contents than were written")
        if STATE not in files:
            raise broken(STATE, "is missing")
        return Checkpoint(path, step, json.loads((path / STATE).read_text()))

    # --- what stays -----------------------------------------------------------------------------------------------

    def _let_go(self, newest: Path) -> None:
        paths = [self.directory / _name(step) for step in self.steps()]
        best = max((path for path in paths if _metric(path) is not None), key=_metric, default=None)
        keep = {*paths[-self._keep_last :], newest} | ({best} if best is not None else set())
        if self._max_bytes is not None:
            sizes = {path: sum(file.stat().st_size for file in _files(path)) for path in keep}
            for path in sorted(keep - {newest, best}):
                if sum(sizes[kept] for kept in keep) > self._max_bytes:
                    keep.discard(path)
        for path in paths:
            if path not in keep:
                # Renamed first: a checkpoint that is half deleted must not look like one.
                doomed = path.with_name(f"{_DELETING}{path.name}")
                path.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _metric(path: Path) -> Any:
    """The value of the metric that says which is best; None if it was not measured, or is no number to compare."""
    value = json.loads((path / STATE).read_text()).get("best_metric")
    return value if value is not None and math.isfinite(value) else None


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def _facts(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return {"bytes": file.tell(), "hash": digest.hexdigest()}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
