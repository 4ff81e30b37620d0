"""Checkpoints on disk: each is complete or does not exist.

    checkpoints/
      .writing-step-000020/   being written; unusable, and removed by the next run
      step-000010/            complete: made by one rename after every byte was written and hashed
        manifest.json         size and hash of every file; checked before any of them is opened
        state.json            facts of the loop: step, order of prompts, KL coefficient, config
        actor/                state of the actor's backend; a critic's is in critic_state/
          rank-0.json         files that this rank wrote, and their sizes; a commit needs those of every rank

The newest complete one is current. Older ones are deleted only when a newer one is complete.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hotseat import faults
from hotseat.errors import CheckpointError, HotseatError, UserError
from hotseat.files import sync, sync_tree, write_whole

MANIFEST = "manifest.json"
STATE = "state.json"
BACKENDS = {"actor": "actor", "critic": "critic_state"}  # folders of a checkpoint with the state of each role's backend
BACKEND = BACKENDS["actor"]
MODEL, CRITIC = "model", "critic"  # folders of a run or a checkpoint that hold Hugging Face models
FORMAT = 2
_COMPLETE = re.compile(r"step-(\d{6,})")
_WRITING, _DELETING = ".writing-", ".deleting-"
_CHUNK = 1 << 20
_PATIENCE_S, _LOOK_EVERY_S = 60.0, 0.1  # for files of other nodes to appear: network disks keep listings for a while
# For the small files beside the tensors, and for the file system itself.
_SPARE_BYTES = 16 << 20
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """Complete checkpoint whose manifest was checked."""

    path: Path
    step: int
    state: Mapping[str, Any]


@dataclass(eq=False)
class CheckpointStore:
    """Checkpoints of one run, in a directory that need not exist yet.

    keep_last: how many are kept, besides the best by `best_metric`. max_bytes: size of all of them, above which older
    ones are deleted; the newest and the best stay. is_private: the states of checkpoints hold secrets, and only this
    user may read them. option: that names the directory. patience_s: how long `commit` waits for the files of other
    nodes to appear.
    """

    directory: Path
    keep_last: int = 3
    max_bytes: int | None = None
    is_private: bool = False
    option: str = "checkpoint.path"
    patience_s: float = _PATIENCE_S
    warn: Callable[[str], object] = field(default=lambda text: print(text, file=sys.stderr), init=False)
    # Steps that are being uploaded, and the lock under which steps are added to them or deleted.
    held: set[int] = field(default_factory=set, init=False)
    lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _warned_of: set[Path] = field(default_factory=set, init=False)

    # --- writing --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the directory and check that it can be written, before there is anything to lose."""
        with self._writable(UserError):
            self.directory.mkdir(parents=True, exist_ok=True)
            trial = self.directory / f"{_WRITING}nothing"
            trial.mkdir(exist_ok=True)
            trial.rmdir()

    def begin(self, step: int, num_bytes: int) -> Path:
        """Make an empty directory to write step `step` into. Raises if the disk has no room for `num_bytes`."""
        path = self._writing(step)
        with self._writable(CheckpointError):
            self.directory.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            free = shutil.disk_usage(self.directory).free
            if num_bytes + _SPARE_BYTES > free:
                raise CheckpointError(
                    f"no room for the checkpoint of step {step} in {self.directory}: it needs"
                    f" {num_bytes + _SPARE_BYTES:,} bytes, {free:,} are free; {self._earlier()}. {self._make_room}"
                )
            path.mkdir()
        return path

    @contextmanager
    def writing(self, step: int, num_bytes: int) -> Iterator[Path]:
        """Call `begin`, and explain write errors until the end of the block: others may fill the disk meanwhile."""
        path = self.begin(step, num_bytes)
        with self.explained(step):
            yield path

    def path(self, step: int) -> Path:
        """Return the path of the checkpoint of a step once it is complete."""
        return self.directory / name_of(step)

    def commit(
        self,
        step: int,
        state: Mapping[str, Any],
        num_ranks: Mapping[str, int] = MappingProxyType({}),
        when_current: AbstractContextManager[None] | None = None,
    ) -> Path:
        """Make the checkpoint written since `begin` the current one, then delete old ones.

        num_ranks: the number of ranks that wrote into each folder of the checkpoint. Raises if a file of any is not
        there. when_current: context in which it becomes current; if it raises, there is no checkpoint.
        """
        writing = self._writing(step)
        target = self.path(step)
        if target.exists():
            raise CheckpointError(f"{target} is there already: a checkpoint is never overwritten")
        with self.explained(step):
            self._wait_for_ranks(step, writing, num_ranks)
            write_whole(writing / STATE, json.dumps(state, indent=1) + "\n", is_private=self.is_private)
            files = {str(path.relative_to(writing)): file_facts(path) for path in _files(writing)}
            manifest = {"format": FORMAT, "step": step, "files": files}
            (writing / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
            sync_tree(writing)
            faults.reach("save.commit")
            with when_current or nullcontext():
                writing.rename(target)
            faults.reach("save.after")
            sync(self.directory)
        self._delete_old(step)
        return target

    @property
    def _make_room(self) -> str:
        return f"Make room, or set {self.option} to another disk"

    def _earlier(self) -> str:
        return "earlier checkpoints are intact" if self.steps() else "there is no earlier checkpoint"

    def _wait_for_ranks(self, step: int, writing: Path, num_ranks: Mapping[str, int]) -> None:
        """Wait for the files of all ranks, which may appear late on a network disk. Raises if they do not."""
        until_s = time.monotonic() + self.patience_s
        while missing := [each for folder, number in num_ranks.items() for each in _missing(writing, folder, number)]:
            if time.monotonic() > until_s:
                raise CheckpointError(
                    f"the checkpoint of step {step} is not complete in {writing}: {'; '.join(missing)}. Every rank has"
                    " to write to this folder: put run_dir, or checkpoint.path, on a disk that all nodes share;"
                    f" {self._earlier()}"
                )
            time.sleep(_LOOK_EVERY_S)

    def _writing(self, step: int) -> Path:
        return self.directory / f"{_WRITING}{name_of(step)}"

    @contextmanager
    def _writable(self, kind: type[HotseatError]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise kind(
                f"{self.directory} cannot be written: {error.strerror}; set {self.option} to another place"
            ) from None

    @contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Raise `CheckpointError` for a failed write in any process; if the disk was full, remove what was written."""
        try:
            yield
        except BaseException as error:
            # Errors of other processes, and torch's, which are no `Exception`, have the cause only in their text.
            is_full = any(os.strerror(number) in str(error) for number in _FULL)
            if not (is_full or isinstance(error, OSError)):
                raise
            writing = self._writing(step)
            if isinstance(error, OSError) and not is_full:
                raise CheckpointError(
                    f"the checkpoint of step {step} could not be written to {writing}: {error.strerror or error};"
                    f" {self._earlier()}"
                ) from error
            free = shutil.disk_usage(self.directory).free
            written = sum(path.stat().st_size for path in _files(writing))
            shutil.rmtree(writing, ignore_errors=True)
            raise CheckpointError(
                f"no room for the checkpoint of step {step} in {self.directory}: the disk was full after"
                f" {written:,} bytes, {free:,} are free; {self._earlier()}. {self._make_room}"
            ) from error

    def clean(self) -> list[str]:
        """Remove unfinished checkpoints of earlier runs; return their names."""
        if not self.directory.is_dir():
            return []
        unfinished = [path for path in self.directory.iterdir() if path.name.startswith((_WRITING, _DELETING))]
        for path in unfinished:
            shutil.rmtree(path, ignore_errors=True)
        return sorted(path.name.removeprefix(_WRITING) for path in unfinished if path.name.startswith(_WRITING))

    # --- reading --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        if not self.directory.is_dir():
            return []
        matches = (_COMPLETE.fullmatch(path.name) for path in self.directory.iterdir() if path.is_dir())
        return sorted(int(match[1]) for match in matches if match)

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint, every byte of it checked; None if there is none. Raises if it is damaged."""
        steps = self.steps()
        if not steps:
            return None
        earlier = f"; remove it to resume from {name_of(steps[-2])}" if len(steps) > 1 else ""
        return self._checked(steps[-1], earlier)

    def _checked(self, step: int, advice: str) -> Checkpoint:
        path = self.directory / name_of(step)

        def broken(file: str, why: str) -> CheckpointError:
            return CheckpointError(f"{path} is damaged: {file} {why}{advice}")

        if path.is_symlink():
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)}, which is not followed: put the folder itself there, or"
                " remove the link"
            )
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
        present = {str(file.relative_to(path)) for file in _files(path)} - {MANIFEST}
        for name in sorted(present - set(files)):
            raise broken(name, "is not in the manifest")
        for name, expected in files.items():
            file = path / name
            if name not in present or file.is_symlink() or not file.resolve().is_relative_to(path.resolve()):
                raise broken(name, "is missing")
            if not isinstance(expected, dict) or not {"bytes", "hash"} <= expected.keys():
                raise broken(MANIFEST, f"does not say what {name} holds")
            actual = file_facts(file)
            if actual["bytes"] != expected["bytes"]:
                raise broken(name, f"has {actual['bytes']} bytes, {expected['bytes']} were written")
            if actual["hash"] != expected["hash"]:
                raise broken(name, "has other contents than were written")
        if STATE not in files:
            raise broken(STATE, "is missing")
        return Checkpoint(path, step, json.loads((path / STATE).read_text()))

    # --- what stays -----------------------------------------------------------------------------------------------

    def _delete_old(self, newest: int) -> None:
        with self.lock:
            metrics = self._metrics()
            kept = kept_steps(metrics, self.size, self.keep_last, self.max_bytes) | {newest} | self.held
            for step in metrics:
                if step not in kept:
                    self._delete(self.path(step))

    def wanted(self) -> list[int]:
        """Return the newest step and the best one, which are worth more than the others."""
        metrics = self._metrics()
        return sorted(kept_steps(metrics, self.size, 1, None))

    def _metrics(self) -> dict[int, float | None]:
        """Return the steps, oldest first, with the metric that chooses the best; None: not measured, not finite.

        One that cannot be read is left out, so that nothing deletes it: somebody has to look at it.
        """
        metrics: dict[int, float | None] = {}
        for step in self.steps():
            path = self.directory / name_of(step)
            if path.is_symlink():
                self._warn_of(path, "is a link, and is left as it is")
                continue
            try:
                metrics[step] = best_metric((path / STATE).read_text())
            except (OSError, ValueError, TypeError, AttributeError) as error:
                self._warn_of(path, f"cannot be read ({_reason(error)}), and is left as it is")
        return metrics

    def _delete(self, path: Path) -> None:
        # Renamed first: a half-deleted checkpoint must not look complete.
        doomed = path.with_name(f"{_DELETING}{path.name}")
        try:
            path.rename(doomed)
        except OSError as error:
            self._warn_of(path, f"is not needed any more, but cannot be deleted ({_reason(error)})")
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def _warn_of(self, path: Path, what: str) -> None:
        if path not in self._warned_of:
            self._warned_of.add(path)
            self.warn(f"{path} {what}")

    def size(self, step: int) -> int:
        return sum(path.stat().st_size for path in _files(self.path(step)))

    def delete_all(self, but_with: str) -> list[int]:
        """Delete the complete checkpoints, except those with a folder of that name; return the steps of the deleted."""
        with self.lock:
            doomed = [step for step in self.steps() if not (self.path(step) / but_with).is_dir()]
            for step in doomed:
                self._delete(self.path(step))
        return doomed


def kept_steps(
    metrics: Mapping[int, float | None], size: Callable[[int], int], keep_last: int, max_bytes: int | None
) -> set[int]:
    """Return the steps of checkpoints that stay: the last ones and the best, as far as they fit into `max_bytes`.

    metrics: of every step, the metric that chooses the best. size: returns the bytes of a step. The newest and the best
    stay in any case.
    """
    steps = sorted(metrics)
    measured = {step: metric for step in steps if (metric := metrics[step]) is not None}
    best = max(measured, key=lambda step: measured[step], default=None)
    always = {*steps[-1:], *([] if best is None else [best])}
    kept = {*steps[-keep_last:]} | always
    if max_bytes is not None:
        sizes = {step: size(step) for step in kept}
        for step in sorted(kept - always):
            if sum(sizes[each] for each in kept) > max_bytes:
                kept.discard(step)
    return kept


def best_metric(state: str | bytes) -> float | None:
    """Return the metric in a checkpoint's state that chooses the best; None: not measured, or not finite."""
    value = json.loads(state).get("best_metric")
    return value if value is not None and math.isfinite(value) else None


def chosen_metric(name: str | None, evaluation: Mapping[str, float]) -> float | None:
    """Return the metric by which the best checkpoint is chosen, more being better; None: there is none."""
    if name == "none" or not evaluation:
        return None
    if name is None:
        name = "eval/accuracy" if "eval/accuracy" in evaluation else next(iter(evaluation))
    value = evaluation.get(name, evaluation.get(f"eval/{name}"))
    if value is None:
        raise UserError(f"checkpoint.best_metric {name!r} was not measured; there are {', '.join(evaluation)}")
    return -value if name.endswith("loss") else value


def critic_folder(model: Path) -> Path:
    """Return the folder to which the critic of a model is exported."""
    return model.with_name(CRITIC) if model.name == MODEL else model.with_name(f"{model.name}_{CRITIC}")


def digest_of_checkpoint(path: Path) -> str:
    """Return what tells a complete checkpoint from every other one."""
    return str(file_facts(path / MANIFEST)["hash"])


def _missing(writing: Path, folder: str, num_ranks: int) -> Iterator[str]:
    for rank in range(num_ranks):
        listing = writing / folder / f"rank-{rank}.json"
        try:
            files: dict[str, int] = json.loads(listing.read_text())
        except FileNotFoundError:
            yield f"{folder} has no file of rank {rank} of {num_ranks}"
            continue
        for name, num_bytes in files.items():
            file = listing.with_name(name)
            if not file.is_file() or file.stat().st_size != num_bytes:
                yield f"{folder}/{name} of rank {rank} is missing or not whole"


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def name_of(step: int) -> str:
    return f"step-{step:06d}"


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def file_facts(path: Path) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        return {"bytes": file.tell(), "hash": digest.hexdigest()}


def shown_bytes(number: int) -> str:
    """Return a size for people to read."""
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.1f} MiB"
