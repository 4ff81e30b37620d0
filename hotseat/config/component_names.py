"""Replaces names that a config gives to roles (`cluster.component_names`) by the roles, wherever roles are named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotseat.config.yaml_lines import KeyPath


def with_roles(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of a document with roles instead of their own names in its placement and its flow.

    Entries of another type than theirs are left as they are, for the check of types.
    """
    names = _names_of(values)
    if not names:
        return values
    changed = dict(values)
    cluster = values["cluster"]
    placement = cluster.get("component_placement")
    if isinstance(placement, Mapping):
        placed = {_listed(key, names): selection for key, selection in placement.items()}
        for key, selection in placed.items():
            if isinstance(selection, str) and selection.strip().startswith("@"):
                placed[key] = f"@{_role(selection.strip()[1:].strip(), names)}"
        # A role that is placed twice keeps its names, for which `conflicts` refuses it.
        changed["cluster"] = {**cluster, "component_placement": placed if len(placed) == len(placement) else placement}
    flow = values.get("flow")
    if isinstance(flow, list):
        works = ("run", "train", "push")
        changed["flow"] = [
            {key: _roles(value, names) if key in works else value for key, value in phase.items()}
            if isinstance(phase, Mapping)
            else phase
            for phase in flow
        ]
    return changed


def as_written(values: Mapping[str, Any], path: KeyPath) -> KeyPath:
    """Return the path of a role's entry in the placement or in a phase under the name that the document has for it.

    The path may use the role or any of its names; without such an entry it is returned as it is.
    """
    at = 2 if path[:2] == ("cluster", "component_placement") else 3 if path[:1] + path[2:3] == ("flow", "run") else None
    if at is None or len(path) <= at:
        return path
    node: Any = values
    for part in path[:at]:
        if isinstance(node, Mapping):
            node = node.get(part)
        else:
            node = node[part] if isinstance(node, list) and isinstance(part, int) else None
    if not isinstance(node, Mapping) or path[at] in node:
        return path
    names = _names_of(values)
    for key in node:
        if _listed(key, names) == _listed(path[at], names):
            return (*path[:at], key, *path[at + 1 :])
    return path


def _names_of(values: Mapping[str, Any]) -> Mapping[Any, Any]:
    cluster = values.get("cluster")
    names = cluster.get("component_names") if isinstance(cluster, Mapping) else None
    return names if isinstance(names, Mapping) else {}


def _role(name: Any, names: Mapping[Any, Any]) -> Any:
    role = names.get(name) if isinstance(name, str) else None
    return role if isinstance(role, str) else name


def _listed(key: Any, names: Mapping[Any, Any]) -> Any:
    """Replace names in `a` or `a,b`."""
    return ",".join(_role(name.strip(), names) for name in key.split(",")) if isinstance(key, str) else key


def _roles(written: Any, names: Mapping[Any, Any]) -> Any:
    if isinstance(written, Mapping):
        works = {_role(name, names): parts for name, parts in written.items()}
        return works if len(works) == len(written) else written  # refused by `conflicts`, as in the placement
    return [_role(name, names) for name in written] if isinstance(written, list) else written
