"""Tool calls and thinking in the text of an answer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Parsed:
    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]  # name, arguments as JSON text


class Parser(Protocol):
    """Reads an answer that a model with tools gave."""

    def __call__(self, context: str, answer: str, tools: Sequence[Mapping[str, Any]]) -> Parsed | None:
        """Return its parts; None if it is not in the model's own form, so that it is plain text."""


def parser_of(tokenizer: Any) -> Parser | None:
    """Return the parser for the answers of a model; None if there is none.

    It is the tokenizer's own `response_template`, by which transformers parses the answers of a model.
    """
    if getattr(tokenizer, "response_template", None) is None:
        return None

    def parse(context: str, answer: str, tools: Sequence[Mapping[str, Any]]) -> Parsed | None:
        try:
            message = tokenizer.parse_response(answer, prefix=context, tools=[dict(tool) for tool in tools])
            return _parsed(message)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # what a model samples need not be in any form

    return parse


def _parsed(message: Mapping[str, Any]) -> Parsed:
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        arguments = function.get("arguments", {})
        calls.append((str(function["name"]), arguments if isinstance(arguments, str) else json.dumps(arguments)))
    reasoning = message.get("reasoning_content") or message.get("thinking")
    return Parsed(message.get("content") or "", reasoning or None, tuple(calls))
