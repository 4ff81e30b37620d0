"""Warnings of a plan about settings that are allowed and probably not meant, and about what it does not know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotseat.placement.inventory import Inventory, format_ranges, format_ranks
from hotseat.placement.locate import Located
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, TrainMemory
from hotseat.placement.plan_types import DeviceGroup, RoleSpec
from hotseat.placement.selection import InPools, RankSelection, Selection
from hotseat.registry.roles import role_entry


def plan_warnings(
    inventory: Inventory,
    specs: Mapping[str, RoleSpec],
    selections: Mapping[str, Selection],
    located: Mapping[str, Located],
    groups: Sequence[DeviceGroup],
) -> list[str]:
    warnings = _assumed_shapes(specs)
    holdings = (holding for group in groups for step in group.steps for holding in step.holdings)
    absent = {holding.role for holding in holdings if not holding.is_resident}
    for name, spec in specs.items():
        place = located[name]
        written = selections[name]
        selection = written.selection if isinstance(written, InPools) else written
        if (
            isinstance(selection, RankSelection)
            and selection.from_int
            and (rank := selection.segments[0].ranks) is not None
        ):
            if rank.first >= 60:
                minutes, seconds = divmod(rank.first, 60)
                warnings.append(
                    f"{name}: placed on rank {rank.first}; if {minutes}:{seconds} was meant, quote it,"
                    f" because YAML 1.1 reads it as {rank.first}"
                )
        widths = {len(process.devices) for process in place.processes}
        has_one = not spec.is_engine and role_entry(name).kind == "model"
        if has_one and max(widths, default=0) > 1:
            warnings.append(
                f"{name}: its processes have {max(widths)} devices each, and a trainer process uses only the first:"
                f" leave the process ranks out to have one process per device"
            )
        kinds = {str(inventory.nodes[process.node].device_kind) for process in place.processes if process.devices}
        if len(kinds) > 1:
            warnings.append(f"{name}: spread over devices of different kinds ({', '.join(sorted(kinds))})")
        alone = place.devices and all(
            set(located[other].devices).isdisjoint(place.devices) for other in specs if other != name
        )
        if spec.offload == "always" and name not in absent:
            warnings.append(f"{name}: enable_offload: true has no effect: no part of it is ever idle on a device")
        elif spec.offload == "always" and alone:
            warnings.append(
                f"{name}: always offloaded (enable_offload: true) although no other role uses its devices: it moves for"
                " nothing"
            )
        if spec.share is not None and place.where != "devices":
            warnings.append(f"{name}: a memory share has no effect on a role without devices")
    warnings += _unknown_memory(specs, groups)
    used = {device for place in located.values() for device in place.devices}
    if any(place.where == "devices" for place in located.values()) and len(used) < inventory.num_devices:
        unused = [device for device in range(inventory.num_devices) if device not in used]
        warnings.append(f"{len(unused)} of {inventory.num_devices} devices are used by no role: {format_ranks(unused)}")
    return warnings


def _assumed_shapes(specs: Mapping[str, RoleSpec]) -> list[str]:
    """Warn once about all roles whose model's shape was taken from the same public model."""
    roles: dict[str, list[str]] = {}
    for name, spec in specs.items():
        if spec.model_assumed:
            roles.setdefault(spec.model_assumed, []).append(name)
    return [
        f"{', '.join(names)}: the model's shape is assumed to be that of {model}, from its name: its config.json is not"
        " at hand"
        for model, names in roles.items()
    ]


def _unknown_memory(specs: Mapping[str, RoleSpec], groups: Sequence[DeviceGroup]) -> list[str]:
    """Warn once about all devices that cannot be checked for the same reason."""
    reasons: dict[str, list[tuple[int, int]]] = {}
    for group in groups:
        if group.memory_gib is None:
            why = "the memory of the devices is not known (give the inventory a device kind, for instance 1x8xH100-80G)"
        else:
            unknown = [name for name in group.roles if _is_unknown(specs[name])]
            if not unknown:
                continue
            why = f"the model or the settings of {', '.join(unknown)} are not known"
        reasons.setdefault(why, []).extend(group.devices)
    return [
        f"memory is not checked on devices {format_ranges(sorted(devices))}, where only parts that are always offloaded"
        f" move: {why}"
        for why, devices in reasons.items()
    ]


def _is_unknown(spec: RoleSpec) -> bool:
    if isinstance(spec.memory, TrainMemory | ForwardMemory | EngineMemory):
        return spec.model is None
    return spec.memory is None and not (role_entry(spec.name).kind == "simulator" and spec.share is not None)
