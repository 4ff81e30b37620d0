"""Pairs of a better and a worse answer, made from rows, for reward models and preference optimisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hotseat.data.chat_rendering import ChatTemplate, messages_of
from hotseat.data.examples import Example, lost_row, sequences_of
from hotseat.data.prompts import check_input_template, fill_in
from hotseat.data.row_problems import BadValue, RowReport, kind_of, text_of, value_of
from hotseat.data.rows import Row
from hotseat.data.sequences import Draft, Tokeniser, TokenSequence, chat_draft, continued_draft
from hotseat.errors import DataError


@dataclass(frozen=True, eq=False)
class Pair:
    """Two answers to one prompt. The masks are of the answers' tokens."""

    chosen: Example
    rejected: Example
    margin: float = 0.0  # how much better, for reward models that use it


def make_pairs(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    prompt_key: str | None = None,
    input_template: str | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_length: int | None = None,
    keep_end: bool = False,
    is_preference: bool = False,
    image_key: str | None = None,
) -> tuple[list[Pair], RowReport]:
    """Make pairs in the order of the rows.

    With `apply_chat_template` an answer is messages (or a string) that follow the messages (or string) under
    `prompt_key`; without `prompt_key` it is a whole conversation, of which the last message is the answer. Otherwise
    an answer is a string after the prompt, which is put into `input_template`, or by itself. A row may have a number
    under "margin".

    With `keep_end` a sequence that is cut at `max_length` ends with the end-of-sequence token like any other: a reward
    is read there.

    is_preference: the answers are learned token by token, so both need a prompt, and no two may be the same. Without
    `prompt_key` the prompt is what both begin with, tokens of a text or messages of a conversation, as in TRL.

    image_key: the rows went through `images.prepare_rows`, which left their images there.
    """
    template = ChatTemplate(tokenizer, chat_template, chat_template_kwargs) if apply_chat_template else None
    check_input_template(input_template)
    tokeniser = Tokeniser(tokenizer, max_length, keep_end=keep_end)
    form = _Form(chosen_key, rejected_key, prompt_key, input_template, template, is_preference)
    both = [
        sequences_of(rows, partial(form.draft, key=key), tokeniser, image_key) for key in (chosen_key, rejected_key)
    ]
    pairs, report = [], RowReport(len(rows))
    for row, better, worse in zip(rows, *both, strict=True):
        if is_preference and template is None and prompt_key is None:
            better, worse = _without_common(better, worse)
        has_answers = bool(better.mask.any() and worse.mask.any())
        are_same = torch.equal(better.token_ids, worse.token_ids)
        longer, key = (better, chosen_key) if better.num_tokens >= worse.num_tokens else (worse, rejected_key)
        report.longest = max(report.longest, longer.num_tokens)
        if better.is_truncated or worse.is_truncated:
            lost = partial(lost_row, row, partial(form.draft, key=key), longer)
            report.add(lost, is_dropped=not has_answers or are_same)
        if not has_answers:
            report.num_no_answer += 1
        elif are_same:
            report.num_identical += 1
        else:
            chosen, rejected = (Example(each.token_ids, each.mask, row.where, each.images) for each in (better, worse))
            pairs.append(Pair(chosen, rejected, _margin(row)))
    if not pairs:
        raise DataError(
            f"none of the {len(rows)} rows is a pair: {report.num_identical} have the same answer twice and"
            f" {report.num_no_answer} have none within data.max_length {max_length}{report.example}"
        )
    report.num_kept = len(pairs)
    return pairs, report


_PROMPT_HINT = "set data.prompt_key to the column of the prompt, or put the prompt before both answers"


@dataclass(frozen=True)
class _Form:
    """How rows hold pairs: the arguments of `make_pairs`."""

    chosen_key: str
    rejected_key: str
    prompt_key: str | None
    input_template: str | None
    template: ChatTemplate | None
    is_preference: bool

    def draft(self, values: Mapping[str, Any], key: str) -> Draft:
        if self.is_preference:
            check = self._check_texts if self.template is None else self._check_messages
            check(values)
        if self.template is None:
            answer = text_of(values, key)
            if self.prompt_key is None:
                return Draft(key, answer)
            prompt = fill_in(self.input_template, text_of(values, self.prompt_key))
            return Draft(key, prompt + answer, prompt=prompt)
        if self.prompt_key is not None:
            answers = messages_of(values, key, "assistant")
            return continued_draft(self.template, messages_of(values, self.prompt_key, "user"), answers, key)
        if isinstance(value_of(values, key), str):
            raise BadValue(f"{key}: a string: with data.apply_chat_template set data.prompt_key, or give messages")
        messages = messages_of(values, key, "user")
        if self.is_preference:
            other = messages_of(values, self.rejected_key if key == self.chosen_key else self.chosen_key, "user")
            num_common = _num_common(messages, other)
            if len(messages) - num_common > 1:
                return continued_draft(self.template, messages[:num_common], messages[num_common:], key)
        return chat_draft(self.template, messages, key, every_turn=False)

    def _check_texts(self, values: Mapping[str, Any]) -> None:
        """Raise unless a row has two different texts as answers to a prompt."""
        chosen, rejected = text_of(values, self.chosen_key), text_of(values, self.rejected_key)
        if chosen == rejected:
            raise BadValue(f"{self._both} are the same: a preference needs two different answers")
        if self.prompt_key is not None:
            return
        prompt = values.get("prompt")
        if isinstance(prompt, str) and prompt and not (chosen.startswith(prompt) and rejected.startswith(prompt)):
            raise BadValue(
                f"prompt: neither the beginning of both answers nor named as data.prompt_key: {_PROMPT_HINT}"
            )
        if chosen[0] != rejected[0]:
            raise BadValue(f"{self._both} have no common beginning that would be the prompt: {_PROMPT_HINT}")

    def _check_messages(self, values: Mapping[str, Any]) -> None:
        """Raise unless a row has two different answers to a prompt, or conversations that end with them."""
        if value_of(values, self.chosen_key) == value_of(values, self.rejected_key):
            raise BadValue(f"{self._both} are the same: a preference needs two different answers")
        answers = {key: messages_of(values, key, "assistant") for key in (self.chosen_key, self.rejected_key)}
        for key, messages in answers.items():
            if not messages[-1].get("content") and not messages[-1].get("tool_calls"):
                raise BadValue(f"{key}[{len(messages) - 1}]: content is empty")
            if self.prompt_key is not None and messages[0]["role"] != "assistant":
                raise BadValue(
                    f"{key}: begins with a message by {messages[0]['role']}, but data.prompt_key {self.prompt_key!r}"
                    " has the prompt: give the answer alone, or leave data.prompt_key unset for whole conversations"
                )
        if self.prompt_key is not None or any(isinstance(values[key], str) for key in answers):
            return
        num_common = _num_common(*answers.values())
        if num_common == 0:
            raise BadValue(f"{self._both} have no message in common that would be the prompt: {_PROMPT_HINT}")
        for key, messages in answers.items():
            if len(messages) == num_common:
                raise BadValue(f"{key}: no answer, only the messages with which both conversations begin")
            if messages[num_common]["role"] != "assistant":
                raise BadValue(
                    f"{key}[{num_common}]: by {messages[num_common]['role']}: chosen and rejected must diverge at an"
                    " assistant message"
                )

    @property
    def _both(self) -> str:
        return f"{self.chosen_key} and {self.rejected_key}"


def _num_common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Count the elements that both sequences begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _without_common(better: TokenSequence, worse: TokenSequence) -> tuple[TokenSequence, TokenSequence]:
    """Take the tokens with which both sequences begin out of their masks: they are the prompt."""
    num_common = _num_common(better.token_ids.tolist(), worse.token_ids.tolist())

    def without(sequence: TokenSequence) -> TokenSequence:
        is_answer = torch.arange(len(sequence.mask)) >= num_common
        return replace(sequence, mask=sequence.mask & is_answer, first_answer_token=num_common)

    return without(better), without(worse)


def _margin(row: Row) -> float:
    value = row.values.get("margin")
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.where}: margin: {kind_of(value)} {value!r}, not a finite number")
    return float(value)
