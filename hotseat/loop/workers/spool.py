"""Finished groups on disk: what a rollout host has reported outlives its process, and goes into checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotseat.errors import RunError
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey
from hotseat.loop.workers.group_format import NotAGroup, decode_group, encode_group
from hotseat.loop.workers.turn_times import TurnTimes
from hotseat.types import Episode, PromptGroup

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

    def facts(self) -> GroupFacts:
        """Return the summary of a group for the driver."""
        samples = self.group.samples
        return GroupFacts(
            epoch=self.epoch,
            prompt=self.group.prompt.index,
            source=self.group.prompt.source,
            samples=tuple(sample.episode.key.sample for sample in samples),
            rewards=tuple(sample.reward for sample in samples),
            scores=tuple(sample.score for sample in samples),
            num_sampled=tuple(sample.episode.num_sampled for sample in samples),
            num_tokens=tuple(sum(len(s.token_ids) for s in sample.episode.segments) for sample in samples),
            truncated=tuple(sample.episode.is_truncated for sample in samples),
            failures=self.failures,
            extra=tuple(dict(sample.extra) for sample in samples),
            versions=tuple(_versions(sample.episode) for sample in samples),
            episode_s=self.episode_s,
            turn_times=TurnTimes.of(sample.episode.facts for sample in samples),
            scoring_s=self.scoring_s,
        )


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
        path = self._path(finished.key)
        temporary = path.with_suffix(f".{os.getpid()}.part")
        facts = {name: value for name, value in vars(finished).items() if name != "group"}
        with temporary.open("wb") as file:
            file.writelines(encode_group(finished.group, facts))
        temporary.replace(path)

    def get(self, key: GroupKey) -> Finished | None:
        """Read a group; None if there is none of that key. Raises `RunError` if the file holds something else."""
        path = self._path(key)
        try:
            return _finished(path.read_bytes())
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            why = error if isinstance(error, NotAGroup) else f"is damaged ({type(error).__name__}: {error})"
            raise RunError(f"{path} cannot be read as a group of samples: it {why}") from None

    def has(self, key: GroupKey) -> bool:
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


def _finished(data: bytes) -> Finished:
    group, facts = decode_group(data)
    failures = tuple((sample, reason) for sample, reason in facts["failures"])
    return Finished(**{**facts, "group": group, "failures": failures, "episode_s": tuple(facts["episode_s"])})


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it where the other name is on another disk."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP):
            raise
        shutil.copyfile(source, target)


def _versions(episode: Episode) -> tuple[int, int]:
    sampled = [segment.versions.numpy()[segment.mask.numpy()] for segment in episode.segments]
    versions = sampled[0] if len(sampled) == 1 else np.concatenate(sampled)
    return int(versions.min()), int(versions.max())
