"""Reading the fields of a request, with errors for the client."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import inf
from typing import Any

from hotseat.agents.gateway.asking import BadRequest

MAX_ANSWERS = 128  # of one request
_MAX_STOPS = 16


def check(body: Mapping[str, Any], known: Collection[str], numbers: Sequence[str]) -> None:
    """Refuse fields that are not understood, unless they are null, and numbers that are none."""
    unknown = sorted(name for name, value in body.items() if name not in known and value is not None)
    if unknown:
        raise BadRequest(f"{', '.join(unknown)}: not supported by this gateway", unknown[0])
    flag(body, "stream")
    for name in numbers:
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or abs(value) == inf):
            raise BadRequest(f"{name}: {value!r:.80} is not a number", name)


def integer(body: Mapping[str, Any], name: str, *, least: int = 1, most: int | None = None) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"from {least} to {most}"
        raise BadRequest(f"{name}: {value!r:.80} is not a whole number {bounds}", name)
    return value


def flag(body: Mapping[str, Any], name: str, *, default: bool = False) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name}: {value!r:.80} is neither true nor false", name)
    return default if value is None else value


def stops(body: Mapping[str, Any], name: str = "stop") -> tuple[str, ...]:
    """Return stop strings: a string, or a list of strings."""
    value = body.get(name)
    if value is None:
        return ()
    listed = [value] if isinstance(value, str) else value
    if not isinstance(listed, list) or len(listed) > _MAX_STOPS or not all(isinstance(s, str) and s for s in listed):
        raise BadRequest(f"{name}: not a string, nor a list of at most {_MAX_STOPS} strings", name)
    return tuple(listed)


def messages(value: Any, name: str = "messages") -> list[dict[str, Any]]:
    """Return checked messages of a chat: each with a role, content, and tool calls of functions."""
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name}: not a list with at least one message", name)
    for at, message in enumerate(value):
        where = f"{name}[{at}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRequest(f"{where}: not an object with a role", where)
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(_is_call(call) for call in calls)):
            raise BadRequest(f"{where}.tool_calls: not a list of calls of functions", where)
        if message.get("content") is None and not calls:
            raise BadRequest(f"{where}: neither content nor tool calls", where)
    # "developer" is OpenAI's newer name, which chat templates do not know.
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in value]


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the model may call; none if the choice is `none`."""
    value = body.get("tools")
    if not value or body.get("tool_choice") == "none":
        return []
    for tool in value if isinstance(value, list) else [None]:
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequest(
                "tools: not a list of functions with names; other kinds of tools are not supported", "tools"
            )
    return value
