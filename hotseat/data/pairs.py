"""Pairs of a better and a worse answer, made from rows, for reward models and preference optimisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from hotseat.data._chat import ChatTemplate, messages_of
from hotseat.data._problems import BadValue, kind_of, text_of, value_of
from hotseat.data._sequences import Draft, Tokeniser, chat_draft, continued_draft, plain_draft, whole_draft
from hotseat.data.examples import Example, lost_row, sequences_of
from hotseat.data.lost import Lost, LostCount, shown
from hotseat.data.prompts import check_input_template, fill_in
from hotseat.data.rows import Row
from hotseat.errors import DataError


@dataclass(frozen=True, eq=False)
class Pair:
    """Two answers to one prompt. The masks are of the answers' tokens."""

    chosen: Example
    rejected: Example
    margin: float = 0.0  # how much better, for reward models that use it


@dataclass(frozen=True)
class PairReport:
    """Counts of rows that were kept, cut and dropped."""

    num_rows: int
    num_pairs: int
    num_truncated: int  # kept, with one answer or both cut at `max_length`
    num_dropped_no_answer: int  # the prompt leaves no room for an answer
    num_dropped_identical: int  # both answers are the same within `max_length`
    lost: Lost


def make_pairs(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    chosen_key: str = "chosen",
    rejected_key: str = "rejected",
    prompt_key: str | None = None,
    margin_key: str = "margin",
    input_template: str | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    max_length: int | None = None,
    keep_end: bool = False,
) -> tuple[list[Pair], PairReport]:
    """Make pairs in the order of the rows.

    With `apply_chat_template` an answer is messages (or a string) that follow the messages (or string) under
    `prompt_key`; without `prompt_key` it is a whole conversation, of which the last message is the answer. Otherwise
    an answer is a string after the prompt, which is put into `input_template`, or by itself. A row may have a number
    under `margin_key`.

    With `keep_end` a sequence that is cut at `max_length` ends with the end-of-sequence token like any other: a reward
    is read there.
    """
    template = ChatTemplate(tokenizer, chat_template) if apply_chat_template else None
    check_input_template(input_template)
    tokeniser = Tokeniser(tokenizer, max_length, keep_end=keep_end)

    def draft_of(values: Mapping[str, Any], key: str) -> Draft:
        if template is None:
            answer = text_of(values, key)
            if prompt_key is None:
                return whole_draft(answer, key)
            return plain_draft(fill_in(input_template, text_of(values, prompt_key)), answer, key)
        if prompt_key is not None:
            answers = messages_of(values, key, "assistant")
            return continued_draft(template, messages_of(values, prompt_key, "user"), answers, key)
        if isinstance(value_of(values, key), str):
            raise BadValue(f"{key}: a string: with data.apply_chat_template set data.prompt_key, or give messages")
        return chat_draft(template, messages_of(values, key, "user"), key, every_turn=False)

    chosen = sequences_of(rows, lambda values: draft_of(values, chosen_key), tokeniser)
    rejected = sequences_of(rows, lambda values: draft_of(values, rejected_key), tokeniser)
    pairs, num_truncated, num_no_answer, num_identical, count = [], 0, 0, 0, LostCount()
    for row, better, worse in zip(rows, chosen, rejected, strict=True):
        is_pair = bool(better.mask.any() and worse.mask.any()) and not torch.equal(better.token_ids, worse.token_ids)
        longer, key = (better, chosen_key) if better.num_tokens >= worse.num_tokens else (worse, rejected_key)
        count.see(longer.num_tokens)
        if better.is_truncated or worse.is_truncated:
            count.add(partial(lost_row, row, partial(draft_of, key=key), longer), is_dropped=not is_pair)
        if not better.mask.any() or not worse.mask.any():
            num_no_answer += 1
        elif torch.equal(better.token_ids, worse.token_ids):
            num_identical += 1
        else:
            num_truncated += better.is_truncated or worse.is_truncated
            pairs.append(
                Pair(
                    Example(better.token_ids, better.mask, row.where),
                    Example(worse.token_ids, worse.mask, row.where),
                    _margin(row, margin_key),
                )
            )
    lost = count.total()
    if not pairs:
        raise DataError(
            f"none of the {len(rows)} rows is a pair: {num_identical} have the same answer twice and {num_no_answer}"
            f" have none within data.max_length {max_length}{shown(lost)}"
        )
    return pairs, PairReport(len(rows), len(pairs), num_truncated, num_no_answer, num_identical, lost)


def _margin(row: Row, key: str) -> float:
    value = row.values.get(key)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{row.where}: {key}: {kind_of(value)} {value!r}, not a finite number")
    return float(value)
