"""What others are shown of a config: the report is sent around, and Weights & Biases is somebody else's server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HIDDEN = "***"


def without_secrets(values: Any, key: str = "") -> Any:
    """A config as it may be shown to others: no values of environment variables, no passwords in addresses."""
    if isinstance(values, Mapping):
        is_hidden = key == "env_vars"
        return {name: _HIDDEN if is_hidden else without_secrets(value, name) for name, value in values.items()}
    if isinstance(values, list):
        return [without_secrets(value, key) for value in values]
    return re.sub(r"(\w+://)[^/@\s]+@", rf"\1{_HIDDEN}@", values) if isinstance(values, str) else values
