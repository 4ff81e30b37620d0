"""A record of the episodes that the process of a rollout host has died of, which outlives the process.

Whose code runs is noted in a file that the system keeps when the process is gone. The next process reads it: an episode
in whose code the process ended gets a strike, and is from then on played alone, so that the next death tells which of
several it was. With two strikes it is not played any more.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hotseat.agents.environments.worker_reports import note_exits
from hotseat.agents.episode_output import current_log
from hotseat.agents.user_lines import line_of

MAX_STRIKES = 2
_SLOT_BYTES = 64
_NUM_SLOTS = 4096
_EXIT_BYTES = 1024


@dataclass(frozen=True)
class Strike:
    """Facts about the processes that ended with an episode. how: the last one did."""

    times: int
    how: str
    has_failed: bool = False


class CrashRecord:
    """The record of one host.

    folder: where its files are; the processes of a host, one after another, use the same. name: of the host.
    """

    def __init__(self, folder: Path, name: str):
        folder.mkdir(parents=True, exist_ok=True)
        self._strikes_file = folder / f"{name}.strikes"
        self.strikes = _strikes(self._strikes_file)
        self._slots: dict[str, int] = {}
        self._free = list(range(_NUM_SLOTS))
        size = _EXIT_BYTES + _NUM_SLOTS * _SLOT_BYTES
        self._file = folder / f"{name}.running"
        file = os.open(self._file, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
        finally:
            os.close(file)
        self._read()

    # --- what the process before this one has left --------------------------------------------------------------------

    def _read(self) -> None:
        """Count the strikes of an earlier process that ended amid episodes."""
        said = self._memory[:_EXIT_BYTES].rstrip(b"\0")
        if said:
            struck = [json.loads(said)]
        else:
            held = (self._memory[self._at(slot) : self._at(slot) + _SLOT_BYTES] for slot in range(_NUM_SLOTS))
            running = [each.rstrip(b"\0").decode() for each in held if each[0]]
            struck = [{"key": key, "how": "it was killed, or crashed"} for key in running]
        if struck:
            with self._strikes_file.open("a") as file:
                file.write("".join(f"{json.dumps(each)}\n" for each in struck))
            self.strikes = _strikes(self._strikes_file)
        self.clear()

    def is_struck(self, key: str) -> bool:
        return key in self.strikes

    def reason_to_skip(self, key: str) -> str | None:
        """Return why an episode is not played any more; None: it is."""
        strike = self.strikes.get(key)
        if strike is None or strike.times < MAX_STRIKES:
            return None
        return strike.how if strike.has_failed else f"the process of its rollout host ended twice with it: {strike.how}"

    # --- this process -------------------------------------------------------------------------------------------------

    def enter(self, key: str) -> None:
        """Note that code of an episode's agent runs from now on."""
        if key in self._slots or not self._free:
            return
        slot = self._slots[key] = self._free.pop()
        self._memory[self._at(slot) : self._at(slot) + _SLOT_BYTES] = key.encode()[:_SLOT_BYTES].ljust(
            _SLOT_BYTES, b"\0"
        )

    def leave(self, key: str) -> None:
        """Note that the agent waits for the policy, or has ended."""
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._memory[self._at(slot)] = 0
            self._free.append(slot)

    def blame(self, key: str, how: str, *, has_failed: bool = False) -> None:
        """Note that this process is about to end, and for which episode. has_failed: it is not to be played again."""
        text = json.dumps({"key": key, "how": how[: _EXIT_BYTES // 4], "has_failed": has_failed}).encode()
        self._memory[:_EXIT_BYTES] = text.ljust(_EXIT_BYTES, b"\0")

    def clear(self) -> None:
        """Note that nothing runs."""
        self._memory[:] = bytes(len(self._memory))
        self._slots.clear()
        self._free = list(range(_NUM_SLOTS))

    def close(self) -> None:
        """Remove what the run does not need any more."""
        self._memory.close()
        with contextlib.suppress(OSError):
            self._file.unlink()
            self._strikes_file.unlink(missing_ok=True)
            self._file.parent.rmdir()

    def note_exits(self) -> None:
        """Have `os._exit`, which nothing else can see, note the episode that it ends first."""
        note_exits(current_log.get, lambda log, how: self.blame(log.key, how), line_of)

    @staticmethod
    def _at(slot: int) -> int:
        return _EXIT_BYTES + slot * _SLOT_BYTES


def num_given_up(logs: Path) -> int:
    """Count the episodes of all hosts that are not played any more. logs: the folder with the folders of hosts."""
    files = logs.glob("crashes-*/*.strikes")
    return sum(strike.times >= MAX_STRIKES for file in files for strike in _strikes(file).values())


def _strikes(file: Path) -> Mapping[str, Strike]:
    """Return the strikes in a file, by episode."""
    strikes: dict[str, Strike] = {}
    if file.is_file():
        for line in file.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError):  # a line that was cut off
                said = json.loads(line)
                before, has_failed = strikes.get(said["key"]), bool(said.get("has_failed"))
                times = MAX_STRIKES if has_failed else 1 + (0 if before is None else before.times)
                strikes[said["key"]] = Strike(times, said["how"], has_failed)
    return strikes
