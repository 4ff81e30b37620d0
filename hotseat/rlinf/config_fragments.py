"""Parts of RLinf's configs that place components or offload them, and nothing else: what they mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from hotseat.placement.inventory import Inventory, format_ranks
from hotseat.placement.locate import Located, locate
from hotseat.placement.plan import label_of
from hotseat.planning.config_plan import DEVICES_PER_NODE
from hotseat.rlinf.config_keys import TABLE, translate
from hotseat.rlinf.configs import placed_components, section
from hotseat.words import quantity

_PLACING = ("num_nodes", "num_gpus_per_node", "component_placement")
_OFFLOAD = "enable_offload"
_OFFLOADED = tuple(key.theirs.partition(".")[0] for key in TABLE if key.ours == key.theirs and _OFFLOAD in key.theirs)


def is_fragment(values: Mapping[str, Any]) -> bool:
    """Tell whether a config has only a placement, or whether components are offloaded."""
    return bool(values) and all(
        isinstance(part, Mapping)
        and bool(part)
        and (set(part) <= set(_PLACING) if name == "cluster" else name in _OFFLOADED and set(part) == {_OFFLOAD})
        for name, part in values.items()
    )


def explain(values: Mapping[str, Any]) -> str:
    """Return a fragment in our keys, as YAML with comments on what it means."""
    ours = yaml.safe_dump(translate(values).values, sort_keys=False)
    notes = [*_placement(section(values, "cluster")), *_offload(values)]
    notes.append("a part of a config: `hotseat run` needs a model, data and a reward besides, see `hotseat new`")
    return ours + "".join(f"# {note}\n" for note in notes)


def _placement(cluster: Mapping[str, Any]) -> list[str]:
    if not cluster.get("component_placement"):
        return []
    num_nodes, num_devices = int(cluster.get("num_nodes", 1)), int(cluster.get("num_gpus_per_node", DEVICES_PER_NODE))
    located = locate(Inventory.parse(f"{num_nodes}x{num_devices}"), placed_components(cluster["component_placement"]))
    assumed = "" if "num_gpus_per_node" in cluster else ", if it has as many"
    nodes = f"{quantity(num_nodes, 'node')} of {quantity(num_devices, 'device')}{assumed}"
    width = max(map(len, located))
    return [
        f"{label_of(located)} on {nodes}:",
        *(f"  {name:{width}}  {_place(name, place, located)}" for name, place in located.items()),
    ]


def _place(name: str, place: Located, located: Mapping[str, Located]) -> str:
    processes = quantity(len(place.processes), "process", "processes")
    if not place.devices:
        return f"{processes} without devices"
    shared = [other for other, its in located.items() if other != name and set(its.devices) & set(place.devices)]
    others = f", shared with {', '.join(shared)}" if shared else ""
    return f"{processes} on {format_ranks(sorted(place.devices))}{others}"


def _offload(values: Mapping[str, Any]) -> list[str]:
    """Say which components are offloaded whenever a phase does not need them, and which never are."""
    meanings = {True: "offloaded in every phase that does not need them", False: "never offloaded"}
    notes = []
    for is_offloaded, meaning in meanings.items():
        names = [name for name in values if name in _OFFLOADED and values[name].get(_OFFLOAD) is is_offloaded]
        if names:
            notes.append(f"{', '.join(names)}: {meaning} (unset: where the memory is needed)")
    return notes
