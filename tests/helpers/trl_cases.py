"""Config objects of the installed TRL, as scripts make them."""

from __future__ import annotations

import warnings
from typing import Any


def trl_config(name: str, **values: Any) -> Any:
    """Make a config of TRL; `use_cpu`, or it refuses bf16, its default, where there is no GPU."""
    import trl

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(trl, name)(**{"use_cpu": True} | values)
