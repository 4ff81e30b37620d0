"""`/v1/responses`, as far as it is about text, images and functions. Responses are not stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from hotseat.agents.gateway import fields
from hotseat.agents.gateway.chat_completions import usage
from hotseat.agents.gateway.fields import OWN_SETTINGS, Asked, BadRequest, own_settings
from hotseat.agents.gateway.program_session import ProgramSession
from hotseat.agents.gateway.reply import Begin, GrowingAnswer, Reply, event, pieces, reply_to

_KNOWN = (
    *OWN_SETTINGS, "input", "instructions", "max_output_tokens", "tools", "stream", "model", "user", "metadata",
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "truncation", "include", "text", "reasoning",
    "background", "max_tool_calls", "stream_options", "learn",
)  # fmt: skip


async def create(body: Mapping[str, Any], session: ProgramSession, begin: Begin | None = None) -> Reply:
    fields.check(body, _KNOWN, ("temperature", "top_p", "top_k"))
    for name, neutral in (("truncation", "disabled"), ("background", False), ("include", [])):
        if body.get(name) not in (None, neutral):
            raise BadRequest(f"{name}: only {neutral!r} is possible here", name)
    own = own_settings(body, session.sampling)
    form = (body.get("text") or {}).get("format") if isinstance(body.get("text") or {}, dict) else body["text"]
    if form not in (None, {"type": "text"}):
        own["text.format"] = form
    if isinstance(body.get("reasoning"), dict) and body["reasoning"].get("effort"):
        own["reasoning.effort"] = body["reasoning"]["effort"]
    asked = Asked(
        messages=_messages(body.get("input"), body.get("instructions")),
        tools=fields.tools({**body, "tools": _tools(body.get("tools"))}),
        max_tokens=fields.integer(body, "max_output_tokens"),
        own=own,
        is_learned=fields.flag(body, "learn", default=True),
    )
    return await reply_to(asked, session, partial(_Response, body), begin)


def _tools(value: Any) -> Any:
    """Return tools in the form of chat completions: this protocol has the function's fields beside its type."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "function", "function": {key: part for key, part in tool.items() if key not in ("type", "strict")}}
        if isinstance(tool, dict) and tool.get("type") == "function"
        else tool
        for tool in value
    ]


def _messages(value: Any, instructions: Any) -> list[dict[str, Any]]:
    """Return the items of a request as messages of a chat. Calls of one answer are in one message."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest("input: neither a text nor a list of items", "input")
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for at, item in enumerate(value):
        kind = item.get("type", "message") if isinstance(item, dict) else type(item).__name__
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            call = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": call})
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        elif kind != "reasoning":
            raise BadRequest(f"input[{at}]: items of type {kind} are not supported by this gateway", "input")
    return fields.messages(messages, "input")


class _Response(Reply):
    def __init__(self, body: Mapping[str, Any], answers: Sequence[GrowingAnswer]):
        super().__init__(answers)
        [self._growing] = answers
        self._text_id, self._id = f"msg_{secrets.token_hex(12)}", f"resp_{secrets.token_hex(12)}"
        calls = self._growing.answer.tool_calls if self._growing.is_complete else ()
        self._calls = [(f"fc_{secrets.token_hex(12)}", call) for call in calls]
        self._frame = {
            "id": self._id,
            "object": "response",
            "created_at": int(time.time()),
            "model": str(body.get("model") or "policy"),
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "parallel_tool_calls": True,
            "temperature": None,
            "top_p": None,
            "tool_choice": body.get("tool_choice") or "auto",
            "tools": body.get("tools") or [],
            "error": None,
            "incomplete_details": None,
        }

    def body(self) -> dict[str, Any]:
        counted = usage([self._growing.answer])
        is_cut = self._growing.answer.is_cut
        return {
            **self._frame,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [*([self._text_item()] if self._has_text else []), *self._call_items()],
            "usage": {
                "input_tokens": counted["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": counted["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted["total_tokens"],
            },
        }

    @property
    def _has_text(self) -> bool:
        return not self._calls or bool(self._growing.answer.text)

    def _text_item(self) -> dict[str, Any]:
        answer = self._growing.answer
        status = "incomplete" if answer.is_cut else "completed"
        return self._message(status, [_text_part(answer.text)])

    def _message(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._text_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _call_items(self) -> list[dict[str, Any]]:
        return [
            {"id": name, "type": "function_call", "call_id": call["id"], "status": "completed", **call["function"]}
            for name, call in self._calls
        ]

    def error(self, message: str) -> bytes:
        return event({"type": "error", "code": "server_error", "message": message, "param": None}, "error")

    async def events(self) -> AsyncIterator[bytes]:
        number = 0
        async for each in self._unnumbered():
            yield event({**each, "sequence_number": number}, each["type"])
            number += 1

    async def _unnumbered(self) -> AsyncIterator[dict[str, Any]]:
        begun = {**self._frame, "status": "in_progress", "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        if self._has_text:
            place = {"item_id": self._text_id, "output_index": 0, "content_index": 0}
            begun = self._message("in_progress", [])
            yield {"type": "response.output_item.added", "output_index": 0, "item": begun}
            yield {"type": "response.content_part.added", **place, "part": _text_part("")}
            async for piece in self._growing.pieces():
                yield {"type": "response.output_text.delta", **place, "delta": piece, "logprobs": []}
            text = self._growing.answer.text
            yield {"type": "response.output_text.done", **place, "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": _text_part(text)}
            yield {"type": "response.output_item.done", "output_index": 0, "item": self._text_item()}
        for index, item in enumerate(self._call_items(), int(self._has_text)):
            place = {"item_id": item["id"], "output_index": index}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield {"type": "response.output_item.added", "output_index": index, "item": begun}
            for piece in pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **place, "delta": piece}
            yield {"type": "response.function_call_arguments.done", **place, "name": item["name"],
                   "arguments": item["arguments"]}  # fmt: skip
            yield {"type": "response.output_item.done", "output_index": index, "item": item}
        whole = self.body()
        yield {"type": f"response.{whole['status']}", "response": whole}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
