"""The config: one typed, frozen tree of options, read from YAML and checked as a whole before anything else happens."""

from hotseat.config.load import load, loads, loads_saved, to_saved, to_yaml
from hotseat.config.presence import roles_of
from hotseat.config.schema import Config

__all__ = ["Config", "load", "loads", "loads_saved", "roles_of", "to_saved", "to_yaml"]
