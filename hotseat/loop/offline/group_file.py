"""Finished groups on disk, and the choice of those of their samples that are written. Needs neither torch nor Ray.

Groups are lines that are appended as they finish, so that a killed command resumes without loss.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from hotseat.closing import on_failure
from hotseat.config import Config
from hotseat.errors import UserError
from hotseat.words import leaves

Group = Mapping[str, Any]  # a line of the file: `index` of the prompt, and what became of its samples


class GroupFile:
    """The groups of an unfinished command, beside its output.

    A line is a group or, if it was cut short by a kill, nothing: its prompt is answered again. The first line has the
    settings; a file with other settings is refused, or begun anew if `replace` is true. One process holds it.
    """

    def __init__(self, output: Path, settings: Mapping[str, Any], *, replace: bool = False, needs_reward: bool = False):
        """Open the file beside an output. needs_reward: groups of which a sample has no reward are answered again."""
        self._needs_reward = needs_reward
        self.path = partial_path(output)
        self._places: dict[int, int] = {}  # byte at which the line of each prompt begins
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+b")
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}; choose another --output") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(
                f"{self.path} is in use by another process: wait for it, or choose another --output"
            ) from None
        with on_failure(self._file.close):
            self._read(json.loads(json.dumps(settings)), replace)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, index: int) -> bool:
        return index in self._places

    def add(self, group: Group) -> None:
        """Append a group. It is in the hands of the system when this returns, and survives the end of the process."""
        place = self._file.seek(0, os.SEEK_END)
        self._file.write(_line(group))
        self._file.flush()
        self._places[group["index"]] = place

    def groups(self) -> Iterator[dict[str, Any]]:
        for index in sorted(self._places):
            self._file.seek(self._places[index])
            yield json.loads(self._file.readline())

    def remove(self) -> None:
        self.path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, settings: Mapping[str, Any], replace: bool) -> None:
        self._file.seek(0)
        header = self._file.readline()
        earlier = json.loads(header)["settings"] if header.endswith(b"\n") else None
        if earlier != settings:
            if earlier is not None and not replace:
                raise UserError(_differing(self.path, earlier, settings))
            self._file.truncate(0)
            self._file.write(_line({"settings": settings}))
            self._file.flush()
            return
        place = self._file.tell()
        for line in self._file:
            if not line.endswith(b"\n"):
                self._file.truncate(place)
                return
            group = json.loads(line)
            # A group with failures gets another attempt, whose line replaces this one.
            lacks_reward = self._needs_reward and any("reward" not in row for row in group["rows"])
            if not group["failures"] and not lacks_reward:
                self._places[group["index"]] = place
            place += len(line)


def partial_path(output: Path) -> Path:
    """Return where the groups of an unfinished command are, by its output."""
    return output.with_name(f"{output.name}.partial")


def settings_of(config: Config, digest: str) -> dict[str, Any]:
    """Return what decides the answers: the config, the digest of the prompts, and the files of model and user code."""
    values = {key: value for key, value in leaves(config.model_dump(mode="json")) if not key.startswith("cluster.")}
    files = {
        "reward.function": config.reward.function,
        "reward.judge.rubric": config.reward.judge.rubric,
        "agent.path": config.agent.path,
        "agent.environment.name": config.agent.environment.name,
        **{f"agent.command[{at}]": word for at, word in enumerate(config.agent.command or ())},
    }
    for key, path in files.items():
        file = Path((path or "").partition(".py:")[0]).expanduser()
        file = file if file.is_file() else Path(f"{file}.py")
        if file.is_file():
            values[f"contents of {key}"] = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    weights = sorted(Path(config.actor.model or "").glob("*.safetensors"))
    stats = [(file.name, file.stat()) for file in weights]
    return {
        **values,
        "prompts": digest,
        "files of actor.model": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
    }


def _differing(path: Path, earlier: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    keys: Sequence[str] = sorted(key for key in {*earlier, *settings} if earlier.get(key) != settings.get(key))
    shown = [f"{key} was {_shown(earlier.get(key))} and is {_shown(settings.get(key))}" for key in keys[:4]]
    return (
        f"{path} holds answers that were made with other settings: {'; '.join(shown)}. Repeat the command with the same"
        " settings to resume it, or choose another --output; --overwrite begins anew"
    )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _line(value: Any) -> bytes:
    return (json.dumps(value) + "\n").encode()


Keep = Literal["all", "best", "pairs"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Selection:
    """Choice of the samples of a prompt that are written.

    keep: all; `best`, the one with the highest reward; or `pairs`, the best and the worst as chosen and rejected, if
    their rewards differ. min_reward: samples, or chosen ones, with less are left out.
    """

    keep: Keep = "all"
    min_reward: float | None = None

    @property
    def needs_reward(self) -> bool:
        return self.keep != "all" or self.min_reward is not None

    def of(self, rows: Sequence[Row]) -> list[Row]:
        """Return the lines for the samples of one prompt. Of equal rewards the first counts."""
        good = [row for row in rows if self.min_reward is None or row["reward"] >= self.min_reward]
        if self.keep == "all" or not good:
            return good
        best = max(good, key=_reward)
        if self.keep == "best":
            return [best]
        worst = min(rows, key=_reward)
        if worst["reward"] == best["reward"]:
            return []
        pair = {"prompt": best["input"], "chosen": best["output"], "rejected": worst["output"]}
        return [pair | {"chosen_reward": best["reward"], "rejected_reward": worst["reward"]}]


def check_output(output: Path, overwrite: bool) -> None:
    """Raise if the output exists and was not to be replaced. An unfinished one is resumed."""
    if output.is_dir():
        raise UserError(f"--output {output} is a folder: give the name of a file, such as {output}/answers.jsonl")
    if output.exists() and not overwrite and not partial_path(output).exists():
        raise UserError(f"{output} exists: choose another --output, or replace it with --overwrite")


def _reward(row: Row) -> float:
    return float(row["reward"])
