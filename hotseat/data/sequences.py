"""Tokenisation of texts with known answers into sequences with an exact mask of the answers' tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat.data.chat_rendering import ChatTemplate, Messages
from hotseat.data.images import RowImages
from hotseat.data.row_problems import BadValue
from hotseat.errors import DataError

CHUNK = 1024  # texts tokenised in one call


@dataclass(frozen=True)
class Draft:
    """A text and the places of the answers in it, before tokenisation. Without places, all of it is learned."""

    key: str  # of the row
    text: str
    beginnings: tuple[str, ...] = ()  # of `text`: up to the first answer, to the end of it, up to the second, ...
    prompt: str | None = None  # the beginning of `text`; the rest is the answer
    marks: tuple[tuple[int, int], ...] = ()  # first and last + 1 character of each answer
    images: RowImages | None = None


@dataclass(frozen=True)
class TokenSequence:
    """Token ids, and a mask of those to learn."""

    token_ids: Tensor  # [num_tokens] int64
    mask: Tensor  # [num_tokens] bool
    is_truncated: bool
    num_tokens: int  # before it was cut
    first_answer_token: int  # index of the first token to learn, before it was cut
    images: tuple[str, ...] = ()


# --- drafts -----------------------------------------------------------------------------------------------------------


def chat_draft(template: ChatTemplate, messages: Messages, key: str, *, every_turn: bool) -> Draft:
    """Make the draft of a conversation whose last answer, or every answer, is to be learned."""
    if messages[-1]["role"] != "assistant":
        raise BadValue(f"{key}: the last message is by {messages[-1]['role']}, and there is no answer to learn")
    if template.marks_answers:
        text, marks = template.render_marked(messages, key)
        marks = [(begin, end) for begin, end in marks if end > begin]
        if not marks:
            raise BadValue(f"{key}: the chat template marks no text as the assistant's")
        return Draft(key, text, marks=tuple(marks if every_turn else marks[-1:]))
    text, turns = template.render(messages, key), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant" and (every_turn or number == len(messages) - 1):
            turns += [
                _beginning(template, messages[:number], text, key, for_generation=True),
                _beginning(template, messages[: number + 1], text, key, for_generation=False),
            ]
    return Draft(key, text, beginnings=tuple(turns))


def continued_draft(template: ChatTemplate, prompt: Messages, answer: Messages, key: str) -> Draft:
    """Make the draft of a conversation of which everything after `prompt` is to be learned."""
    text = template.render(prompt + answer, key)
    return Draft(key, text, beginnings=(_beginning(template, prompt, text, key, for_generation=True), text))


def _beginning(template: ChatTemplate, messages: Messages, text: str, key: str, *, for_generation: bool) -> str:
    """Render messages, and check that the text of the whole conversation begins with theirs."""
    part = template.render(messages, key, for_generation=for_generation) if messages else ""
    if text.startswith(part):
        return part
    same = next(at for at, (one, other) in enumerate(zip(part + "\0", text + "\0", strict=False)) if one != other)
    raise BadValue(
        f"{key}: the chat template renders the first {len(messages)} messages differently once more follow"
        f" ({part[same : same + 20]!r} becomes {text[same : same + 20]!r}), so the tokens of the answers are not known;"
        " mark the answers in the template by {% generation %}, or turn data.multiturn off"
    )


# --- tokens -----------------------------------------------------------------------------------------------------------


class Tokeniser:
    """Turns drafts into sequences of at most `max_length` tokens that end with one end-of-sequence token.

    A sequence that is cut does not end with that token, unless `keep_end` is set: then it replaces the last token.
    """

    def __init__(self, tokenizer: Any, max_length: int | None, *, keep_end: bool = False):
        if tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no end-of-sequence token, and a model"
                " cannot learn to stop without: set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._keep_end = keep_end

    def sequences(self, drafts: Sequence[Draft]) -> Iterator[TokenSequence | BadValue]:
        """Yield a sequence, or what is wrong, for each draft in order."""
        for begin in range(0, len(drafts), CHUNK):
            chunk = drafts[begin : begin + CHUNK]
            texts = [text for draft in chunk for text in self._texts(draft)]
            encoded = iter(encode(self._tokenizer, texts, with_offsets=any(draft.marks for draft in chunk)))
            for draft in chunk:
                parts = [next(encoded) for _ in self._texts(draft)]
                try:
                    yield self._sequence(draft, parts)
                except BadValue as error:
                    yield error

    def _texts(self, draft: Draft) -> tuple[str, ...]:
        return (draft.text, *draft.beginnings, *(() if draft.prompt is None else (draft.prompt,)))

    def _sequence(self, draft: Draft, parts: list[tuple[list[int], Any]]) -> TokenSequence:
        (ids, offsets), others = parts[0], [part for part, _ in parts[1:]]
        if draft.marks:
            spans = _spans_by_marks(draft, offsets)
        elif draft.prompt is not None:
            if ids[: len(others[0])] != others[0]:
                # An engine will get the prompt alone, so keep the prompt's own tokens and append the answer's.
                ids = others[0] + encode(self._tokenizer, [draft.text[len(draft.prompt) :]])[0][0]
            spans = [(len(others[0]), len(ids))]
        elif draft.beginnings:
            spans = [self._to_eos(ids, span) for span in _spans_by_beginnings(draft, ids, others)]
        else:
            spans = [(0, len(ids))]
        if draft.images is None:
            return self._finish(ids, spans)
        image_id = draft.images.image_token_id
        ids, begins = draft.images.expand(ids, draft.key)
        sequence = self._finish(ids, [(begins[begin], begins[end]) for begin, end in spans])
        last = max((at for at, token_id in enumerate(ids) if token_id == image_id), default=-1)
        if last >= len(sequence.token_ids):
            raise BadValue(
                f"{draft.key}: the images reach to token {last + 1}, and data.max_length {self._max_length} would cut"
                " them: raise it, or make the images smaller"
            )
        mask = sequence.mask & (sequence.token_ids != image_id)  # no placeholder is learned
        return replace(sequence, mask=mask, images=draft.images.paths)

    def _to_eos(self, ids: list[int], span: tuple[int, int]) -> tuple[int, int]:
        """Cut off what a template adds after the end of an answer, such as a line break, which no engine samples."""
        begin, end = span
        for at in range(end - 1, begin - 1, -1):
            if ids[at] == self._tokenizer.eos_token_id:
                return begin, at + 1
        return span

    def _finish(self, ids: list[int], spans: list[tuple[int, int]]) -> TokenSequence:
        end = spans[-1][1]
        ids = ids[:end]
        if not ids or ids[-1] != self._tokenizer.eos_token_id:
            ids = [*ids, self._tokenizer.eos_token_id]
        mask = torch.zeros(len(ids), dtype=torch.bool)
        for begin, stop in (*spans, (end, len(ids))):
            mask[begin:stop] = True
        mask[0] = False  # the first token has no log-prob, because nothing precedes it
        first = int(mask.to(torch.uint8).argmax())
        is_truncated = self._max_length is not None and len(ids) > self._max_length
        token_ids = torch.from_numpy(np.array(ids, dtype=np.int64))
        if is_truncated:
            token_ids, mask = token_ids[: self._max_length].clone(), mask[: self._max_length].clone()
            if self._keep_end:
                token_ids[-1] = self._tokenizer.eos_token_id
        return TokenSequence(token_ids, mask, is_truncated, len(ids), first)


def encode(tokenizer: Any, texts: list[str], *, with_offsets: bool = False) -> list[tuple[list[int], Any]]:
    """Return the token ids of each text, without added tokens, and the character range of each token if asked for."""
    if not texts:
        return []
    encoded = tokenizer(
        texts, add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=with_offsets, verbose=False
    )
    offsets = encoded["offset_mapping"] if with_offsets else [None] * len(texts)
    return list(zip(encoded["input_ids"], offsets, strict=True))


def _spans_by_beginnings(draft: Draft, ids: list[int], beginnings: list[list[int]]) -> list[tuple[int, int]]:
    for text, part in zip(draft.beginnings, beginnings, strict=True):
        if ids[: len(part)] != part:
            raise BadValue(
                f"{draft.key}: the tokens of the conversation do not begin with those of its part up to"
                f" {text[-20:]!r}: a token reaches over into {draft.text[len(text) : len(text) + 20]!r}, so the tokens"
                " of the answer are not known; let the chat template end the text before an answer with a special token"
                " or without a space, or mark the answers in it by {% generation %}"
            )
    ends = [len(part) for part in beginnings]
    return list(zip(ends[::2], ends[1::2], strict=True))


def _spans_by_marks(draft: Draft, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    spans = []
    for begin, end in draft.marks:
        inside = [at for at, (first, last) in enumerate(offsets) if first < end and last > begin]
        for at in inside[:1] + inside[-1:]:
            first, last = offsets[at]
            if first < begin or last > end:
                raise BadValue(
                    f"{draft.key}: token {draft.text[first:last]!r} reaches over the edge of the assistant's text"
                    f" {draft.text[begin:end][:20]!r}..., so it is only partly the assistant's; let the chat template"
                    " put a special token or a line break there"
                )
        if inside:
            spans.append((inside[0], inside[-1] + 1))
    if not spans:
        raise BadValue(f"{draft.key}: the assistant's text has no tokens")
    return spans
