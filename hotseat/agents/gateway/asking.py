"""What a client asks for and what it gets, whichever protocol it speaks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotseat.types import Sampling


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


@dataclass(frozen=True)
class ClientAnswer:
    """One answer to a client."""

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
        """Return the answer as a message of the conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [{"type": "function", **call} for call in self.tool_calls]
        return message | ({} if self.reasoning is None else {"reasoning_content": self.reasoning})


# Settings that change the distribution, and the values of each that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "reasoning_effort": (),
    "verbosity": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
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
