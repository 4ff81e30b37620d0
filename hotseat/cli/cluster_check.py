"""`hotseat check --cluster`: its nodes, links and sums are here, the runs that prove it in `cluster_runs`."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat.checks.findings import Finding
from hotseat.checks.nodes import MOST_CLOCK_SKEW_S
from hotseat.errors import HotseatError, UserError
from hotseat.placement.locate import Process
from hotseat.words import quantity

if TYPE_CHECKING:
    from hotseat.cluster import Cluster
    from hotseat.cluster.links import Link
    from hotseat.cluster.node_facts import NodeFacts

_TIMEOUT_S = 300.0
_SLOW = 0.25  # of the fastest link: a link that has less is named
MIB = 2**20


def cluster_findings(folder: str) -> Iterator[Finding]:
    """Check the cluster at RAY_ADDRESS. folder: shared by its nodes, for the files of short runs."""
    from hotseat.cli.cluster_runs import run_findings
    from hotseat.cluster import Cluster

    if not os.environ.get("RAY_ADDRESS"):
        raise UserError("RAY_ADDRESS is not set: start Ray on the nodes (docs/multi-node.md), and set it to HOST:PORT")
    place = Path(folder).absolute() / time.strftime("check-%Y%m%d-%H%M%S")
    place.mkdir(parents=True)
    with Cluster(timeout_s=_TIMEOUT_S) as cluster:
        facts = yield from node_findings(cluster, place)
        everyone = [Process(rank, node.rank) for rank, node in enumerate(cluster.nodes)]
        devices = [(node, device) for node in cluster.nodes for device in cluster.devices_of(node.rank)]
        on_devices = [Process(rank, node.rank, (device,)) for rank, (node, device) in enumerate(devices)]
        cluster.reserve([*everyone, *on_devices])
        yield from link_findings(cluster, everyone)
        if on_devices:
            yield from sum_findings(cluster, on_devices, all(each.has_gpu for each in facts.values()))
    if on_devices:
        yield from run_findings(place, [process.node for process in on_devices])


def node_findings(cluster: Cluster, place: Path) -> Generator[Finding, None, dict[int, NodeFacts]]:
    """Compare each node with the driver's, and return what each has."""
    asked_s = time.time()
    facts = cluster.facts([node.rank for node in cluster.nodes], [str(place)])
    answered_s = time.time()
    own = facts[cluster.home]
    for node in cluster.nodes:
        theirs = facts[node.rank]
        advice = [
            f"has {name} {theirs.versions[name]}, the driver's node {version}: install the same"
            for name, version in own.versions.items()
            if theirs.versions[name] != version
        ]
        if max(asked_s - theirs.clock_s, theirs.clock_s - answered_s) > MOST_CLOCK_SKEW_S:
            advice.append("its clock is apart from the driver's: set it by NTP")
        is_shared = theirs.paths[str(place)] is not None
        if not is_shared:
            advice.append(f"does not see {place}: give a folder that all nodes share")
        devices = quantity(node.num_devices, "device" if theirs.has_gpu else "logical device")
        text = f"{node.hostname} {node.address}, {devices}"
        yield Finding(f"node {node.rank}", text, "; ".join(advice), stops=bool(advice))
    return facts


def link_findings(cluster: Cluster, processes: Sequence[Process]) -> Iterator[Finding]:
    """Measure the link of every pair of nodes, pairs without a common node at the same time."""
    from hotseat.cluster.links import LinkWorker

    if len(processes) < 2:
        return
    group = cluster.launch("links", LinkWorker, args=("cpu", _TIMEOUT_S), processes=processes)
    links: dict[tuple[int, int], Link] = {}
    try:
        for first, second in pairs(len(processes)):
            answers = group.call(LinkWorker.link, first, second)
            links[first, second] = next(answer for answer in answers if answer is not None)
    except HotseatError as error:
        yield Finding("links", "failed", f"{error}", stops=True)
        return
    finally:
        group.close()
    fastest = max(link.bytes_per_s for link in links.values())
    for (first, second), link in links.items():
        is_slow = link.bytes_per_s < _SLOW * fastest
        text = f"{link.bytes_per_s / MIB:,.0f} MiB/s, {link.latency_s * 1e6:,.0f} us by gloo"
        advice = f"less than {_SLOW:.0%} of the fastest link: look at cables, switch and interfaces" if is_slow else ""
        yield Finding(f"nodes {first} and {second}", text, advice)


def pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((first, second) for first in range(count) for second in range(first + 1, count))


def sum_findings(cluster: Cluster, processes: Sequence[Process], has_gpus: bool) -> Iterator[Finding]:
    """Add up a block over all devices."""
    from hotseat.cluster.links import LinkWorker

    device = "cuda" if has_gpus else "cpu"
    try:
        group = cluster.launch("sums", LinkWorker, args=(device, _TIMEOUT_S), processes=processes)
        speeds = group.call(LinkWorker.all_reduce)
        group.close()
    except HotseatError as error:
        yield Finding("sum over all devices", "failed", f"{error}", stops=True)
        return
    how = "NCCL" if device == "cuda" else "gloo, on logical devices"
    yield Finding("sum over all devices", f"right on {len(speeds)}, {min(speeds) / MIB:,.0f} MiB/s by {how}")
