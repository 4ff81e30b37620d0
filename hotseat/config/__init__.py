"""One typed, frozen tree of options, read from YAML, checked whole before anything else happens."""

from hotseat.config.load import load, loads, to_yaml
from hotseat.config.roles import roles_of
from hotseat.config.schema import Config

__all__ = ["Config", "load", "loads", "roles_of", "to_yaml"]
