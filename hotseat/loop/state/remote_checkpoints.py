"""Checkpoints in a storage such as S3: each is complete or does not exist, as on disk.

    URL/
      owner.json              the process that writes here; one that finds another's name in it writes no more
      step-000010/            the files of a checkpoint as they are on disk, and after all of them:
        manifest.json         size and hash of every file; a folder without one is no checkpoint, and is removed

A manifest is uploaded last and deleted first. So a death at any moment leaves the checkpoints as they were, and at most
a folder without a manifest. What is downloaded is compared with the manifest before anything in it is opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hotseat import faults
from hotseat.closing import on_failure
from hotseat.errors import CheckpointError, StoreError, TakenOverError, UserError
from hotseat.files import sync_tree
from hotseat.loop.state.checkpoints import (
    FORMAT,
    MANIFEST,
    STATE,
    CheckpointStore,
    best_metric,
    file_facts,
    kept_steps,
    name_of,
)
from hotseat.object_store import ObjectStore

OWNER = "owner.json"
_FOLDER = re.compile(r"(step-\d{6,})/(.+)")
_ATTEMPTS, _PAUSE_S = 4, 0.5  # to download: the pause doubles

Moved = Callable[[int], object]  # called with numbers of bytes


def _nothing(num_bytes: int) -> None:
    pass


class RemoteCheckpoints:
    """Checkpoints of one run at a URL. Raises `StoreError` if the storage, or the way to it, fails.

    run: its name. keep_last, max_bytes: as of `CheckpointStore`.
    """

    def __init__(self, url: str, *, run: str = "", keep_last: int = 3, max_bytes: int | None = None):
        self.store = ObjectStore(url)
        self.url = self.store.url
        self._run = run
        self._has_taken_over = False
        self._keep_last = keep_last
        self._max_bytes = max_bytes
        self._word = secrets.token_hex(16)  # which only this process knows
        self.warn: Callable[[str], object] = lambda text: None
        self._metrics: dict[int, float | None] = {}  # that choose the best, by step
        self._warned_of: set[int] = set()
        self._uploaded: dict[int, set[str]] = {}  # files of checkpoints that are not complete yet

    # --- who writes -----------------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Have this process be the one that writes here; another one that still does will notice."""
        facts = {
            "run": self._run,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "word": self._word,
        }
        self.store.write(OWNER, json.dumps(facts, indent=1).encode())
        self._has_taken_over = True

    def _check_owner(self) -> None:
        """Raise `TakenOverError` if another process has taken over. Without an owner yet, it is this one."""
        if not self._has_taken_over:
            self.take_over()
            return
        content = self.store.read(OWNER)
        try:
            facts = json.loads(content or b"{}")
            if facts.get("word") == self._word:
                return
            who = f"process {facts.get('pid')} on {facts.get('host')}, of the run {facts.get('run')},"
        except (ValueError, AttributeError):
            who = "something else"
        raise TakenOverError(f"{who} writes to {self.url} now, so that nothing more is uploaded by this one")

    # --- reading --------------------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, oldest first."""
        return sorted(_steps(self._folders()))

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of the loop in a checkpoint, compared with its manifest."""
        name, files = name_of(step), self._files(step)
        content = self.store.read(f"{name}/{STATE}")
        expected = files.get(STATE, {})
        if content is None or len(content) != expected.get("bytes") or _digest(content) != expected.get("hash"):
            raise CheckpointError(f"{self.url}/{name} is damaged: {STATE} has other contents than were uploaded")
        state: dict[str, Any] = json.loads(content)
        return state

    def download(self, step: int, into: CheckpointStore, moved: Callable[[int, int], object]) -> Path:
        """Download and verify a checkpoint, add it to those on disk, and return its path.

        moved: called with the bytes that are here and with all of them.
        """
        name, files = name_of(step), self._files(step)
        total = sum(facts["bytes"] for facts in files.values())
        with into.writing(step, total) as folder, on_failure(lambda: shutil.rmtree(folder, ignore_errors=True)):
            here = 0
            for file, facts in files.items():
                path = folder / file
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fetch(f"{name}/{file}", path, facts)
                here += facts["bytes"]
                moved(here, total)
            (folder / MANIFEST).write_bytes(self._manifest(step))
            if into.is_private:
                (folder / STATE).chmod(0o600)
            sync_tree(folder)
            target = into.path(step)
            folder.rename(target)
        return target

    def _fetch(self, name: str, path: Path, facts: Mapping[str, Any]) -> None:
        """Download a file, again if what came is not what the manifest says: it may have been cut on the way."""
        problem: CheckpointError | StoreError
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            try:
                self.store.get(name, path)
            except StoreError as error:
                problem = error
                if isinstance(error.__cause__, FileNotFoundError):
                    problem = CheckpointError(f"{self.url}/{name} is damaged: it is not there; {self._advice(name)}")
                continue
            here = file_facts(path)
            if here == {"bytes": facts["bytes"], "hash": facts["hash"]}:
                return
            what = f"has {here['bytes']:,} bytes, {facts['bytes']:,} were uploaded"
            if here["bytes"] == facts["bytes"]:
                what = "has other contents than were uploaded"
            problem = CheckpointError(f"{self.url}/{name} is damaged: it {what}; {self._advice(name)}")
        raise problem

    def _advice(self, name: str) -> str:
        folder = name.partition("/")[0]
        earlier = [step for step in self.steps() if name_of(step) < folder]
        return f"remove {self.url}/{folder}" + (f" to resume from {name_of(earlier[-1])}" if earlier else "")

    def _manifest(self, step: int) -> bytes:
        content = self.store.read(f"{name_of(step)}/{MANIFEST}")
        if content is None:
            raise CheckpointError(f"{self.url}/{name_of(step)} is not there any more")
        return content

    def _files(self, step: int) -> dict[str, dict[str, Any]]:
        """Return the files that a manifest lists, each with bytes and hash. Raises if it is damaged."""
        at = f"{self.url}/{name_of(step)}/{MANIFEST}"
        try:
            manifest = json.loads(self._manifest(step))
            files = {str(name): dict(facts) for name, facts in manifest["files"].items()}
            if STATE not in files or any(type(each["bytes"]) is not int or not each["hash"] for each in files.values()):
                raise ValueError("it does not say what the files hold")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{at} is damaged: {error}; {self._advice(name_of(step))}") from None
        if manifest.get("format") != FORMAT or manifest.get("step") != step:
            raise CheckpointError(
                f"{at} has format {manifest.get('format')} and is of step {manifest.get('step')}: this version reads"
                f" format {FORMAT}, in the folder of its step"
            )
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or name != "/".join(parts) or parts[0] == "/" or ".." in parts or name == MANIFEST:
                raise CheckpointError(f"{at} is damaged: it names a file {name!r}")
        return files

    # --- writing --------------------------------------------------------------------------------------------------

    def upload(self, step: int, path: Path, moved: Moved = _nothing) -> bool:
        """Upload a checkpoint on disk, the manifest last. Called again after an error, it continues where that was.

        Returns whether it had to: one that is complete is left as it is. moved: called with the bytes that are there.
        """
        name = name_of(step)
        if self.store.read(f"{name}/{MANIFEST}") is not None:
            return False
        manifest = (path / MANIFEST).read_bytes()
        files: dict[str, dict[str, Any]] = json.loads(manifest)["files"]
        done = self._uploaded.setdefault(step, set())
        moved(sum(files[file]["bytes"] for file in done))
        for file, facts in files.items():
            if file in done:
                continue
            faults.reach("upload.file")
            sent = 0

            def note(num_bytes: int) -> None:
                nonlocal sent
                sent += num_bytes
                moved(num_bytes)

            self.store.put(path / file, f"{name}/{file}", note)
            moved(facts["bytes"] - sent)  # not every library says what it has sent
            done.add(file)
        there = self.store.sizes(name)
        for file, facts in files.items():
            if there.get(f"{name}/{file}") != facts["bytes"]:
                done.discard(file)
        if missing := sorted(files.keys() - done):
            raise StoreError(f"{self.url}/{name}/{missing[0]} was uploaded, and is not there as a whole")
        self.store.sync(name)
        faults.reach("upload.manifest")
        self._check_owner()
        self.store.write(f"{name}/{MANIFEST}", manifest)
        del self._uploaded[step]
        self._metrics[step] = best_metric((path / STATE).read_bytes())
        faults.reach("upload.after")
        return True

    def prune(self) -> list[int]:
        """Delete checkpoints that are not kept, and remains of others; return the steps of the deleted."""
        self._check_owner()
        folders = self._folders()
        complete = _steps(folders)
        sizes = {step: sum(folders[name_of(step)].values()) for step in complete}
        metrics = self._known_metrics(complete)
        kept = kept_steps(metrics, sizes.__getitem__, self._keep_last, self._max_bytes)
        deleted = sorted(metrics.keys() - kept)
        for step in deleted:
            self._delete(name_of(step), folders[name_of(step)])
        for name in folders.keys() - {name_of(step) for step in complete}:
            self._delete(name, folders[name])
        self._uploaded.clear()
        return deleted

    def delete_all(self, but_with: str) -> None:
        """Delete all checkpoints, except those with a folder of that name."""
        self._check_owner()
        for name, files in self._folders().items():
            if not any(file.startswith(f"{but_with}/") for file in files):
                self._delete(name, files)

    def _delete(self, name: str, files: Mapping[str, int]) -> None:
        if MANIFEST in files:
            self.store.delete([f"{name}/{MANIFEST}"])
            faults.reach("upload.delete")
        self.store.delete(f"{name}/{file}" for file in files if file != MANIFEST)
        self.store.delete_folder(name)

    def _known_metrics(self, steps: Iterable[int]) -> dict[int, float | None]:
        """Return the metrics that choose the best. A checkpoint that is damaged is left out, and nothing deletes it."""
        for step in sorted(set(steps) - self._metrics.keys() - self._warned_of):
            try:
                self._metrics[step] = best_metric(json.dumps(self.state(step)))
            except CheckpointError as error:
                self._warned_of.add(step)
                self.warn(f"{error}; it is left as it is")
        return {step: self._metrics[step] for step in steps if step in self._metrics}

    def _folders(self) -> dict[str, dict[str, int]]:
        """Return the files below each folder of a step, with their bytes."""
        folders: dict[str, dict[str, int]] = {}
        for name, num_bytes in self.store.sizes().items():
            if match := _FOLDER.fullmatch(name):
                folders.setdefault(match[1], {})[match[2]] = num_bytes
        return folders


def _steps(folders: Mapping[str, Mapping[str, int]]) -> set[int]:
    return {int(name.removeprefix("step-")) for name, files in folders.items() if MANIFEST in files}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def newest_state(url: str) -> dict[str, Any] | None:
    """Return the state in the newest checkpoint at a URL; None if there is none. Raises `UserError` for no answer."""
    try:
        remote = RemoteCheckpoints(url)
        steps = remote.steps()
        return remote.state(steps[-1]) if steps else None
    except StoreError as error:
        raise UserError(str(error)) from None
