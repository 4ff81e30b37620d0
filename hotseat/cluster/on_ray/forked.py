"""A command of Ray's daemons, run as a fork of the template; run as a program, by Ray, with the command as arguments.

    python -I -S forked.py SOCKET [-u] SCRIPT ARGUMENT ...

The template (`template_process.py`) forks a process that becomes `python [-u] SCRIPT ARGUMENT ...`. This process stays
in its place: it ends when that one ends, with the same code, and the template ends that one when this one is killed.
Where there is no template, or it refuses, this process becomes the command itself. It needs only the standard library.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import sys

LENGTH = struct.Struct("!q")
STARTED, REFUSED = b"+", b"-"


def main(address: str, command: list[str]) -> None:
    """Have a command run as a fork, and end as it ends."""
    with socket.socket(socket.AF_UNIX) as connection:
        pidfd = _ask(connection, address, command)
        if pidfd is None:
            os.execv(sys.executable, [sys.executable, *command])
        watched: list[int] = [connection.fileno(), pidfd]
        while True:
            ready, _, _ = select.select(watched, [], [])
            if connection.fileno() in ready:
                code = connection.recv(LENGTH.size)
                if len(code) == LENGTH.size:
                    sys.exit(LENGTH.unpack(code)[0] & 255)
                watched.remove(connection.fileno())  # the template is gone, and its fork may live
            elif pidfd in ready and len(watched) == 1:
                sys.exit(1)
            elif pidfd in ready:
                watched.remove(pidfd)  # the code is on its way


def _ask(connection: socket.socket, address: str, command: list[str]) -> int | None:
    """Return a handle of the process that runs the command; None if the template did not start one."""
    nice = os.getpriority(os.PRIO_PROCESS, 0)  # Ray's daemons come before its workers
    request = json.dumps({"command": command, "env": dict(os.environ), "cwd": os.getcwd(), "nice": nice}).encode()
    try:
        connection.connect(address)
        socket.send_fds(connection, [LENGTH.pack(len(request))], [0, 1, 2])
        connection.sendall(request)
        answer, fds, _, _ = socket.recv_fds(connection, 1, 1)
    except OSError:
        return None
    return fds[0] if answer == STARTED and fds else None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
