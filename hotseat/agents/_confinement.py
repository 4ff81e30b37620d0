"""Ways to run a program so that everything it starts can be ended: found out by trying them.

control group   of version 2, where this process may make one: nothing leaves it
PID namespace   by `unshare` or bubblewrap: everything in it ends with its first process
process group   everywhere; what leaves the group is found by the mark in its environment, unless it removes that
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotseat.agents._reaper import end_group

_PROBE_S = 10.0
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class Confinement:
    """One of the ways. prefix: words before the command. groups: the folder in which control groups are made."""

    kind: Literal["control group", "PID namespace", "process group"]
    prefix: tuple[str, ...] = ()
    groups: Path | None = None

    def command(self, command: Sequence[str], name: str) -> list[str]:
        """Return a command that runs another one in confinement. name: of the episode, with its host."""
        if self.groups is None:
            return [*self.prefix, *command]
        group = self._group(name)
        group.mkdir()
        return ["/bin/sh", "-c", _ENTER, str(group), *command]

    def end(self, name: str) -> None:
        """End what a program started beyond its process group, which has been killed."""
        if self.groups is not None:
            end_group(self._group(name))

    def can_end(self, name: str) -> bool:
        """Tell whether the system can kill a control group as a whole, which it can since Linux 5.14."""
        return self.groups is None or (self._group(name) / "cgroup.kill").exists()

    def _group(self, name: str) -> Path:
        assert self.groups is not None
        host, _, number = name.partition(".")
        return self.groups / f"hotseat-{host}-{number}"


@functools.cache
def best_confinement() -> Confinement:
    """Return the surest way that works here."""
    groups = own_groups()
    if groups is not None and works(Confinement("control group", groups=groups)):
        return Confinement("control group", groups=groups)
    for prefix in namespaces():
        if works(Confinement("PID namespace", prefix)):
            return Confinement("PID namespace", prefix)
    return Confinement("process group")


def works(confinement: Confinement) -> bool:
    """Try a way out."""
    name = f"probe.{os.getpid()}"
    try:
        command = confinement.command(["/bin/sh", "-c", "exit 7"], name)
        if not confinement.can_end(name):
            return False
        ran = subprocess.run(
            command,
            capture_output=True, timeout=_PROBE_S, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return ran.returncode == 7
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        confinement.end(name)


def namespaces() -> list[tuple[str, ...]]:
    """Return the words before a command by which the programs of this system start it in a PID namespace."""
    commands = []
    unshare, bubblewrap = shutil.which("unshare"), shutil.which("bwrap")
    if unshare is not None:
        user = () if os.geteuid() == 0 else ("--user", "--map-current-user")
        commands.append((unshare, *user, "--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--"))
    if bubblewrap is not None:
        words = ("--unshare-pid", "--die-with-parent", "--dev-bind", "/", "/", "--proc", "/proc", "--")
        commands.append((bubblewrap, *words))
    return commands


def own_groups() -> Path | None:
    """Return the folder of this process's control group of version 2; None if there is none to write to."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        root = next(Path(words[4]) for words in mounts if words[words.index("-") + 1] == "cgroup2")
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        mine = next(line[3:] for line in lines if line.startswith("0::"))
        folder = root / mine.lstrip("/")
        if os.access(folder, os.W_OK):
            return folder
    return None
