"""`/v1/messages`, as Anthropic's clients use it, as far as it is about text, images and tools."""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from hotseat.agents.gateway import fields
from hotseat.agents.gateway.fields import Asked, BadRequest, own_settings
from hotseat.agents.gateway.program_session import ProgramSession
from hotseat.agents.gateway.reply import Begin, GrowingAnswer, Reply, event, pieces, reply_to

_KNOWN = (
    "model", "messages", "max_tokens", "system", "stop_sequences", "stream", "temperature", "top_p", "top_k", "tools",
    "tool_choice", "metadata", "service_tier", "thinking", "learn",
)  # fmt: skip


async def count_tokens(body: Mapping[str, Any], session: ProgramSession) -> dict[str, int]:
    """Return how many tokens the policy would read for a request. Nothing is sampled."""
    asked = _asked({**body, "max_tokens": 1}, session)
    return {"input_tokens": await session.num_context_tokens(asked)}


async def create(body: Mapping[str, Any], session: ProgramSession, begin: Begin | None = None) -> Reply:
    return await reply_to(_asked(body, session), session, partial(_Message, body), begin)


def _asked(body: Mapping[str, Any], session: ProgramSession) -> Asked:
    fields.check(body, _KNOWN, ("temperature", "top_p", "top_k"))
    if body.get("max_tokens") is None:
        raise BadRequest("max_tokens: not set", "max_tokens")
    own = own_settings({name: body.get(name) for name in ("temperature", "top_p", "top_k")}, session.sampling)
    choice = body.get("tool_choice") or {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none"):
        own["tool_choice"] = choice
    if not isinstance(body.get("thinking") or {}, dict):
        raise BadRequest("thinking: not an object", "thinking")
    if (body.get("thinking") or {}).get("type") == "enabled":
        own["thinking"] = body["thinking"]
    return Asked(
        messages=_messages(body.get("messages"), body.get("system")),
        tools=[] if kind == "none" else fields.tools({"tools": _tools(body.get("tools"))}),
        max_tokens=fields.integer(body, "max_tokens"),
        stop=fields.stops(body, "stop_sequences"),
        own=own,
        is_learned=fields.flag(body, "learn", default=True),
    )


def _tools(value: Any) -> Any:
    """Return tools in the form of chat completions."""
    if not isinstance(value, list):
        return value
    listed = []
    for tool in value:
        if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
            raise BadRequest("tools: only tools of your own are possible, with name and input_schema", "tools")
        function = {"name": tool.get("name"), "description": tool.get("description") or ""}
        listed.append({"type": "function", "function": {**function, "parameters": tool.get("input_schema") or {}}})
    return listed


def _messages(value: Any, system: Any) -> list[dict[str, Any]]:
    """Return the messages in the form of chat completions: blocks become text, tool calls and results of tools."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        raise BadRequest("messages: not a list with at least one message", "messages")
    messages: list[dict[str, Any]] = [] if not system else [{"role": "system", "content": system}]
    for message in value:
        content, role = message.get("content"), message.get("role")
        if not isinstance(content, list):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(content))
        else:
            results = [block for block in content if isinstance(block, dict) and block.get("type") == "tool_result"]
            for block in results:
                shown = block.get("content") or ""
                messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": shown})
            rest = [block for block in content if block not in results]
            if rest:
                messages.append({"role": role, "content": rest})
    checked = fields.messages(messages)
    if checked[-1]["role"] == "assistant":
        raise BadRequest("messages: an answer that is begun by the client is not supported by this gateway", "messages")
    return checked


def _assistant(content: list[Any]) -> dict[str, Any]:
    blocks = [block for block in content if isinstance(block, dict) and block.get("type") != "thinking"]
    used = [block for block in blocks if block.get("type") == "tool_use"]
    calls = [
        {
            "id": block.get("id"),
            "type": "function",
            "function": {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})},
        }
        for block in used
    ]
    text: Any = [block for block in blocks if block not in used]
    message = {"role": "assistant", "content": text or ("" if not calls else None)}
    return message | ({"tool_calls": calls} if calls else {})


class _Message(Reply):
    def __init__(self, body: Mapping[str, Any], answers: Sequence[GrowingAnswer]):
        super().__init__(answers)
        [self._growing] = answers
        self._frame = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": str(body.get("model") or "policy"),
        }

    def body(self) -> dict[str, Any]:
        answer = self._growing.answer
        used = {"input_tokens": len(answer.context), "output_tokens": len(answer.token_ids)}
        return {**self._frame, "content": self._blocks(), **self._end(), "usage": used}

    def _end(self) -> dict[str, Any]:
        answer = self._growing.answer
        if answer.tool_calls:
            reason = "tool_use"
        elif answer.stop is not None:
            reason = "stop_sequence"
        else:
            reason = "max_tokens" if answer.is_cut else "end_turn"
        return {"stop_reason": reason, "stop_sequence": answer.stop}

    @property
    def _has_text(self) -> bool:
        return not self._growing.is_complete or bool(self._growing.answer.text or not self._growing.answer.tool_calls)

    def _blocks(self) -> list[dict[str, Any]]:
        answer = self._growing.answer
        blocks: list[dict[str, Any]] = []
        if self._has_text:
            blocks.append({"type": "text", "text": answer.text})
        for call in answer.tool_calls:
            arguments: Any = call["function"]["arguments"]
            with contextlib.suppress(ValueError):
                arguments = json.loads(arguments)
            arguments = arguments if isinstance(arguments, dict) else {"value": arguments}
            blocks.append({"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": arguments})
        return blocks

    def error(self, message: str) -> bytes:
        return event({"type": "error", "error": {"type": "api_error", "message": message}}, "error")

    async def events(self) -> AsyncIterator[bytes]:
        async for each in self._events():
            yield event(each, each["type"])

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        begun: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        used = {"input_tokens": len(self._growing.context), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._frame, **begun, "usage": used}}
        if self._has_text:
            yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            async for piece in self._growing.pieces():
                yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            yield {"type": "content_block_stop", "index": 0}
        for index, block in enumerate(self._blocks()):
            if block["type"] == "text":
                continue
            yield {"type": "content_block_start", "index": index, "content_block": {**block, "input": {}}}
            for piece in pieces(json.dumps(block["input"])):
                delta = {"type": "input_json_delta", "partial_json": piece}
                yield {"type": "content_block_delta", "index": index, "delta": delta}
            yield {"type": "content_block_stop", "index": index}
        used = {"output_tokens": len(self._growing.answer.token_ids)}
        yield {"type": "message_delta", "delta": self._end(), "usage": used}
        yield {"type": "message_stop"}
