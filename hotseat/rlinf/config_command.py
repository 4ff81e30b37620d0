"""`hotseat rlinf-config FILE`: a config of RLinf in our keys, and those of its keys that have no effect."""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import yaml

from hotseat.config import to_yaml
from hotseat.config.load import loads_in_effect
from hotseat.errors import ConfigError, Problem, UserError
from hotseat.rlinf.config_fragments import explain, is_fragment
from hotseat.rlinf.config_keys import looks_like_rlinf, their_key, translate


def run_rlinf_config(arguments: argparse.Namespace) -> int:
    """Print our config on standard output, and what has no effect on standard error."""
    path: str = arguments.config
    values = read_rlinf(path)
    if is_fragment(values) and not arguments.overrides:
        print(explain(values), end="")
        return 0
    if not looks_like_rlinf(values):
        raise UserError(f"{path} has no section runner, so it is no config of RLinf: `hotseat config` reads ours")
    translation = translate(values)
    config, idle = loads_in_effect(yaml.safe_dump(translation.values, sort_keys=False), arguments.overrides)
    print(to_yaml(config), end="")
    for key, because in [*translation.no_effect, *((their_key(values, key), because) for key, because in idle)]:
        print(f"no effect here: {key} because {because}", file=sys.stderr)
    return 0


def read_rlinf(path: str) -> dict[str, Any]:
    """Read a config of RLinf, with its interpolations resolved, for which OmegaConf has to be installed."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}", file=path)]) from None
    if "${" not in text:
        values = yaml.safe_load(text)
    else:
        values = _resolved(text, path)
    if not isinstance(values, dict):
        raise ConfigError([Problem("", "is not a mapping of sections", file=path)])
    return values


def _resolved(text: str, path: str) -> Any:
    try:
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException
    except ImportError:
        raise UserError(
            f"{path} has interpolations (${{...}}), which OmegaConf resolves: pip install 'hotseat[rlinf]'"
        ) from None
    # RLinf registers these resolvers before it reads a config.
    # Versions before 2.4, which hydra-core needs, have another function of this name.
    is_new = "replace" in inspect.signature(OmegaConf.register_resolver).parameters
    register = OmegaConf.register_resolver if is_new else OmegaConf.register_new_resolver
    register("multiply", lambda a, b: a * b, replace=True)
    register("int_div", lambda a, b: a // b, replace=True)
    register("subtract", lambda a, b: a - b, replace=True)
    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError([Problem("", f"an interpolation cannot be resolved: {error}", file=path)]) from None
