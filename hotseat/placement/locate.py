"""Assignment of processes: selections in, the node and devices of each process of each role out."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hotseat.errors import PlacementError, TooFewDevicesError
from hotseat.placement.inventory import DEFAULT_POOL, MAX_DEVICES, UNKNOWN_KIND, Inventory, Node, format_ranks
from hotseat.placement.selection import (
    CpuProcesses,
    DeviceBlocks,
    Elsewhere,
    InPools,
    RankSelection,
    SameAs,
    Selection,
    check_divides,
)
from hotseat.registry.roles import role_entry
from hotseat.words import quantity

Where = Literal["devices", "cpu", "elsewhere"]


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a group: its rank, the node that it runs on, and the devices that it sees.

    Devices are numbered through the whole cluster, and in order.
    """

    rank: int
    node: int = 0
    devices: tuple[int, ...] = ()
    fraction: float = 1.0  # share of each of its devices; below 1 if processes of a role share a device


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RoleRequest:
    """A role to be located. `engine_size` is an engine's tensor-parallel size, None for other roles."""

    role: str
    selection: Selection
    engine_size: int | None = None
    num_procs: int | None = None


@dataclass(frozen=True, slots=True)
class Located:
    """The processes and devices that were assigned to a role."""

    role: str
    where: Where
    processes: tuple[Process, ...]
    devices: tuple[int, ...]  # each once, in process order


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _Spots:
    """Devices or nodes of a role in order, cut into pieces; each piece gets its own processes."""

    where: Where
    pieces: tuple[tuple[int, ...], ...]
    procs: tuple[int | None, ...]  # processes that the selection demands on each piece; None: no demand

    @property
    def items(self) -> tuple[int, ...]:
        return tuple(item for piece in self.pieces for item in piece)


def locate(inventory: Inventory, requests: Sequence[RoleRequest]) -> dict[str, Located]:
    """Assign the processes of every role. Raises PlacementError where a selection cannot be satisfied."""
    return dict(_located(inventory, *((r.role, r.selection, r.engine_size, r.num_procs) for r in requests)))


@functools.lru_cache(maxsize=4)  # a search for token budgets plans with the same places again and again
def _located(inventory: Inventory, *asked: tuple[str, Selection, int | None, int | None]) -> dict[str, Located]:
    requests = [RoleRequest(*each) for each in asked]
    by_role = {request.role: request for request in requests}
    targets = {request.role: _follow(request, by_role) for request in requests}
    spots: dict[str, _Spots] = {}
    for request in requests:
        pools, selection = _split_pools(request.selection)
        if isinstance(selection, RankSelection):
            spots[request.role] = _spots_of_ranks(inventory, pools, selection, request.role)
        elif isinstance(selection, CpuProcesses):
            spots[request.role] = _spots_of_cpu(inventory, pools, selection)
        elif isinstance(selection, Elsewhere):
            spots[request.role] = _Spots("elsewhere", (), ())
    spots |= _pack(inventory, [r for r in requests if isinstance(_split_pools(r.selection)[1], DeviceBlocks)], spots)
    located: dict[str, Located] = {}
    for request in sorted(requests, key=lambda request: targets[request.role] != request.role):
        target = targets[request.role]
        own = (
            spots[target]
            if target == request.role
            else _shared_spots(request.role, target, spots[target], located[target])
        )
        processes = _processes(inventory, request, own, target)
        devices = own.items if own.where == "devices" else ()
        located[request.role] = Located(request.role, own.where, processes, devices)
    return {request.role: located[request.role] for request in requests}


def _shared_spots(role: str, target: str, spots: _Spots, located: Located) -> _Spots:
    """Return the devices of the role that `@role` leads to; for a role without devices, the nodes of its processes."""
    if spots.where == "elsewhere":
        raise PlacementError(
            f"{role}: @{target} has no devices to share, {target} is served elsewhere; place {role} itself"
        )
    if spots.where == "cpu":
        return _Spots("cpu", (tuple(process.node for process in located.processes),), (None,))
    return _Spots("devices", spots.pieces, (None,) * len(spots.pieces))


def _follow(request: RoleRequest, by_role: Mapping[str, RoleRequest]) -> str:
    """Follow `@role` to the role that has a selection of its own."""
    path = [request.role]
    while isinstance(selection := by_role[path[-1]].selection, SameAs):
        if selection.role not in by_role:
            raise PlacementError(
                f"{path[-1]}: @{selection.role} is not placed: place {selection.role}, or give {path[-1]} devices"
                f" of its own (placed are {', '.join(by_role)})"
            )
        if selection.role in path:
            cycle = [*path[path.index(selection.role) :], selection.role]
            raise PlacementError(
                f"placement goes in a circle: {' -> '.join('@' + role for role in cycle)[1:]}:"
                f" give one of {', '.join(cycle[:-1])} devices of its own"
            )
        path.append(selection.role)
    return path[-1]


def _split_pools(selection: Selection) -> tuple[tuple[str, ...], Selection]:
    if isinstance(selection, InPools):
        return selection.pools, selection.selection
    return (DEFAULT_POOL,), selection


def _nodes(inventory: Inventory, pools: Sequence[str]) -> tuple[int, ...]:
    return tuple(rank for label in pools for rank in inventory.pool_nodes(label))


def _spots_of_ranks(inventory: Inventory, pools: tuple[str, ...], selection: RankSelection, role: str) -> _Spots:
    by_node = [inventory.places_by_node(label) for label in pools]
    if any(by_node) and not all(by_node):
        raise PlacementError(
            f"{role}: pools {', '.join(pools)} mix nodes with and without devices, so ranks have no single meaning:"
            f" name pools of one sort"
        )
    nodes = _nodes(inventory, pools)
    available = nodes if by_node[0] else tuple(device for rank in nodes for device in inventory.devices_of(rank))
    unit = "node" if by_node[0] else "device"
    pieces: list[tuple[int, ...]] = []
    procs: list[int | None] = []
    for segment in selection.segments:
        if segment.ranks is None:
            piece = available
        else:
            if segment.ranks.last >= len(available):
                raise _out_of_range(role, selection, segment.ranks.last, len(available), unit, pools)
            piece = available[segment.ranks.first : segment.ranks.last + 1]
        if segment.procs is not None:
            check_divides(len(piece), len(segment.procs), f"{role}: {segment}")
        pieces.append(piece)
        procs.append(None if segment.procs is None else len(segment.procs))
    return _Spots("cpu" if by_node[0] else "devices", tuple(pieces), tuple(procs))


def _out_of_range(
    role: str, selection: RankSelection, rank: int, count: int, unit: str, pools: tuple[str, ...]
) -> PlacementError:
    where = "the inventory" if pools == (DEFAULT_POOL,) else f"pool {','.join(pools)}"
    plural = unit if count == 1 else f"{unit}s"
    text = f"{role}: rank {rank} is out of range: {where} has {count} {plural}, ranks 0-{count - 1}"
    if selection.from_int and rank >= 60:
        minutes, seconds = divmod(rank, 60)
        # Not a TooFewDevicesError: more devices would only hide this mistake.
        return PlacementError(
            f"{text}; YAML 1.1 reads an unquoted {minutes}:{seconds} as the number {rank}:"
            f' if that was meant, write "{minutes}:{seconds}" in quotes'
        )
    return TooFewDevicesError(text)


def _spots_of_cpu(inventory: Inventory, pools: tuple[str, ...], selection: CpuProcesses) -> _Spots:
    """Distribute CPU processes evenly, over nodes without devices if there are any: their host memory is free."""
    nodes = _nodes(inventory, pools)
    nodes = tuple(rank for rank in nodes if inventory.nodes[rank].num_devices == 0) or nodes
    count = selection.count
    chosen = tuple(nodes[index * len(nodes) // count] for index in range(count))
    return _Spots("cpu", (chosen,), (count,))


def _pack(inventory: Inventory, requests: Sequence[RoleRequest], placed: Mapping[str, _Spots]) -> dict[str, _Spots]:
    """Pack blocks onto nodes, first fit: in the order of the requests or, if that fails, the largest blocks first."""
    claimed = {device for spots in placed.values() if spots.where == "devices" for device in spots.items}
    largest_first = sorted(requests, key=lambda request: -_blocks(request).size)
    failed = None
    for order in (requests, largest_first):
        packed, failed = _first_fit(inventory, order, claimed)
        if failed is None:
            return packed
    assert failed is not None
    raise TooFewDevicesError(_does_not_pack(inventory, requests, placed, failed))


def _blocks(request: RoleRequest) -> DeviceBlocks:
    blocks = _split_pools(request.selection)[1]
    assert isinstance(blocks, DeviceBlocks)
    return blocks


def _first_fit(
    inventory: Inventory, requests: Sequence[RoleRequest], claimed: set[int]
) -> tuple[dict[str, _Spots], RoleRequest | None]:
    """Return the packed blocks, and the first request for which there was no room."""
    free = [
        [device for device in inventory.devices_of(rank) if device not in claimed]
        for rank in range(inventory.num_nodes)
    ]
    packed: dict[str, _Spots] = {}
    for request in requests:
        blocks = _blocks(request)
        nodes = _nodes(inventory, _split_pools(request.selection)[0])
        fits_one = any(inventory.nodes[rank].num_devices >= blocks.size for rank in nodes)
        pieces: list[tuple[int, ...]] = []
        start = 0  # nodes before this one have too little room, and room never grows
        for _ in range(blocks.count):
            if fits_one:
                while start < len(nodes) and len(free[nodes[start]]) < blocks.size:
                    start += 1
                piece = free[nodes[start]][: blocks.size] if start < len(nodes) else []
            else:
                piece = _across_nodes(inventory, nodes, free, blocks.size)
            if not piece:
                return packed, request
            taken = set(piece)
            for rank in {inventory.node_of(device) for device in piece}:
                free[rank] = [device for device in free[rank] if device not in taken]
            pieces.append(tuple(piece))
        packed[request.role] = _Spots("devices", tuple(pieces), (None,) * len(pieces))
    return packed, None


def _across_nodes(inventory: Inventory, nodes: Sequence[int], free: list[list[int]], size: int) -> list[int]:
    """Choose devices for a block larger than any node: whole free nodes, and the first node with room for the rest."""
    piece: list[int] = []
    used: set[int] = set()
    for rank in nodes:
        whole = inventory.nodes[rank].num_devices
        if whole and len(free[rank]) == whole and whole <= size - len(piece):
            piece.extend(free[rank])
            used.add(rank)
    rest = size - len(piece)
    if rest == 0:
        return piece
    for rank in nodes:
        if rank not in used and len(free[rank]) >= rest:
            return sorted(piece + free[rank][:rest])
    return []


def _does_not_pack(
    inventory: Inventory, requests: Sequence[RoleRequest], placed: Mapping[str, _Spots], failed: RoleRequest
) -> str:
    pools = _split_pools(failed.selection)[0]
    nodes = set(_nodes(inventory, pools))
    where = "the inventory" if pools == (DEFAULT_POOL,) else f"pool {','.join(pools)}"
    total = sum(inventory.nodes[rank].num_devices for rank in nodes)
    here = [r for r in requests if set(_nodes(inventory, _split_pools(r.selection)[0])) & nodes]
    by_rank = {
        role: devices
        for role, spots in placed.items()
        if spots.where == "devices" and (devices := {d for d in spots.items if inventory.node_of(d) in nodes})
    }
    claimed = set().union(*by_rank.values())
    need = len(claimed) + sum(_blocks(r).count * _blocks(r).size for r in here)
    sums = [f"{role} {len(devices)} (by rank)" for role, devices in by_rank.items()]
    sums += [f"{r.role} {_blocks(r).count * _blocks(r).size} ({_blocks(r)})" for r in here]
    size = max((inventory.nodes[rank].num_devices for rank in nodes), default=0)
    if not size:
        return f"{failed.role}: {failed.selection} needs devices and {where} has none: write cpu*1"
    enough = _enough_nodes(here, size, len(claimed))
    fix = f"{enough} node{'s' * (enough > 1)} of {size} devices would do"
    others = [*by_rank, *(request.role for request in here if request.role != failed.role)]
    other = "actor" if "actor" in others else others[0] if others else None
    share = f"{fix}; or let roles share devices, for instance {failed.role}: '@{other}'" if other else fix
    kept = (inventory.nodes[rank] for rank in sorted(nodes))
    machines = Inventory(tuple(replace(node, rank=rank, host_memory_gib=None) for rank, node in enumerate(kept)))
    if need > total:
        has = f"{where} has {total} ({machines})"
        return f"the roles need {need} devices and {has}: {', '.join(sums)}; {share}"
    return (
        f"{failed.role}: there is no room for {failed.selection} in {where} ({machines}): the roles need"
        f" {need} of {total} devices ({', '.join(sums)}), and a block of {_blocks(failed).size} must lie on one node;"
        f" {share}"
    )


def _enough_nodes(requests: Sequence[RoleRequest], size: int, num_claimed: int) -> int:
    """Return how many nodes of this size hold all requests, by trying to pack them."""
    bare = [RoleRequest(r.role, _blocks(r)) for r in requests]
    need = num_claimed + sum(_blocks(r).count * _blocks(r).size for r in requests)
    fewest = -(-need // size)
    if need > MAX_DEVICES:
        return fewest
    for count in itertools.count(fewest):
        hypothetical = Inventory(tuple(Node(rank, DEFAULT_POOL, size, UNKNOWN_KIND) for rank in range(count)))
        for order in (bare, sorted(bare, key=lambda request: -_blocks(request).size)):
            if _first_fit(hypothetical, order, set(range(num_claimed)))[1] is None:
                return count
    raise AssertionError("a node per block is always enough")


def _processes(inventory: Inventory, request: RoleRequest, spots: _Spots, target: str) -> tuple[Process, ...]:
    if spots.where == "elsewhere":
        return ()
    if spots.where == "cpu":
        return _cpu_processes(request, spots)
    size = request.engine_size
    demanded = [count for count in spots.procs if count is not None]
    if demanded:
        counts = [len(p) if n is None else n for p, n in zip(spots.pieces, spots.procs, strict=True)]
        _check_processes(request, spots, counts)
        layout = list(zip(spots.pieces, counts, strict=True))
    elif size is not None:
        layout = _engine_layout(request, spots, size, target)
    else:
        num_procs = request.num_procs or len(spots.items)
        check_divides(len(spots.items), num_procs, f"{request.role}: {request.selection}")
        layout = [(spots.items, num_procs)]
    processes: list[Process] = []
    for piece, count in layout:
        per_device = max(1, count // len(piece))
        width = max(1, len(piece) // count)
        for index in range(count):
            start = index // per_device * width
            devices = piece[start : start + width]
            node = _one_node(inventory, request, len(processes), devices)
            processes.append(Process(len(processes), node, devices, 1 / per_device))
    return tuple(processes)


def _cpu_processes(request: RoleRequest, spots: _Spots) -> tuple[Process, ...]:
    is_shared = isinstance(request.selection, SameAs)
    processes: list[Process] = []
    for piece, demanded in zip(spots.pieces, spots.procs, strict=True):
        count = demanded or (request.num_procs if len(spots.pieces) == 1 else None) or len(piece)
        if count < len(piece) and not is_shared:
            raise PlacementError(
                f"{request.role}: {request.selection} gives {count} processes {len(piece)} nodes: a process is on one"
                f" node, so ask for at least {len(piece)} processes"
            )
        processes += [Process(len(processes) + index, piece[index * len(piece) // count]) for index in range(count)]
    _check_number(request, len(processes))
    return tuple(processes)


def _check_number(request: RoleRequest, num_processes: int) -> None:
    if request.num_procs not in (None, num_processes):
        raise PlacementError(
            f"{request.role}: {request.selection} makes {num_processes} processes and {request.num_procs} are asked"
            " for: drop one of the two"
        )


def _check_processes(request: RoleRequest, spots: _Spots, counts: Sequence[int]) -> None:
    """Check that PROCS in the selection agree with the number of processes and the engine size of the role."""
    _check_number(request, sum(counts))
    if request.engine_size is None:
        return
    for piece, count in zip(spots.pieces, counts, strict=True):
        width = max(1, len(piece) // count)
        if width != request.engine_size:
            raise PlacementError(
                f"{request.role}: {request.selection} gives an engine {width} device{'s' * (width > 1)}, tensor"
                f" parallel size is {request.engine_size}: set"
                f" {role_entry(request.role).section}.tensor_parallel_size to {width} or write the ranks without"
                " processes"
            )


def _engine_layout(request: RoleRequest, spots: _Spots, size: int, target: str) -> list[tuple[tuple[int, ...], int]]:
    """Assign one process per engine of `size` devices: within each piece for blocks, else over all devices in order.

    A multiple of the devices is taken as so many engines on each.
    """
    role, num_devices = request.role, len(spots.items)
    per_device, rest = divmod(request.num_procs or num_devices, num_devices)
    is_multiple = size == 1 and per_device >= 1 and not rest
    if not is_multiple and request.num_procs is not None and request.num_procs * size != num_devices:
        raise PlacementError(_engines_do_not_match(request, size, num_devices, target))
    is_blocks = isinstance(_split_pools(request.selection)[1], DeviceBlocks)
    pieces = spots.pieces if is_blocks else (spots.items,)
    for piece in pieces:
        if len(piece) % size:
            what = "a block of" if is_blocks else "its"
            owner = target if target != role else role
            raise PlacementError(
                f"{role}: {what} {quantity(len(piece), 'device')} cannot be cut into engines of tensor parallel size"
                f" {size}: set {role_entry(role).section}.tensor_parallel_size to {_divisor_at_most(len(piece), size)},"
                f" or cluster.component_placement.{owner} to {'blocks' if is_blocks else 'a number of devices'} that"
                f" {size} divides"
            )
    return [(piece, len(piece) * per_device if is_multiple else len(piece) // size) for piece in pieces]


def _engines_do_not_match(request: RoleRequest, size: int, num_devices: int, target: str) -> str:
    role, num_engines = request.role, request.num_procs or 0
    section = role_entry(role).section
    owner = target if target != role else "its selection"
    why = "with colocated roles they must be equal" if target != role else "they must be equal"
    fixes = []
    if num_devices % size == 0:
        fixes.append(f"set {section}.num_engines to {num_devices // size}")
    if num_devices % num_engines == 0:
        fixes.append(f"{'' if fixes else 'set '}{section}.tensor_parallel_size to {num_devices // num_engines}")
    if not fixes:
        fixes.append(f"set {section}.num_engines to {num_devices} and {section}.tensor_parallel_size to 1")
    return (
        f"{role}: {quantity(num_engines, 'engine')} x tp {size} {'needs' if num_engines == 1 else 'need'}"
        f" {quantity(num_engines * size, 'device')}, {owner} has {num_devices}:"
        f" {why}; {' or '.join(fixes)}"
    )


def _divisor_at_most(number: int, limit: int) -> int:
    return max(n for n in range(1, min(number, limit) + 1) if number % n == 0)


def _one_node(inventory: Inventory, request: RoleRequest, rank: int, devices: tuple[int, ...]) -> int:
    first = inventory.node_of(min(devices))
    if inventory.node_of(max(devices)) == first:
        return first
    nodes = sorted({inventory.node_of(device) for device in devices})
    sizes = sorted({inventory.nodes[node].num_devices for node in nodes})
    if request.engine_size is not None:
        fits = _divisor_at_most(sizes[0], min(request.engine_size, len(devices) - 1))
        raise PlacementError(
            f"{request.role}: engine {rank} of tensor parallel size {request.engine_size} would span nodes"
            f" {format_ranks(nodes)} (devices {format_ranks(devices)}): an engine stays on one node;"
            f" set {role_entry(request.role).section}.tensor_parallel_size to {fits}, or choose ranks so that"
            f" {request.engine_size} in a row are on one"
        )
    raise PlacementError(
        f"{request.role}: process {rank} would have devices {format_ranks(devices)} on nodes {format_ranks(nodes)}:"
        f" a process stays on one node; choose ranks so that {len(devices)} in a row are on one node"
    )
