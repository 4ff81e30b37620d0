"""Finished groups on disk: what a rollout host has reported outlives its process, and goes into checkpoints."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.facts import GroupKey
from hotseat.types import PromptGroup

KEPT_BYTES_PER_TOKEN = 8 + 1 + 4 + 4  # id, mask, log-prob and version of a token in a file


@dataclass(frozen=True)
class Finished:
    """A group whose samples have their rewards, those that have none with the reasons, and the seconds it took."""

    epoch: int
    group: PromptGroup
    failures: tuple[tuple[int, str], ...]
    episode_s: tuple[float, ...] = ()
    scoring_s: float = 0.0

    @property
    def key(self) -> GroupKey:
        return self.epoch, self.group.prompt.index


class Spool:
    """A file per finished group, in a folder that driver and rollout hosts share.

    A file is there whole or not at all: it is written under another name first.

    kept: folder to which groups go that are of no more use to the run; None: they are deleted.
    """

    def __init__(self, folder: Path, kept: Path | None = None):
        self._folder = folder
        self._kept = kept
        for path in (folder, kept):
            if path is not None:
                path.mkdir(parents=True, exist_ok=True)

    def put(self, finished: Finished) -> None:
        """Write a group."""
        path = self._path(finished.key)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        # A share travels flat: a few arrays instead of four small tensors for every segment.
        share = Share((finished.group,), ((),))
        flat = finished.epoch, share, finished.failures, finished.episode_s, finished.scoring_s
        temporary.write_bytes(pickle.dumps(flat, protocol=pickle.HIGHEST_PROTOCOL))
        temporary.replace(path)

    def get(self, key: GroupKey) -> Finished | None:
        """Read a group; None if there is none of that key."""
        try:
            data = self._path(key).read_bytes()
        except FileNotFoundError:
            return None
        epoch, share, *rest = pickle.loads(data)  # files of earlier versions have no seconds
        return Finished(epoch, share.groups[0], *rest)

    def has(self, key: GroupKey) -> bool:
        """Tell whether there is a group of that key."""
        return self._path(key).is_file()

    def forget(self, keys: Iterable[GroupKey]) -> None:
        """Delete groups, or move them to where they are kept."""
        for key in keys:
            path = self._path(key)
            if self._kept is None:
                path.unlink(missing_ok=True)
            else:
                with suppress(FileNotFoundError):  # this is done again if a host dies meanwhile
                    path.replace(self._kept / path.name)

    def link_into(self, folder: Path, keys: Iterable[GroupKey]) -> None:
        """Give a checkpoint its own names for groups, whose contents never change."""
        folder.mkdir(parents=True, exist_ok=True)
        for key in keys:
            _link(self._path(key), folder / self._path(key).name)

    def restore(self, folder: Path) -> None:
        """Hold exactly the groups of a checkpoint; none if it has no such folder."""
        for path in self._folder.iterdir():
            path.unlink()
        if folder.is_dir():
            for path in folder.iterdir():
                _link(path, self._folder / path.name)

    def _path(self, key: GroupKey) -> Path:
        epoch, prompt = key
        return self._folder / f"{epoch}-{prompt}.group"


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the other name is on another disk."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)
