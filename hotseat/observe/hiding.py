"""Removal of secrets from configs that others may see, in reports and at Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HIDDEN = "***"


def without_secrets(values: Any, key: str = "") -> Any:
    """Return a config without the values of environment variables and without passwords in addresses."""
    if isinstance(values, Mapping):
        is_hidden = key == "env_vars"
        return {name: _HIDDEN if is_hidden else without_secrets(value, name) for name, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value, key) for value in values]
    return re.sub(r"(\w+://)[^/@\s]+@", rf"\1{_HIDDEN}@", values) if isinstance(values, str) else values
