"""Secrets in configs: which values hold some, and how they are hidden in what others may see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotseat.config.schema import Config
from hotseat.words import without_url_secrets

_HIDDEN = "***"


def without_secrets(values: Any, key: str = "") -> Any:
    """Return a config, or a part of one, without the values of environment variables and secrets in addresses."""
    if isinstance(values, Mapping):
        is_hidden = key == "env_vars"
        return {name: _HIDDEN if is_hidden else without_secrets(value, name) for name, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value, key) for value in values]
    return without_url_secrets(values) if isinstance(values, str) else values


def has_secrets(config: Config) -> bool:
    """Tell whether a config holds values that are hidden from others; files with them are for this user alone."""
    values = config.model_dump(mode="json")
    return bool(without_secrets(values) != values)
