"""Helpers for the wording of messages."""

from __future__ import annotations


def quantity(number: int, thing: str, things: str | None = None) -> str:
    """Return a number with its noun: `1 engine`, `2,048 engines`. things: the plural, where it takes more than an s."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"
