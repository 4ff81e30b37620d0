"""The environment variables of this process: set for a while, or passed on to workers on other machines."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.placement.locate import Process


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables while the context lasts."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        restore_environment(before)


def restore_environment(before: Mapping[str, str | None]) -> None:
    """Set variables back to earlier values; None removes one."""
    for key, value in before.items():
        if value is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = value


def rank_env(processes: Sequence[Process], rank: int, address: str, port: int) -> dict[str, str]:
    """Return the variables by which a rank of `processes` finds the others, which meet at the address."""
    node = processes[rank].node
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(processes)),
        "LOCAL_RANK": str(sum(other.node == node for other in processes[:rank])),
        "LOCAL_WORLD_SIZE": str(sum(other.node == node for other in processes)),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


_PASSED_ON = "HOTSEAT_PASSED_ON"
# Below Ray's temporary directory: copies of the working directories of jobs, one on each node.
COPIES = "runtime_resources/working_dir_files"
_SIOCGIFADDR = 0x8915  # Linux's request for an interface's address
_INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")  # of collectives on the host


@dataclass(frozen=True)
class PassedOn:
    """Environment that a worker on another machine gets from the driver, and its node's own address.

    folder: the driver's current one, from which relative paths start; None: Ray gives each node a copy.
    variables: `NCCL_*` and interfaces that the driver has. address: by which other nodes reach this one.
    """

    folder: str | None
    variables: Mapping[str, str]
    address: str

    def env(self) -> dict[str, str]:
        """Return the variable by which a worker gets this."""
        return {_PASSED_ON: json.dumps([self.folder, dict(self.variables), self.address])}


def own_folder() -> str | None:
    """Return this process's folder, unless it is a copy that has another path on each node."""
    folder = os.getcwd()
    return None if f"/{COPIES}/" in f"{folder}/" else folder


def pass_on(address: str) -> PassedOn:
    """Return what a worker on the node with this address gets.

    On a cluster that exists, workers have the environment and the folder with which Ray was started on their node.
    """
    names = sorted(name for name in os.environ if name.startswith("NCCL_") or name in _INTERFACES)
    return PassedOn(own_folder(), {name: os.environ[name] for name in names}, address)


def take_passed_on() -> None:
    """Take over what the driver passed on. What is set on this node counts: interfaces may differ there.

    Collectives on the host are kept to the interface that has the node's address. By themselves they listen on the
    address that the host name stands for, which in Debian's `/etc/hosts` is one that no other machine reaches.
    """
    text = os.environ.pop(_PASSED_ON, None)
    if text is None:
        return
    passed_on = PassedOn(*json.loads(text))
    own = interface_of(passed_on.address)
    there = [name for _, name in socket.if_nameindex()]
    for key, value in passed_on.variables.items():
        if key not in _INTERFACES or value in there:
            os.environ.setdefault(key, value)
    for key in _INTERFACES if own else ():
        os.environ.setdefault(key, own)
    if passed_on.folder is not None and os.path.isdir(passed_on.folder):
        os.chdir(passed_on.folder)


def interface_of(address: str) -> str:
    """Return the name of this machine's network interface with the address; nothing if none has it."""
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), "")


def addresses_of(interface: str) -> list[str]:
    """Return the addresses of an interface of this machine: its first of IPv4, and all of IPv6."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket, contextlib.suppress(OSError):
        request = struct.pack("256s", interface.encode()[:15])
        addresses.append(socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        addresses += [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line[:32]))
            for line in lines
            if line.endswith(f" {interface}")
        ]
    return addresses
