"""The command that runs generated code: bubblewrap with its options and its filter of system calls."""

from __future__ import annotations

import errno
import json
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.errors import SandboxError
from hotseat.processes.supervisor import capabilities

_CAP_SYS_ADMIN = 21
_USERS = (0x70000000, 60000)  # first of the user ids for code that root starts; the second where ids end at 65535
_SYSTEM = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib64")


@dataclass(frozen=True)
class Interpreter:
    """The interpreter of generated code. paths: what it needs of the file system, apart from system libraries."""

    command: tuple[str, ...]
    paths: tuple[str, ...]


@dataclass(frozen=True)
class Runner:
    """The command that runs a folder's `main.py`. has_pipes: it is bubblewrap, and takes a filter and gives its child.

    outer_user: the user to start it as; inner_user: the user that `main.py` becomes. None: no change.
    """

    command: tuple[str, ...]
    has_pipes: bool = False
    outer_user: int | None = None
    inner_user: int | None = None


def find_interpreter(python: str | None) -> Interpreter:
    if python is None:
        executable = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        return Interpreter((executable, "-s", "-S", "-B"), (executable, *_libraries(sys.base_prefix)))
    ask = "import json, sys; print(json.dumps([sys.executable, sys.prefix, sys.base_prefix, sys.path]))"
    try:
        answer = subprocess.run([python, "-E", "-s", "-c", ask], capture_output=True, timeout=60, check=True, text=True)
        # The file that was named may be a script that starts the interpreter, as pyenv's are.
        executable, prefix, base, searched = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SandboxError(f"reward.sandbox.python {python} is no interpreter: {error}") from None
    paths = (executable, *([prefix] if prefix != base else []), *_libraries(base))
    # Folders of packages that .pth files add. Others, such as a project's own, have no business in the sandbox.
    packages = [path for path in searched if os.path.basename(path) in ("site-packages", "dist-packages")]
    return Interpreter((executable, "-s", "-B"), (*paths, *filter(os.path.isdir, packages)))


def _libraries(prefix: str) -> list[str]:
    return [path for name in ("lib", "lib64") if os.path.isdir(path := os.path.join(prefix, name))]


def _resolved(paths: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the links on the way to paths, with their targets, and where the paths lead; nothing inside another."""
    links: dict[str, str] = {}
    ends: list[str] = []
    for path in paths:
        at, left = "/", list(Path(path).parts[1:])
        while left:
            at = os.path.normpath(os.path.join(at, left.pop(0)))
            if os.path.islink(at):
                links[at] = os.readlink(at)
                left[:0] = [part for part in Path(links[at]).parts if part != "/"]
                at = "/" if os.path.isabs(links[at]) else os.path.dirname(at)
        ends.append(at)
    outer = [end for end in dict.fromkeys(ends) if not _is_inside(end, [other for other in ends if other != end])]
    return {link: target for link, target in links.items() if not _is_inside(link, outer)}, outer


def _is_inside(path: str, folders: Sequence[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def bubblewrap(bwrap: str, python: Interpreter, folder: Path, max_file_bytes: int) -> Runner:
    is_root = os.geteuid() == 0
    user = _free_user() if is_root else None
    # Root sets the sandbox up itself and leaves the user to `main.py`: bwrap can map only its own user into a new
    # namespace, and outside that would still be root.
    is_privileged = is_root and bool(capabilities() >> _CAP_SYS_ADMIN & 1)
    options = [
        *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL"),
    ]
    if is_privileged:
        options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        options += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    env = {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    for name, value in {**env, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}.items():
        options += ["--setenv", name, value]
    options += ["--dir", "/usr", "--dir", "/etc"]
    for path in _SYSTEM:
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            options += ["--ro-bind", path, path]
    options += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    size = str(max_file_bytes // 4)
    options += [
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/dev/shm"),
        *("--perms", "1777", "--size", size, "--tmpfs", "/tmp", "--chdir", "/tmp"),
    ]
    # After /tmp and /dev/shm, which would hide an interpreter that is there.
    links, ends = _resolved(python.paths)
    shown = [("--symlink", target, link) for link, target in links.items()] + [("--ro-bind", end, end) for end in ends]
    for option, source, place in shown:
        if _is_inside(place, _SYSTEM):
            continue
        for parent in reversed(Path(place).parents[:-1]):  # bwrap itself would make them for root alone
            if not _is_inside(str(parent), _SYSTEM):
                options += ["--dir", str(parent)]
        options += [option, source, place]
    options += ["--ro-bind", str(folder), "/program", "--remount-ro", "/dev", "--remount-ro", "/"]
    return Runner(
        (bwrap, *options, "--", *python.command, "/program/main.py"),
        has_pipes=True,
        outer_user=None if is_privileged else user,
        inner_user=user if is_privileged else None,
    )


def _free_user() -> int:
    """Return a user id that nobody else has: the number of processes is limited for each user."""
    mapped = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    first = _USERS[0] if any(start <= _USERS[0] < start + length for start, _, length in mapped) else _USERS[1]
    return first + threading.get_native_id() % (2**22 if first == _USERS[0] else 5000)


# --- the filter of system calls, as the program that the kernel reads -------------------------------------------------

# Refused is what would evade the other limits: memory that belongs to no process (`memfd_create`, System V shared
# memory), memory and open files of other processes, new namespaces, sockets of families that a network namespace does
# not cover, and interfaces that code for a grader never needs and that have had many security holes. Calls that later
# kernels add fail as in a kernel without them.
_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in the kernel's seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NEW_NAMESPACE = 0x7E020000  # all CLONE_NEW* flags
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls of an architecture. refused: those that fail with EPERM."""

    audit: int
    clone: int
    socket: int
    refused: tuple[int, ...]


# Equal on all machines: memfd_secret, io_uring_*, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick,
# mount_setattr, open_tree_attr, pidfd_getfd.
_NEWER = (447, 425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 467, 438)
_HIGHEST = 469  # file_setattr, of Linux 6.17: all up to it were gone through
_CLONE3 = 435
_MACHINES = {
    # memfd_create, shmget, semget, msgget, mq_open, userfaultfd, perf_event_open, bpf, add_key, request_key, keyctl,
    # ptrace, process_vm_readv, process_vm_writev, unshare, setns, mount, umount2, pivot_root, kexec_load, init_module,
    # finit_module.
    "x86_64": _Machine(0xC000003E, 56, 41, (
        319, 29, 64, 68, 240, 323, 298, 321, 248, 249, 250,
        101, 310, 311, 272, 308, 165, 166, 155, 246, 175,
        313, *_NEWER,
    )),
    "aarch64": _Machine(0xC00000B7, 220, 198, (
        279, 194, 190, 186, 180, 282, 241, 280, 217, 218, 219,
        117, 270, 271, 97, 268, 40, 39, 41, 104, 105,
        273, *_NEWER,
    )),
}  # fmt: skip


def system_call_filter(machine: str) -> bytes | None:
    """Return the filter for `platform.machine()`; None for an architecture whose numbers are not known here."""
    known = _MACHINES.get(machine)
    if known is None:
        return None
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_EQUAL, known.audit, 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
        # Far above are x86's calls with 32-bit pointers, which have other numbers.
        *_unless(_JUMP_ABOVE, _HIGHEST + 1, errno.ENOSYS),
        # Its flags are in memory, which a filter cannot read; C libraries then use clone.
        *_unless(_JUMP_EQUAL, _CLONE3, errno.ENOSYS),
    ]
    for number in known.refused:
        program += _unless(_JUMP_EQUAL, number, errno.EPERM)
    program += [
        _step(_JUMP_EQUAL, known.clone, 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        *_unless(_JUMP_SET, _NEW_NAMESPACE, errno.EPERM),
        _step(_RETURN, _ALLOW),
        _step(_JUMP_EQUAL, known.socket, 0, 2 + len(_FAMILIES)),
        _step(_LOAD, _FIRST_ARGUMENT),
        *(_step(_JUMP_EQUAL, family, len(_FAMILIES) - index, 0) for index, family in enumerate(_FAMILIES)),
        _step(_RETURN, _ERROR | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    return b"".join(program)


def _unless(jump: int, value: int, error: int) -> list[bytes]:
    """Return the steps that fail with an error if a comparison holds."""
    return [_step(jump, value, 0, 1), _step(_RETURN, _ERROR | error)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
