"""Replaces names that a config gives to roles (`cluster.component_names`) by the roles, wherever roles are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_roles(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a document with roles instead of their own names in its placement and its flow.

    Entries of another type than theirs are left as they are, for the check of types.
    """
    cluster = values.get("cluster")
    if not isinstance(cluster, Mapping):
        return values
    names = cluster.get("component_names")
    if not isinstance(names, Mapping) or not names:
        return values
    changed = dict(values)
    placement = cluster.get("component_placement")
    if isinstance(placement, Mapping):
        placed = {_listed(key, names): _same_as(selection, names) for key, selection in placement.items()}
        # A role that is placed twice keeps its names, for which `checks` refuses it.
        changed["cluster"] = {**cluster, "component_placement": placed if len(placed) == len(placement) else placement}
    flow = values.get("flow")
    if isinstance(flow, list):
        changed["flow"] = [_phase(phase, names) for phase in flow]
    return changed


def _role(name: Any, names: Mapping[Any, Any]) -> Any:
    return names.get(name, name) if isinstance(name, str) else name


def _listed(key: Any, names: Mapping[Any, Any]) -> Any:
    """Replace names in `a` or `a,b`."""
    return ",".join(str(_role(name.strip(), names)) for name in key.split(",")) if isinstance(key, str) else key


def _same_as(selection: Any, names: Mapping[Any, Any]) -> Any:
    """Replace the name in `@name`."""
    is_same = isinstance(selection, str) and selection.strip().startswith("@")
    return f"@{_role(selection.strip()[1:].strip(), names)}" if is_same else selection


def _phase(phase: Any, names: Mapping[Any, Any]) -> Any:
    if not isinstance(phase, Mapping):
        return phase
    return {key: _roles(value, names) if key in ("run", "train", "push") else value for key, value in phase.items()}


def _roles(written: Any, names: Mapping[Any, Any]) -> Any:
    if isinstance(written, Mapping):
        return {_role(name, names): parts for name, parts in written.items()}
    return [_role(name, names) for name in written] if isinstance(written, list) else written
