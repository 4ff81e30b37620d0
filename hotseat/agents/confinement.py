"""Ways to run a program so that everything it starts can be ended: found out by trying them.

PID namespace   by bubblewrap or `unshare`, with a /proc of its own: everything in it ends with its first process, and
                it sees no process outside, nor the environment of one
control group   of version 2, where this process may make one: nothing leaves it
process group   everywhere; what leaves the group is found by the mark in its environment, unless it removes that
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotseat.processes.supervisor import capabilities, end_group, own_group

logger = logging.getLogger(__name__)

_PROBE_S = 10.0
# Of root's rights a program keeps those over files and users. With the others it could take its /proc away.
_KEPT = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
# Succeeds if few processes can be seen, which are then those of a namespace of its own.
_SEES_FEW = "set -- /proc/[0-9]*; [ $# -lt 8 ] && exit 7"
# The first process of a namespace: for a program in its place, signals of its own would have no effect. Quiet, since a
# shell says by which signal a program has ended.
_INIT = ("/bin/sh", "-c", 'exec 3>&2 2>/dev/null; (exec "$0" "$@" 2>&3 3>&-); exit $?')
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


@dataclass(frozen=True)
class Confinement:
    """A way to run a program. prefix: words before the command. groups: the folder for control groups."""

    kind: Literal["control group", "PID namespace", "process group"]
    prefix: tuple[str, ...] = ()
    groups: Path | None = None

    @property
    def hides_processes(self) -> bool:
        """Tell whether a program sees no processes outside, and so no environment that may have secrets."""
        return self.kind == "PID namespace"

    def exit_code(self, code: int) -> int:
        """Return the exit code of a program, minus the signal that ended it: bubblewrap adds that to 128."""
        return 128 - code if self.hides_processes and 128 < code <= 192 else code

    def command(self, command: Sequence[str], name: str) -> list[str]:
        """Return a command that runs another one in confinement. name: of the episode, with its host."""
        if self.groups is None:
            return [*self.prefix, *command]
        group = self.group_of(name)
        group.mkdir()
        return ["/bin/sh", "-c", _ENTER, str(group), *command]

    def end(self, name: str) -> None:
        """End what a program started beyond its process group, which has been killed."""
        if self.groups is not None:
            end_group(self.group_of(name))

    def group_of(self, name: str) -> Path:
        assert self.groups is not None
        host, _, number = name.partition(".")
        return self.groups / f"hotseat-{host}-{number}"


@functools.cache
def best_confinement(has_containers: bool = False) -> Confinement:
    """Return the surest way that works here. has_containers: programs start some, which no namespace allows."""
    for prefix in () if has_containers or _is_switched_off() else namespaces():
        if works(Confinement("PID namespace", prefix)):
            return Confinement("PID namespace", prefix)
    own = own_group()
    if not isinstance(own, str) and os.access(own[0], os.W_OK):
        confinement = Confinement("control group", groups=own[0])
        if works(confinement):
            return confinement
    return Confinement("process group")


def _is_switched_off() -> bool:
    return os.environ.get("HOTSEAT_CONFINE") == "0"


@functools.cache
def warn_if_open(confinement: Confinement, has_containers: bool) -> None:
    """Log, once in a process, that programs can see the processes of this user, and what would change that."""
    if confinement.hides_processes:
        return
    cause = (
        "agent.containers is set, and engines of containers do not work in a namespace"
        if has_containers
        else "HOTSEAT_CONFINE is 0"
        if _is_switched_off()
        else "no PID namespace can be made here: install bubblewrap and allow user namespaces"
        " (kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0; containers:"
        " --security-opt seccomp=unconfined --security-opt systempaths=unconfined), or run as a user without secrets"
    )
    logger.warning(
        "agents' programs are not confined: they can read the environment of this user's processes in /proc, with the"
        " secrets that are in it, since %s",
        cause,
    )


def works(confinement: Confinement) -> bool:
    name = f"probe.{os.getpid()}"
    try:
        trial = _SEES_FEW if confinement.hides_processes else "exit 7"
        command = confinement.command(["/bin/sh", "-c", trial], name)
        # Only since Linux 5.14 the system can kill a control group as a whole.
        if confinement.groups is not None and not (confinement.group_of(name) / "cgroup.kill").exists():
            return False
        ran = subprocess.run(command, capture_output=True, timeout=_PROBE_S, stdin=subprocess.DEVNULL)
        return ran.returncode == 7
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        confinement.end(name)


def namespaces() -> list[tuple[str, ...]]:
    """Return the words before a command by which the programs of this system start it in a PID namespace."""
    commands = []
    is_root = os.geteuid() == 0
    unshare, setpriv, bubblewrap = shutil.which("unshare"), shutil.which("setpriv"), shutil.which("bwrap")
    if bubblewrap is not None:
        rights = [word for name in _held() for word in ("--cap-add", f"CAP_{name}")] if is_root else []
        words = ("--unshare-pid", "--die-with-parent", "--dev-bind", "/", "/", "--proc", "/proc")
        commands.append((bubblewrap, *words, "--cap-drop", "ALL", *rights, "--"))
    if unshare is not None and (setpriv is not None or not is_root):
        user = () if is_root else ("--user", "--map-current-user")
        names = ",".join(["-all", *(f"+{name.lower()}" for name in _held())])
        sets = [f"--{name}={names}" for name in ("bounding-set", "inh-caps", "ambient-caps")] if is_root else []
        rights = [] if setpriv is None else [setpriv, "--no-new-privs", *sets, "--"]
        namespace = ("--pid", "--fork", "--kill-child=KILL", "--mount-proc", "--")
        commands.append((unshare, *user, *namespace, *rights, *_INIT))
    return commands


def kept_capabilities() -> int:
    """Return the rights of this process that its programs keep, a bit for each."""
    return sum(1 << _KEPT[name] for name in _held()) if os.geteuid() == 0 else 0


def _held() -> list[str]:
    """Return the names of the rights that this process has and its programs keep."""
    mine = capabilities()
    return [name for name, number in _KEPT.items() if mine >> number & 1]
