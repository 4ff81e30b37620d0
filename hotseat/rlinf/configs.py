"""RLinf's configs as plain values: from OmegaConf, mappings, or objects of our own config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hotseat.config.schema.cluster_options import ClusterConfig
from hotseat.errors import ConfigError, PlacementError, Problem
from hotseat.placement.locate import RoleRequest
from hotseat.placement.selection import parse_selection
from hotseat.rlinf.config_keys import TABLE

_LOG = logging.getLogger("hotseat.rlinf")


def plain(cfg: Any) -> Any:
    """Return a config as dicts, lists and values, with OmegaConf's interpolations resolved."""
    if type(cfg).__module__.split(".")[0] == "omegaconf":
        # Not imported: it need not be installed, and whoever has such a config has loaded it.
        return sys.modules["omegaconf"].OmegaConf.to_container(cfg, resolve=True)
    if hasattr(cfg, "model_dump"):
        return cfg.model_dump(exclude_unset=True)
    return cfg


def section(cfg: Any, name: str) -> Mapping[str, Any]:
    """Return a section of a config, empty where the config has none."""
    whole = plain(cfg)
    part = whole.get(name) if isinstance(whole, Mapping) else None
    return {} if part is None else part


def placed_components(placement: Mapping[str, Any]) -> list[RoleRequest]:
    """Return the components of a `component_placement`, whose keys name one or several."""
    requests: dict[str, RoleRequest] = {}
    for names, written in placement.items():
        for name in (each.strip() for each in str(names).split(",")):
            if name in requests:
                raise PlacementError(f"{name} is placed twice: keep one of the two entries")
            requests[name] = RoleRequest(name, parse_selection(written, name))
    return list(requests.values())


def checked_cluster(cfg: Any) -> ClusterConfig:
    """Check RLinf's section `cluster`. Keys of RLinf without effect are logged, unknown ones refused by name."""
    values = plain(cfg)
    without_effect = {key.theirs: key.because for key in TABLE if not key.ours}
    for name in values:
        if f"cluster.{name}" in without_effect:
            _LOG.warning("no effect here: cluster.%s because %s", name, without_effect[f"cluster.{name}"])
    taken = {name: value for name, value in values.items() if f"cluster.{name}" not in without_effect}
    try:
        return ClusterConfig.model_validate(taken)
    except ValidationError as error:
        problems = [Problem(f"cluster.{'.'.join(map(str, each['loc']))}", each["msg"]) for each in error.errors()]
        raise ConfigError(problems) from error
