"""Answers while they are sampled, and replies to clients, whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotseat.agents.gateway.fields import Asked

if TYPE_CHECKING:
    from hotseat.agents.gateway.program_session import ProgramSession

PIECE = 64  # characters
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer shows a character of which it has some bytes only


@dataclass(frozen=True)
class ClientAnswer:
    context: tuple[int, ...]
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    text: str  # without special tokens and the stop string
    is_cut: bool  # at the limit of tokens
    stop: str | None = None  # the stop string that ended it
    tool_calls: tuple[Mapping[str, Any], ...] = ()  # each with `id` and `function`: name, arguments as JSON text
    reasoning: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [{"type": "function", **call} for call in self.tool_calls]
        return message | ({} if self.reasoning is None else {"reasoning_content": self.reasoning})


@dataclass(eq=False)
class GrowingAnswer:
    """An answer of which any number of clients read the text as it grows. All methods are called in one event loop.

    text_of: returns what clients may read of an answer that begins with these tokens, which takes a while. Tokens that
    come meanwhile wait, and the newest are the next.
    """

    context: tuple[int, ...]
    text_of: Callable[[tuple[int, ...]], Awaitable[str]] | None = None
    _newest: tuple[int, ...] = ()
    _working: asyncio.Task[None] | None = None
    _text: str = ""
    _answer: ClientAnswer | None = None
    _error: BaseException | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def complete(cls, answer: ClientAnswer) -> GrowingAnswer:
        made = cls(answer.context)
        made.finish(answer)
        return made

    @property
    def is_complete(self) -> bool:
        return self._answer is not None

    @property
    def answer(self) -> ClientAnswer:
        """Return the answer, which is complete."""
        assert self._answer is not None, "an answer that is not complete"
        return self._answer

    def take(self, token_ids: tuple[int, ...]) -> None:
        """Have clients read what the first tokens of the answer become."""
        self._newest = token_ids
        if self._working is None or self._working.done():
            self._working = asyncio.ensure_future(self._show())

    def stop(self) -> None:
        """Show nothing more before the whole answer is there."""
        if self._working is not None:
            self._working.cancel()

    async def _show(self) -> None:
        assert self.text_of is not None
        shown: tuple[int, ...] = ()
        while self._newest is not shown:
            shown = self._newest
            text = await self.text_of(shown)
            is_open = self._answer is None and self._error is None
            if is_open and len(text) > len(self._text) and text.startswith(self._text):
                self._text = text
                self._wake()

    def agrees_with(self, answer: ClientAnswer) -> bool:
        """Tell whether an answer begins with what clients may have read."""
        return answer.text.startswith(self._text)

    def finish(self, answer: ClientAnswer) -> None:
        """End the answer with all of it."""
        assert self.agrees_with(answer), "another answer than that of which clients have read a part"
        self._answer = answer
        self._wake()

    def fail(self, error: BaseException) -> None:
        if self._answer is None and self._error is None:
            self._error = error
            self._wake()

    async def begun(self) -> None:
        """Wait until there is something to read, or raise why there will not be."""
        while not self._text and self._answer is None:
            await self._more()

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text as it grows, in pieces."""
        at = 0
        while True:
            text = self._text if self._answer is None else self._answer.text
            for start in range(at, len(text), PIECE):
                yield text[start : start + PIECE]
            at = len(text)
            if self._answer is not None and at == len(self._answer.text):
                return
            if len(self._text) <= at and self._answer is None:
                await self._more()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _more(self) -> None:
        if self._error is not None:
            raise self._error
        await self._changed.wait()
        if self._error is not None:
            raise self._error


def certain(text: str, stops: Sequence[str]) -> str:
    """Return the part of the text of an answer's first tokens that stays whatever tokens follow.

    Left out is its end, which may be part of a character, or of a stop string that will be cut off.
    """
    text = text.rstrip(_UNFINISHED)
    held = max((len(stop) for stop in stops), default=1) - 1
    return text[: max(0, len(text) - held)]


def event(data: dict[str, Any] | str, name: str | None = None) -> bytes:
    """Encode a server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode()


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
    def events(self) -> AsyncIterator[bytes]:
        """Yield the reply in pieces, as the answers grow."""

    def error(self, message: str) -> bytes:
        """Return the event that ends a stream whose answer fails."""
        return event({"error": {"message": message, "type": "api_error", "param": None, "code": None}})


async def reply_to(
    asked: Asked, session: ProgramSession, make: Callable[[Sequence[GrowingAnswer]], Reply], begin: Begin | None
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
