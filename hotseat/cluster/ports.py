"""Free ports for processes that meet over sockets."""

from __future__ import annotations

import random
import socket

_returned_ports: set[int] = set()  # they may not be in use yet


def free_port(host: str) -> int:
    """Return a port that nobody uses, below the range that the kernel gives out by chance."""
    # Not by the random numbers of the run: several processes may have the same.
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        if port in _returned_ports:
            continue
        try:
            for address in dict.fromkeys((host, "")):
                with socket.socket(socket.AF_INET) as probe:
                    probe.bind((address, port))
        except OSError:
            continue
        _returned_ports.add(port)
        return port
    raise OSError(f"no free port on {host} between 20000 and 32000")
