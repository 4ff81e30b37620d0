"""`hotseat check --cluster`: measures and proves a cluster, by links, sums and short runs over all of its devices."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat.checks.machine import Finding
from hotseat.checks.nodes import MOST_CLOCK_SKEW_S
from hotseat.errors import HotseatError, UserError
from hotseat.placement.locate import Process

if TYPE_CHECKING:
    from hotseat.cluster import Cluster
    from hotseat.cluster.links import Link

_TIMEOUT_S = 300.0
_SLOW = 0.25  # of the median link: a link that has less is named
_STEPS = 2
MIB = 2**20


def cluster_findings(folder: str) -> Iterator[Finding]:
    """Check the cluster at RAY_ADDRESS. folder: shared by its nodes, for the files of short runs."""
    from hotseat.cluster import Cluster

    if not os.environ.get("RAY_ADDRESS"):
        raise UserError("RAY_ADDRESS is not set: start Ray on the nodes (docs/multi-node.md), and set it to HOST:PORT")
    place = Path(folder).absolute() / time.strftime("check-%Y%m%d-%H%M%S")
    place.mkdir(parents=True)
    with Cluster(timeout_s=_TIMEOUT_S) as cluster:
        yield from node_findings(cluster, place)
        everyone = [Process(rank, node.rank) for rank, node in enumerate(cluster.nodes)]
        devices = [(node, device) for node in cluster.nodes for device in cluster.devices_of(node.rank)]
        on_devices = [Process(rank, node.rank, (device,)) for rank, (node, device) in enumerate(devices)]
        cluster.reserve([*everyone, *on_devices])
        yield from link_findings(cluster, everyone)
        if on_devices:
            yield from sum_findings(cluster, on_devices)
        num_devices = len(on_devices)
    if num_devices:
        yield from run_findings(place, num_devices)


def node_findings(cluster: Cluster, place: Path) -> Iterator[Finding]:
    """Compare each node with the driver's."""
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
        text = f"{node.hostname} {node.address}, {node.num_devices} devices"
        yield Finding(f"node {node.rank}", text, "; ".join(advice), stops=bool(advice))


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
    speeds = sorted(link.bytes_per_s for link in links.values())
    median = speeds[len(speeds) // 2]
    for (first, second), link in links.items():
        is_slow = link.bytes_per_s < _SLOW * median
        text = f"{link.bytes_per_s / MIB:,.0f} MiB/s, {link.latency_s * 1e6:,.0f} us by gloo"
        advice = f"less than {_SLOW:.0%} of the median of all links" if is_slow else ""
        yield Finding(f"nodes {first} and {second}", text, advice)


def pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((first, second) for first in range(count) for second in range(first + 1, count))


def sum_findings(cluster: Cluster, processes: Sequence[Process]) -> Iterator[Finding]:
    """Add up a block over all devices."""
    from hotseat.cluster.links import LinkWorker
    from hotseat.planning.config_plan import are_devices_logical

    device = "cpu" if are_devices_logical(cluster) else "cuda"
    try:
        group = cluster.launch("sums", LinkWorker, args=(device, _TIMEOUT_S), processes=processes)
        speeds = group.call(LinkWorker.all_reduce)
        group.close()
    except HotseatError as error:
        yield Finding("sum over all devices", "failed", f"{error}", stops=True)
        return
    how = "NCCL" if device == "cuda" else "gloo, on logical devices"
    yield Finding("sum over all devices", f"right on {len(speeds)}, {min(speeds) / MIB:,.0f} MiB/s by {how}")


RUNS = {
    "SFT on one device": ("sft", ["cluster.component_placement.actor=0", "cluster.num_nodes=1"]),
    "SFT by FSDP2 on all": ("sft", ["cluster.component_placement.actor=all"]),
    "SFT by ZeRO-3 on all": ("sft", ["cluster.component_placement.actor=all", "train.backend=deepspeed"]),
    "GRPO on all": ("rl", ["cluster.component_placement.actor=all", "cluster.component_placement.rollout=all"]),
}


def run_findings(place: Path, num_devices: int) -> Iterator[Finding]:
    """Train for two steps in each way, and compare weights with those of one device."""
    from hotseat.cli.new import write_files

    models: dict[str, Path] = {}
    for kind in ("sft", "rl"):
        write_files(kind, place)
    rows = (place / "chats.jsonl").read_text().splitlines()
    batch = max(16, 2 * num_devices)
    (place / "chats.jsonl").write_text("\n".join((rows * (1 + _STEPS * batch // len(rows)))[: _STEPS * batch]) + "\n")
    for number, (what, (kind, settings)) in enumerate(RUNS.items()):
        if "deepspeed" in settings[-1] and not has_deepspeed():
            continue
        sizes = [f"train.batch_size={batch}", "train.max_epochs=1"] if kind == "sft" else rl_sizes(num_devices)
        name = f"run-{number}"
        started_s = time.monotonic()
        words = [f"name={name}", "train.dtype=fp32", "eval.path=null", "eval.every=null", *sizes, *settings]
        done = subprocess.run(
            [sys.executable, "-m", "hotseat", "run", f"{kind}.yaml", *words],
            cwd=place,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        seconds = time.monotonic() - started_s
        if done.returncode != 0:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            yield Finding(
                what, f"failed after {seconds:.0f} s", f"{''.join(last)} (see {place / 'runs' / name})", stops=True
            )
            continue
        models[what] = place / "runs" / name / "model"
        yield _learned(what, models, place / "runs" / name, seconds)


def has_deepspeed() -> bool:
    from importlib.util import find_spec

    return find_spec("deepspeed") is not None


def rl_sizes(num_devices: int) -> list[str]:
    """Two steps, with at least one sample for each device."""
    prompts = max(8, num_devices)
    return [
        f"rollout.batch_size={prompts}",
        f"train.batch_size={8 * prompts}",
        f"data.max_samples={2 * prompts}",
        "train.num_episodes=1",
    ]


def _learned(what: str, models: dict[str, Path], run: Path, seconds: float) -> Finding:
    alone = next(iter(models))
    if what == alone or "SFT" not in what:
        steps = len((run / "metrics.jsonl").read_text().splitlines())
        proof = ", every weight that was pushed proven by digests" if "SFT" not in what else ""
        return Finding(what, f"{steps} steps in {seconds:.0f} s{proof}")
    gap = largest_gap(models[alone], models[what])
    is_right = gap < 1e-3
    text = f"{seconds:.0f} s, weights within {gap:.1e} of those of one device, relative to the largest"
    return Finding(
        what, text, "" if is_right else "ranks compute another model than one device does", stops=not is_right
    )


def largest_gap(first: Path, second: Path) -> float:
    """Return the largest difference of two models' weights, relative to the largest weight of its tensor."""
    from safetensors.torch import load_file

    ours, theirs = (
        {key: value for file in sorted(model.glob("*.safetensors")) for key, value in load_file(file).items()}
        for model in (first, second)
    )
    if ours.keys() != theirs.keys():
        return float("inf")
    return max(float((ours[key] - theirs[key]).abs().max() / ours[key].abs().max().clamp_min(1e-12)) for key in ours)
