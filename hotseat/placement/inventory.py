"""The inventory that roles are placed on: nodes in order, each with devices of one kind, grouped into pools.

Global device ids run over the nodes in order. A node may have no devices (a CPU node).
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hotseat.errors import PlacementError
from hotseat.placement.role_names import did_you_mean, nearest

DEFAULT_POOL = "cluster"  # pool of every node; ranks count devices, or nodes if there are no devices
NODE_POOL = "node"  # pool of every node; ranks always count nodes
MAX_DEVICES = 1_000_000
RESERVED_POOLS = (DEFAULT_POOL, NODE_POOL)


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """A kind of device. Its memory is the total that a process sees, which is less than the advertised size."""

    name: str
    memory_gib: float | None = None

    def __str__(self) -> str:
        return self.name or "device"


UNKNOWN_KIND = DeviceKind("")

KNOWN_KINDS: dict[str, DeviceKind] = {
    name.lower(): DeviceKind(name, memory_gib)
    for name, memory_gib in (
        ("A10", 22.0),
        ("A10G", 22.0),
        ("A40", 44.5),
        ("A100-40G", 39.5),
        ("A100-80G", 80.0),
        ("A6000", 47.5),
        ("A800-80G", 80.0),
        ("B200", 178.0),
        ("GH200-96G", 94.5),
        ("H20", 95.0),
        ("H100-80G", 79.5),
        ("H100-94G", 93.5),
        ("H200", 139.0),
        ("H800-80G", 79.5),
        ("L4", 22.0),
        ("L40S", 44.5),
        ("MI300X", 191.5),
        ("RTX3090", 23.5),
        ("RTX4090", 23.5),
        ("RTX5090", 31.5),
        ("T4", 14.5),
        ("V100-16G", 15.5),
        ("V100-32G", 31.5),
    )
}
for _short in ("3090", "4090", "5090"):
    KNOWN_KINDS[_short] = KNOWN_KINDS[f"rtx{_short}"]
# Names without a memory that mean one kind; H100-94G is the NVL alone. A100 and V100 are sold with two memories.
for _short in ("A800-80G", "GH200-96G", "H100-80G", "H800-80G"):
    KNOWN_KINDS[_short.partition("-")[0].lower()] = KNOWN_KINDS[_short.lower()]


@dataclass(frozen=True, slots=True)
class Node:
    """One machine."""

    rank: int
    pool: str = DEFAULT_POOL
    num_devices: int = 0
    device_kind: DeviceKind = UNKNOWN_KIND
    host_memory_gib: float | None = None
    env: tuple[tuple[str, str], ...] = ()  # environment variables of every process on this node


@dataclass(frozen=True, slots=True)
class NodePool:
    """A named pool of nodes as the config describes it: its nodes, and the environment variables of each of them.

    With `ignore_devices`, ranks in the pool count nodes even if the nodes have devices.
    """

    label: str
    node_ranks: tuple[int, ...]
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    ignore_devices: bool = False


@dataclass(frozen=True, slots=True)
class Inventory:
    """Nodes in rank order. `by_node` names the pools whose selections count nodes although they have devices."""

    nodes: tuple[Node, ...]
    by_node: tuple[str, ...] = ()
    first_devices: tuple[int, ...] = field(init=False, repr=False, compare=False)  # global id of each node's device 0
    num_devices: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        first_devices = list(itertools.accumulate((node.num_devices for node in self.nodes), initial=0))
        object.__setattr__(self, "num_devices", first_devices.pop())
        object.__setattr__(self, "first_devices", tuple(first_devices))

    @classmethod
    def parse(cls, text: str) -> Inventory:
        """Parse an inventory's short form.

        `4x8xA100-80G` is 4 nodes of 8 devices, `2x4` devices of unknown kind, `2x8x24G` devices of 24 GiB, `2xcpu` two
        nodes without devices. `+1024G` after any of them is the host memory of each node. Several are joined by commas,
        each may be a named pool: `a800=8x8xA800-80G+2T,sim=4x8x4090`.
        """
        nodes: list[Node] = []
        labels: set[str] = set()
        for item in text.split(","):
            label, has_label, shape = item.strip().rpartition("=")
            if has_label:
                _check_label(label)
                if label in labels:
                    raise PlacementError(f"inventory {text!r}: pool {label!r} is given twice: give each pool one name")
                labels.add(label)
            shape, has_host, host = shape.partition("+")
            num_nodes, num_devices, kind = _parse_shape(shape.strip(), text)
            host_gib = _parse_host(host.strip(), text) if has_host else None
            for _ in range(num_nodes):
                pool = label if has_label else DEFAULT_POOL
                nodes.append(Node(len(nodes), pool, num_devices, kind, host_memory_gib=host_gib))
        return cls(tuple(nodes))

    @property
    def num_nodes(self) -> int:
        return len(self.nodes)

    @property
    def pools(self) -> tuple[str, ...]:
        """Named pools, in order of their first node, without the reserved ones."""
        return tuple(dict.fromkeys(node.pool for node in self.nodes if node.pool != DEFAULT_POOL))

    def devices_of(self, node: int) -> range:
        """Return the global ids of a node's devices."""
        return range(self.first_devices[node], self.first_devices[node] + self.nodes[node].num_devices)

    def node_of(self, device: int) -> int:
        """Return the node of a global device id."""
        return bisect_right(self.first_devices, device) - 1

    def pool_nodes(self, label: str) -> tuple[int, ...]:
        """Return the ranks of a pool's nodes; the reserved pools hold every node."""
        if label in RESERVED_POOLS:
            return tuple(range(self.num_nodes))
        ranks = tuple(node.rank for node in self.nodes if node.pool == label)
        if not ranks:
            known = (*self.pools, *RESERVED_POOLS)
            hint = did_you_mean(label, known)
            raise PlacementError(f"unknown pool {label!r}: {hint}the pools are {', '.join(known)}")
        return ranks

    def places_by_node(self, label: str) -> bool:
        """Return whether ranks in this pool count nodes: it has no devices, or the config says so."""
        if label == NODE_POOL or label in self.by_node:
            return True
        return all(self.nodes[rank].num_devices == 0 for rank in self.pool_nodes(label))

    def with_pools(self, pools: Sequence[NodePool]) -> Inventory:
        """Return an inventory of the same nodes, assigned to pools and with their environment variables."""
        nodes = list(self.nodes)
        owner: dict[int, str] = {}
        labels: set[str] = set()
        for pool in pools:
            _check_label(pool.label)
            if pool.label in labels:
                raise PlacementError(f"pool {pool.label!r} is given twice: give each pool one name")
            labels.add(pool.label)
            for rank in pool.node_ranks:
                if rank in owner:
                    raise PlacementError(
                        f"node {rank} is in pool {owner[rank]!r} and in pool {pool.label!r}: leave it in one of them"
                    )
                owner[rank] = pool.label
                variables = dict(nodes[rank].env) | dict(pool.env.get(rank, {}))
                nodes[rank] = replace(nodes[rank], pool=pool.label, env=tuple(sorted(variables.items())))
            for rank in pool.env:
                if rank not in pool.node_ranks:
                    raise PlacementError(
                        f"pool {pool.label!r} sets environment variables for node {rank}, which it does not have"
                        f" (its nodes: {format_ranks(pool.node_ranks)})"
                    )
        by_node = {pool.label for pool in pools if pool.ignore_devices} | set(self.by_node)
        return Inventory(tuple(nodes), tuple(sorted(by_node)))

    def __str__(self) -> str:
        """Return `4 nodes x 8 A100-80G`, several sorts of nodes joined by `+`, each with its host memory if known."""
        counts = Counter((node.num_devices, node.device_kind, node.host_memory_gib) for node in self.nodes)
        texts = []
        for (num_devices, kind, host_gib), num_nodes in counts.items():
            what = f"{num_devices} {kind if kind.name else 'devices'}" if num_devices else "cpu"
            if kind.name[:1].isdigit():  # the kind is only a memory size
                what = f"{num_devices} devices of {kind}"
            host = "" if host_gib is None else f" with {host_gib:,g} GiB of host memory"
            texts.append(f"{num_nodes} node{'s' * (num_nodes > 1)} x {what}{host}")
        return " + ".join(texts)


def parse_node_ranks(text: str | int, num_nodes: int) -> tuple[int, ...]:
    """Parse node ranks as a pool's config writes them: `all`, `3`, `0-7`, `0-1,4-5`."""
    if str(text).strip() == "all":
        return tuple(range(num_nodes))
    ranks: list[int] = []
    for item in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", item)
        if match is None:
            raise PlacementError(f"node ranks {text!r}: write all, 3, 0-7 or 0-1,4-5")
        ranks.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not ranks or ranks != sorted(set(ranks)):
        raise PlacementError(f"node ranks {text!r}: they must ascend, each once, as in 0-1,4-5")
    if ranks[-1] >= num_nodes:
        raise PlacementError(f"node ranks {text!r}: there is no node {ranks[-1]}, nodes are 0-{num_nodes - 1}")
    return tuple(ranks)


def ranges(ranks: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Join ascending numbers into inclusive ranges: 0, 1, 2, 5 becomes (0, 2), (5, 5)."""
    joined: list[tuple[int, int]] = []
    for rank in ranks:
        if joined and rank == joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], rank)
        else:
            joined.append((rank, rank))
    return tuple(joined)


def format_ranges(spans: Iterable[tuple[int, int]]) -> str:
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def format_ranks(ranks: Iterable[int]) -> str:
    """Format numbers as ranges: 0, 1, 2, 5 becomes `0-2,5`."""
    return format_ranges(ranges(ranks))


def _check_label(label: str) -> None:
    if label in RESERVED_POOLS:
        raise PlacementError(f"pool name {label!r} is reserved for all nodes: choose another name")
    if not re.fullmatch(r"[\w.-]+", label):
        raise PlacementError(f"pool name {label!r}: use letters, digits, '.', '_' and '-'")


def _parse_shape(shape: str, whole: str) -> tuple[int, int, DeviceKind]:
    """Parse `4x8xA100-80G` into the number of nodes, the devices per node, and their kind."""
    cpu = re.fullmatch(r"(?:(\d+)x)?cpu", shape, re.IGNORECASE)
    if cpu:
        num_nodes = int(cpu[1] or 1)
        if num_nodes < 1:
            raise PlacementError(f"inventory {whole!r}: {shape!r} has no nodes: write cpu or 2xcpu")
        if num_nodes > MAX_DEVICES:
            raise PlacementError(f"inventory {whole!r}: {shape!r} is more than {MAX_DEVICES:,} nodes: check the number")
        return num_nodes, 0, UNKNOWN_KIND
    match = re.fullmatch(r"(\d+)x(\d+)(?:x(.+))?", shape)
    if match is None:
        short = re.fullmatch(r"(\d+)(?:x([A-Za-z].*))?", shape)
        meant = f"1x{shape}" if short else "4x8xA100-80G"
        raise PlacementError(
            f"inventory {whole!r}: cannot read {shape!r}: write NODESxDEVICES or NODESxDEVICESxKIND,"
            f" for instance {meant}, or cpu"
        )
    num_nodes, num_devices = int(match[1]), int(match[2])
    if num_nodes * num_devices > MAX_DEVICES:
        raise PlacementError(f"inventory {whole!r}: {shape!r} is more than {MAX_DEVICES:,} devices: check the numbers")
    if num_nodes < 1 or num_devices < 1:
        raise PlacementError(
            f"inventory {whole!r}: {shape!r} has no devices: write at least 1x1, or cpu for a node without devices"
        )
    return num_nodes, num_devices, _parse_kind(match[3], whole) if match[3] else UNKNOWN_KIND


def _parse_host(text: str, whole: str) -> float:
    """Parse the host memory of a node, `1024G` or `2T`, into GiB."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(G|T)(?:i?B)?", text, re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise PlacementError(
            f"inventory {whole!r}: cannot read {text!r} as the host memory of a node: write it in GiB or TiB, for"
            f" instance 2x8xH100-80G+1024G or 2x8xH100-80G+1T"
        )
    return float(match[1]) * (1024 if match[2].upper() == "T" else 1)


def _parse_kind(text: str, whole: str) -> DeviceKind:
    known = KNOWN_KINDS.get(text.lower())
    if known:
        return known
    memory = re.fullmatch(r"(?:(.+)-)?(\d+(?:\.\d+)?)G(?:i?B)?", text, re.IGNORECASE)
    if memory and float(memory[2]) > 0:
        return DeviceKind(text, float(memory[2]))
    variants = [kind.name for key, kind in KNOWN_KINDS.items() if key.startswith(text.lower() + "-")]
    if variants:
        raise PlacementError(
            f"inventory {whole!r}: {text} comes with different memories: write {' or '.join(variants)}"
        )
    guess = nearest(text.lower(), tuple(KNOWN_KINDS))
    hint = f"did you mean {KNOWN_KINDS[guess].name}? " if guess else ""
    raise PlacementError(
        f"inventory {whole!r}: unknown device kind {text!r}: {hint}give its memory ({text}-24G or just 24G) or leave it"
        f" out; known are {', '.join(dict.fromkeys(kind.name for kind in KNOWN_KINDS.values()))}"
    )
