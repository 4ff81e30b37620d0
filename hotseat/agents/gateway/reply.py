"""Replies to clients, whole or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hotseat.agents.gateway.asking import Asked
from hotseat.agents.gateway.growing import PIECE, GrowingAnswer
from hotseat.agents.gateway.program_session import Session


@dataclass(frozen=True)
class Event:
    """One server-sent event."""

    data: dict[str, Any] | str
    name: str | None = None

    def encode(self) -> bytes:
        data = self.data if isinstance(self.data, str) else json.dumps(self.data)
        head = f"event: {self.name}\n" if self.name else ""
        return f"{head}data: {data}\n\n".encode()


Begin = Callable[["Reply"], object]


class Reply(ABC):
    """The answer to one request. answers: they may still be sampled; then the reply can be read as a stream only."""

    def __init__(self, answers: Sequence[GrowingAnswer]):
        self.answers = answers

    @property
    def is_complete(self) -> bool:
        return all(answer.is_complete for answer in self.answers)

    async def begun(self) -> None:
        """Wait until there is something to read, or raise why not, which a client still gets as a status."""
        await self.answers[0].begun()

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the reply as a whole."""

    @abstractmethod
    def events(self) -> AsyncIterator[Event]:
        """Yield the reply in pieces, as the answers grow."""

    def error(self, message: str) -> Event:
        """Return the event that ends a stream whose answer fails."""
        return Event({"error": {"message": message, "type": "api_error", "param": None, "code": None}})


async def reply_to(
    asked: Asked, session: Session, make: Callable[[Sequence[GrowingAnswer]], Reply], begin: Begin | None
) -> Reply:
    """Return the reply to a request when it is complete. begin: called with it as soon as it can be read as a stream.

    An answer that may have tool calls is parsed as a whole, and is not read before.
    """
    if begin is None or asked.tools:
        return make([GrowingAnswer.complete(answer) for answer in await session.answer(asked)])
    replies: list[Reply] = []

    def watch(answers: Sequence[GrowingAnswer]) -> None:
        replies.append(make(answers))
        begin(replies[0])

    await session.answer(asked, watch)
    return replies[0]


def pieces(text: str) -> list[str]:
    """Cut a text that is complete into the pieces of a stream."""
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
