"""Requests of clients, whichever protocol they speak, and readers of their fields."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from hotseat.types import Sampling

MAX_ANSWERS = 128  # of one request
_MAX_STOPS = 16
_LEAST = 64  # characters that a message takes at least, with what a template writes around it


class BadRequest(Exception):
    """A request that cannot be answered, with the reason for the client. param: the part of the body at fault."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


@dataclass(frozen=True)
class Asked:
    """A request for answers to messages, to a text, or to tokens: one of the three is set."""

    messages: Sequence[Mapping[str, Any]] | None = None
    text: str | None = None
    token_ids: Sequence[int] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    num_answers: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    own: Mapping[str, Any] = field(default_factory=dict)  # settings by which the client would sample differently
    is_learned: bool = True  # False: the client wants the answer as context only, such as that of an opponent

    @property
    def num_characters(self) -> float:
        """Return about how long the context is; infinity if it is more than plain text."""
        if self.messages is None:
            return len(self.text or "") + 4 * len(self.token_ids or ())
        contents = [message.get("content") for message in self.messages]
        if self.tools or any(message.get("tool_calls") for message in self.messages):
            return inf
        others = [content for content in contents if content is not None and not isinstance(content, str)]
        return inf if others else sum(_LEAST + len(content or "") for content in contents)


# Settings that change the distribution, and the values of each that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    **dict.fromkeys(("reasoning_effort", "verbosity", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
}
OWN_SETTINGS = ("temperature", "top_p", *_NEUTRAL)
CAN_BE_SAMPLED = ("temperature", "top_p", "top_k")  # the engine can apply these


def own_settings(body: Mapping[str, Any], run: Sampling) -> dict[str, Any]:
    """Return the settings of a request by which it would be sampled from another distribution than the run's."""
    neutral = {**_NEUTRAL, "temperature": (run.temperature,), "top_p": (run.top_p,)}
    neutral["top_k"] = (run.top_k, -1) if run.top_k == 0 else (run.top_k,)
    return {
        name: value
        for name, value in body.items()
        if name in neutral and value is not None and value not in neutral[name]
    }


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
        if calls is not None and not (isinstance(calls, list) and all(map(_names_a_function, calls))):
            raise BadRequest(f"{where}.tool_calls: not a list of calls of functions", where)
        if message.get("content") is None and not calls:
            raise BadRequest(f"{where}: neither content nor tool calls", where)
    # "developer" is OpenAI's newer name, which chat templates do not know.
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in value]


def _names_a_function(tool_or_call: Any) -> bool:
    function = tool_or_call.get("function") if isinstance(tool_or_call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def tools(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the functions that the model may call; none if the choice is `none`."""
    value = body.get("tools")
    if not value or body.get("tool_choice") == "none":
        return []
    if not (isinstance(value, list) and all(map(_names_a_function, value))):
        raise BadRequest("tools: not a list of functions with names; other kinds of tools are not supported", "tools")
    return value
