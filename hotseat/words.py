"""Helpers for the wording of messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def quantity(number: int, thing: str, things: str | None = None) -> str:
    """Return a number with its noun: `1 engine`, `2,048 engines`. things: the plural, where it takes more than an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def label_text(label: Any) -> str | None:
    """Return a label as text: a string as it is, any other value as JSON; None for an empty label, which is none."""
    if label is None or label == "":
        return None
    return label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)


def leaves(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings by their dotted keys. An empty mapping is a value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def cause_of(reason: str) -> str:
    """Return a reason with `#` for its numbers, so that reasons that differ only in samples or numbers are the same.

    `0/17/3: the reward is 1.5` and `0/18/0: the reward is -2` both are `#/#/#: the reward is #`.
    """
    return _NUMBER.sub("#", reason)


def without_url_secrets(text: str) -> str:
    """Return a text without users, passwords and query strings of the addresses in it: tokens may be in any of them."""
    text = re.sub(r"(\w+://)[^/?#@\s]+@", r"\1***@", text)
    return re.sub(r"(\w+://[^?#\s]*\?)[^#\s]+", r"\1***", text)
