"""Nodes that are really apart, on this machine: each has its own network, mounts, processes, IPC and host name.

A node is a process that sleeps in namespaces of its own, with a link to a switch, which is another such process. When
the process dies, whatever the node runs dies with it, and its namespaces and links are gone. Nothing reaches other
machines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NETWORK = "10.91.0"
INTERFACE = "eth0"
TOOLS = ("unshare", "nsenter", "ip", "mount")


def is_possible() -> bool:
    """Return whether this machine lets us make namespaces with links."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in TOOLS):
        return False
    try_link = "ip link add left type veth peer name right && ip link add name switch type bridge"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", try_link], capture_output=True
    )
    return tried.returncode == 0


def no_loss() -> str:
    """Return why links cannot be made to lose packets, or an empty text. Installs nft where it is missing."""
    if shutil.which("nft") is None:
        try:
            words = ("apt-get", "install", "--yes", "--no-install-recommends", "nftables")
            subprocess.run(words, check=True, capture_output=True, timeout=600)
        except (OSError, subprocess.SubprocessError) as error:
            return f"nft is missing, and cannot be installed: {error}"
    rules = f"{_LOSS_TABLE}; add rule inet loss sending {_LOSS_RULE.format(percent=1)}"
    tried = subprocess.run(["unshare", "--net", "nft", rules], capture_output=True, text=True)
    return f"nft cannot drop packets here: {tried.stderr.strip()}" if tried.returncode else ""


_LOSS_TABLE = "add table inet loss; add chain inet loss sending { type filter hook output priority 0; }"
_LOSS_RULE = "oifname != lo numgen random mod 100 < {percent} counter drop"


@dataclass
class Node:
    """A machine of its own. address: in the network of all nodes. init: process whose death ends the node."""

    number: int
    holder: subprocess.Popen
    init: int
    env: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{NETWORK}.{self.number}"

    @property
    def name(self) -> str:
        return f"node{self.number}"

    def command(self, *words: str | Path) -> list[str]:
        """Return the command that runs these words on the node."""
        return [
            "nsenter",
            f"--target={self.init}",
            "--mount",
            "--uts",
            "--ipc",
            "--net",
            "--pid",
            "--",
            *map(str, words),
        ]

    def run(self, *words: str | Path, check: bool = True, **options) -> subprocess.CompletedProcess:
        options = {"capture_output": True, "text": True, "env": self.env or None, **options}
        done = subprocess.run(self.command(*words), **options)
        assert not check or done.returncode == 0, f"{words} on {self.name}: {done.stdout}\n{done.stderr}"
        return done

    def start(self, *words: str | Path, **options) -> subprocess.Popen:
        options = {"stdin": subprocess.DEVNULL, "text": True, "env": self.env or None, **options}
        return subprocess.Popen(self.command(*words), **options)

    def hide(self, path: Path) -> None:
        """Let the node see an empty folder there, as one that is not shared."""
        self.run("mount", "-t", "tmpfs", "none", path)

    def unhide(self, path: Path) -> None:
        self.run("umount", path)

    def cut_off(self) -> None:
        """Take the node's link down: packets to and from it vanish."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def connect(self) -> None:
        self.run("ip", "link", "set", INTERFACE, "up")

    def limit(self, rate: str) -> None:
        """Let the node send no faster than this, such as "20mbit"."""
        self.run(
            "tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms"
        )

    def unlimit(self) -> None:
        self.run("tc", "qdisc", "delete", "dev", INTERFACE, "root")

    def lose(self, percent: int) -> None:
        """Let so many of the packets that the node sends vanish."""
        self.run("nft", f"{_LOSS_TABLE}; add rule inet loss sending {_LOSS_RULE.format(percent=percent)}")

    def num_lost(self) -> int:
        """Return how many packets have vanished since `lose` was called."""
        [rules] = re.findall(r"counter packets (\d+)", self.run("nft", "list", "table", "inet", "loss").stdout)
        return int(rules)

    def lose_nothing(self) -> None:
        self.run("nft", "delete table inet loss")

    def end(self) -> None:
        """Turn the machine off."""
        self.holder.kill()
        self.holder.wait()


@contextlib.contextmanager
def nodes(count: int, *, shared: Sequence[Path] = (), hosts: str = "127.0.1.1") -> Iterator[list[Node]]:
    """Start nodes, numbered from 1. Each has an empty `/tmp` and `/dev/shm`; other folders are those of this machine.

    shared: folders below `/tmp` that all nodes have. hosts: the address for which `/etc/hosts` has the node's name;
    Debian's installer writes 127.0.1.1.
    """
    with contextlib.ExitStack() as stack:
        switch = _held(stack, "--net")[1]
        subprocess.run(_in_network(switch, "ip", "link", "add", "switch", "type", "bridge"), check=True)
        subprocess.run(_in_network(switch, "ip", "link", "set", "switch", "up"), check=True)
        yield [_node(stack, number + 1, switch, shared, hosts) for number in range(count)]


def _held(stack: contextlib.ExitStack, *namespaces: str) -> tuple[subprocess.Popen, int]:
    """Start a process that sleeps in new namespaces; return its holder and its id."""
    holder = subprocess.Popen(["unshare", *namespaces, "--fork", "--kill-child", "sleep", "infinity"])
    stack.callback(holder.wait)
    stack.callback(holder.kill)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    while not (line := children.read_text().split()) or Path(f"/proc/{line[0]}/comm").read_text() != "sleep\n":
        assert holder.poll() is None, "unshare ended"
        time.sleep(0.01)
    return holder, int(line[0])


def _node(stack: contextlib.ExitStack, number: int, switch: int, shared: Sequence[Path], hosts: str) -> Node:
    holder, init = _held(stack, "--net", "--mount", "--pid", "--ipc", "--uts", "--mount-proc")
    node, port = Node(number, holder, init), f"port{number}"
    link = ("ip", "link", "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", str(init))
    subprocess.run(_in_network(switch, *link), check=True)
    subprocess.run(_in_network(switch, "ip", "link", "set", port, "master", "switch", "up"), check=True)
    node.run("sh", "-ec", _SET_UP, "sh", node.name, node.address, hosts, *shared)
    return node


# Shared folders are held elsewhere while `/tmp` becomes the node's own.
_SET_UP = f"""
name=$1 address=$2 hosts=$3; shift 3
hostname $name
ip link set lo up
ip address add $address/24 dev {INTERFACE}
ip link set {INTERFACE} up
mount -t tmpfs none /mnt
printf '127.0.0.1 localhost\\n%s %s\\n' $hosts $name > /mnt/hosts
mount --bind /mnt/hosts /etc/hosts
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir /mnt/$number
    mount --bind "$folder" /mnt/$number
done
mount -t tmpfs none /tmp
mount -t tmpfs -o size=2g none /dev/shm
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount --move /mnt/$number "$folder"
done
"""


def _in_network(process: int, *words: str) -> list[str]:
    return ["nsenter", f"--target={process}", "--net", "--", *words]
