"""Tool calls and thinking in the answers of a model.

Models write tool calls in forms of their own. Two libraries know them: transformers, where the model's tokenizer has a
`response_template`, and `renderers`, for the families that it names (`agent.tool_parser`) or finds by a model's name.
Harmony, the form of gpt-oss, is known by its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hotseat.agents import harmony
from hotseat.agents.conversation import Context
from hotseat.errors import UserError


@dataclass(frozen=True)
class Parsed:
    content: str
    reasoning: str | None
    calls: tuple[tuple[str, str], ...]  # name, arguments as JSON text


Tools = Sequence[Mapping[str, Any]]
# Takes the context, an answer as text and as tokens, and the tools that the model had; returns the parts of the answer,
# or None if it is plain text, in no form of calls.
Parser = Callable[[Context, str, Sequence[int], Tools], Parsed | None]


def parser_of(tokenizer: Any, family: str | None = None) -> Parser | None:
    """Return the parser for the answers of a model; None if there is none. family: a name that `renderers` knows."""
    if family is not None:
        return _by_renderers(tokenizer, family)
    if getattr(tokenizer, "response_template", None) is not None:
        return _by_transformers(tokenizer)
    if find_spec("renderers") is not None:
        from renderers.base import MODEL_RENDERER_MAP

        known = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
        if known is not None:
            return _by_renderers(tokenizer, known)
    return _of_harmony if harmony.is_harmony(tokenizer) else None


def _of_harmony(context: Context, text: str, token_ids: Sequence[int], tools: Tools) -> Parsed | None:
    parts = harmony.parts(text)
    return None if parts is None else Parsed(*parts)


def _by_transformers(tokenizer: Any) -> Parser:
    def parse(
        context: Context, text: str, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Parsed | None:
        try:
            message = tokenizer.parse_response(text, prefix=context.text, tools=[dict(tool) for tool in tools])
            functions = [call["function"] for call in message.get("tool_calls") or ()]
            calls = tuple((str(function["name"]), _text(function.get("arguments"))) for function in functions)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None  # what a model samples need not be in any form
        return Parsed(message.get("content") or "", message.get("reasoning_content") or None, calls)

    return parse


def _by_renderers(tokenizer: Any, family: str) -> Parser:
    if find_spec("renderers") is None:
        raise UserError(
            f"agent.tool_parser {family}: the package renderers is not installed: pip install 'hotseat[agents]'"
        )
    from renderers.base import RENDERER_REGISTRY, create_renderer
    from renderers.configs import config_from_name

    try:
        renderer = create_renderer(tokenizer, config_from_name(family))
    except Exception as error:  # of any kind: families check the tokenizer in ways of their own
        names = ", ".join(sorted(RENDERER_REGISTRY))
        raise UserError(f"agent.tool_parser {family}: {error}; the package renderers knows {names}") from error

    def parse(
        context: Context, text: str, token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]
    ) -> Parsed | None:
        specs = [dict(tool["function"]) for tool in tools]
        parsed = renderer.parse_response(list(token_ids), tools=specs, prompt_ids=list(context.token_ids))
        good = [call for call in parsed.tool_calls if call.status == "ok" and call.name]
        if parsed.tool_calls and not good:
            return None  # the program sees what was written
        calls = tuple((call.name, _text(call.arguments)) for call in good)
        return Parsed(parsed.content or "", parsed.reasoning_content or None, calls)

    return parse


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {})
