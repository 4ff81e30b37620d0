"""Waits until the nodes of a Ray cluster are there, for scripts that start them."""

from __future__ import annotations

import os
import socket
import time

from hotseat.errors import RunError, UserError

TIMEOUT_S = 900.0


def wait_for_nodes(num_nodes: int, timeout_s: float = TIMEOUT_S) -> int:
    """Wait until the cluster at RAY_ADDRESS, whose head may only be starting, has so many nodes. Returns 0."""
    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise UserError(f"RAY_ADDRESS is {address!r}; set it to the host:port of the cluster's head")
    until_s = time.monotonic() + timeout_s
    while not _answers(host, int(port)):
        _refuse_after(until_s, f"no Ray cluster answers at {address}", timeout_s)
    import ray

    ray.init(log_to_driver=False, logging_level="error")
    shown = 0
    try:
        while (count := sum(node["Alive"] for node in ray.nodes())) < num_nodes:
            if count != shown:
                print(f"{count} of {num_nodes} nodes are there", flush=True)
            shown = count
            _refuse_after(until_s, f"{count} of {num_nodes} nodes are there", timeout_s)
    finally:
        ray.shutdown()
    return 0


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def _refuse_after(until_s: float, what: str, timeout_s: float) -> None:
    """Wait for a moment, or raise once it has been too long."""
    if time.monotonic() > until_s:
        raise RunError(f"{what} after {timeout_s:.0f} s: look at what `ray start` printed above")
    time.sleep(1)
