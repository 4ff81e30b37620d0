"""The filter of system calls under which generated code runs, as the program that the kernel reads.

Refused is what would evade the other limits: memory that belongs to no process (`memfd_create`, System V shared
memory), memory and open files of other processes, new namespaces, sockets of families that a network namespace does not
cover, and interfaces that code for a grader never needs and that have had many security holes. Calls that later kernels
add fail as in a kernel without them.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

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
