"""`/v1/chat/completions` and `/v1/completions`, as OpenAI's and vLLM's clients use them."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

from hotseat.agents.gateway import fields
from hotseat.agents.gateway.fields import OWN_SETTINGS, Asked, BadRequest, own_settings
from hotseat.agents.gateway.program_session import ProgramSession
from hotseat.agents.gateway.reply import Begin, ClientAnswer, GrowingAnswer, Reply, event, reply_to

# Understood, without an effect here: who asks, where it is kept, and a seed, since each request has one by its sample.
_WITHOUT_EFFECT = (
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "seed",
    "prompt_cache_retention",
)  # fmt: skip
_SHARED = (*_WITHOUT_EFFECT, *OWN_SETTINGS, "n", "stop", "stream", "stream_options", "logprobs", "return_token_ids",
           "learn")  # fmt: skip
_CHAT = (*_SHARED, "messages", "max_tokens", "max_completion_tokens", "top_logprobs", "tools", "chat_template_kwargs",
         "modalities")  # fmt: skip
_TEXT = (*_SHARED, "prompt", "max_tokens", "best_of", "echo", "suffix")
_NUMBERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_p")


async def chat(body: Mapping[str, Any], session: ProgramSession, begin: Begin | None = None) -> Reply:
    _check(body, _CHAT)
    if fields.integer(body, "top_logprobs", least=0):
        raise BadRequest("top_logprobs: the engine reports log-probs of sampled tokens only", "top_logprobs")
    if body.get("modalities") not in (None, ["text"]):
        raise BadRequest("modalities: only text is possible here", "modalities")
    if fields.flag(body, "logprobs"):
        begin = None  # they are sent with the whole text
    options = body.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadRequest("chat_template_kwargs: not an object", "chat_template_kwargs")
    asked = Asked(
        messages=fields.messages(body.get("messages")),
        tools=fields.tools(body),
        options=options,
        num_answers=fields.integer(body, "n", most=fields.MAX_ANSWERS) or 1,
        max_tokens=fields.integer(body, "max_completion_tokens") or fields.integer(body, "max_tokens"),
        stop=fields.stops(body),
        own=own_settings(body, session.sampling),
        is_learned=fields.flag(body, "learn", default=True),
    )
    return await reply_to(asked, session, partial(_Chat, body, session), begin)


async def completions(body: Mapping[str, Any], session: ProgramSession, begin: Begin | None = None) -> Reply:
    """Answer a request to continue one or several texts."""
    _check(body, _TEXT)
    for name in ("echo", "suffix"):
        if body.get(name):
            raise BadRequest(f"{name}: not supported by this gateway", name)
    number = fields.integer(body, "n", most=fields.MAX_ANSWERS) or 1
    if (fields.integer(body, "best_of") or number) != number:
        raise BadRequest("best_of: only the value of n is possible, because every answer is learned from", "best_of")
    if fields.integer(body, "logprobs", least=0):
        raise BadRequest(
            "logprobs: only 0 is possible: the engine reports log-probs of sampled tokens only", "logprobs"
        )
    asked = Asked(
        num_answers=number,
        max_tokens=fields.integer(body, "max_tokens") or 16,  # the protocol's default
        stop=fields.stops(body),
        own=own_settings(body, session.sampling),
        is_learned=fields.flag(body, "learn", default=True),
    )
    requests = [replace(asked, **prompt) for prompt in _prompts(body.get("prompt"))]
    if len(requests) == 1 and body.get("logprobs") is None:
        return await reply_to(requests[0], session, partial(_Text, body, session), begin)
    answers = await asyncio.gather(*(session.answer(request) for request in requests))
    return _Text(body, session, [GrowingAnswer.complete(answer) for several in answers for answer in several])


def _check(body: Mapping[str, Any], known: tuple[str, ...]) -> None:
    fields.check(body, known, _NUMBERS)
    fields.flag(body, "return_token_ids")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise BadRequest("stream_options: not an object", "stream_options")


def _prompts(value: Any) -> list[dict[str, Any]]:
    """Return the texts or token ids of a prompt: one, or a list of several."""

    def is_tokens(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(type(token) is int and token >= 0 for token in value)

    if isinstance(value, str) or is_tokens(value):
        value = [value]
    if isinstance(value, list) and value and len(value) <= fields.MAX_ANSWERS:
        if all(isinstance(prompt, str) for prompt in value):
            return [{"text": prompt} for prompt in value]
        if all(is_tokens(prompt) for prompt in value):
            return [{"token_ids": prompt} for prompt in value]
    raise BadRequest("prompt: neither a text, nor token ids, nor a list of either", "prompt")


class _OpenAI(Reply):
    """Common part of the replies to chats and to completions."""

    name = chunk_name = prefix = ""

    def __init__(self, body: Mapping[str, Any], session: ProgramSession, answers: Sequence[GrowingAnswer]):
        super().__init__(answers)
        options = body.get("stream_options") or {}
        self._session = session
        self._has_log_probs = body.get("logprobs") is not None and body["logprobs"] is not False  # 0 asks for them
        self._shows_tokens = bool(body.get("return_token_ids"))
        self._shows_usage = bool(options.get("include_usage"))
        self._frame = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": str(body.get("model") or "policy"),
        }

    def body(self) -> dict[str, Any]:
        answers = [growing.answer for growing in self.answers]
        choices = [
            {"index": at, **self._shown(each), "logprobs": self._log_probs(each), "finish_reason": _finish(each)}
            | self._tokens(each)
            for at, each in enumerate(answers)
        ]
        shown = {"prompt_token_ids": list(answers[0].context)} if self._shows_tokens else {}
        return {**self._frame, "object": self.name, "choices": choices, "usage": usage(answers), **shown}

    async def events(self) -> AsyncIterator[bytes]:
        frame = {**self._frame, "object": self.chunk_name}
        shown = {"prompt_token_ids": list(self.answers[0].context)} if self._shows_tokens else {}  # in the first chunk
        for index, growing in enumerate(self.answers):
            async for choice in self._parts(growing):
                yield event({**frame, "choices": [{"index": index, "finish_reason": None, **choice}], **shown})
                shown = {}
        if self._shows_usage:
            yield event({**frame, "choices": [], "usage": usage([growing.answer for growing in self.answers])})
        yield event("[DONE]")

    def _tokens(self, answer: ClientAnswer) -> dict[str, Any]:
        return {"token_ids": list(answer.token_ids)} if self._shows_tokens else {}

    def _log_probs(self, answer: ClientAnswer) -> dict[str, Any] | None:
        if not self._has_log_probs:
            return None
        texts = [self._session.token_text(token) for token in answer.token_ids]
        return self._listed(texts, list(answer.log_probs))

    @abstractmethod
    def _shown(self, answer: ClientAnswer) -> dict[str, Any]:
        """Return what an answer's entry of `choices` has of its own."""

    @abstractmethod
    def _listed(self, texts: list[str], log_probs: list[float]) -> dict[str, Any]:
        """Return log-probs in the form of this protocol, with the texts of their tokens."""

    @abstractmethod
    def _parts(self, growing: GrowingAnswer) -> AsyncIterator[dict[str, Any]]:
        """Yield what differs between the chunks of one answer."""


class _Chat(_OpenAI):
    name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _shown(self, answer: ClientAnswer) -> dict[str, Any]:
        return {"message": {"refusal": None, **answer.message}}

    async def _parts(self, growing: GrowingAnswer) -> AsyncIterator[dict[str, Any]]:
        yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        if growing.is_complete and growing.answer.reasoning:
            yield {"delta": {"reasoning_content": growing.answer.reasoning}}
        if self._has_log_probs:
            yield {"delta": {"content": growing.answer.text}, "logprobs": self._log_probs(growing.answer)}
        else:
            async for text in growing.pieces():
                yield {"delta": {"content": text}, "logprobs": None}
        answer = growing.answer
        for at, call in enumerate(answer.tool_calls):
            yield {"delta": {"tool_calls": [{"index": at, "type": "function", **call}]}}
        yield {"delta": {}, "finish_reason": _finish(answer), **self._tokens(answer)}

    def _listed(self, texts: list[str], log_probs: list[float]) -> dict[str, Any]:
        shown = [
            {"token": text, "logprob": log_prob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, log_prob in zip(texts, log_probs, strict=True)
        ]
        return {"content": shown, "refusal": None}


class _Text(_OpenAI):
    name, chunk_name, prefix = "text_completion", "text_completion", "cmpl"

    def _shown(self, answer: ClientAnswer) -> dict[str, Any]:
        return {"text": answer.text} | ({"prompt_token_ids": list(answer.context)} if self._shows_tokens else {})

    async def _parts(self, growing: GrowingAnswer) -> AsyncIterator[dict[str, Any]]:
        if self._has_log_probs:
            yield {"text": growing.answer.text, "logprobs": self._log_probs(growing.answer)}
        else:
            async for text in growing.pieces():
                yield {"text": text, "logprobs": None}
        answer = growing.answer
        yield {"text": "", "logprobs": None, "finish_reason": _finish(answer), **self._tokens(answer)}

    def _listed(self, texts: list[str], log_probs: list[float]) -> dict[str, Any]:
        offsets = list(accumulate(map(len, texts), initial=0))[:-1]
        return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": offsets}


def _finish(answer: ClientAnswer) -> str:
    if answer.tool_calls:
        return "tool_calls"
    return "length" if answer.is_cut else "stop"


def usage(answers: list[ClientAnswer]) -> dict[str, Any]:
    """Return the numbers of tokens of a request. A context that several answers follow counts once."""
    read = sum(map(len, {answer.context for answer in answers}))
    sampled = sum(len(answer.token_ids) for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
