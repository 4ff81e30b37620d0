"""Replies to clients, whole or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_PIECE = 64  # characters


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {data}\n\n".encode()


class Reply(ABC):
    """The answer to one request."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the reply as a whole."""

    @abstractmethod
    def events(self) -> Iterator[Event]:
        """Yield the reply in pieces. The answer is complete before the first: engines hand over whole completions."""


def pieces(text: str) -> list[str]:
    """Cut a text into the pieces of a stream."""
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
