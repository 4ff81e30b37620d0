"""Examples for supervised training, made from rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from hotseat.data.chat_rendering import ChatTemplate, messages_of
from hotseat.data.prompts import check_input_template, fill_in
from hotseat.data.row_problems import BadValue, LostRow, RowReport, from_rows, text_of
from hotseat.data.rows import Row
from hotseat.data.sequences import Draft, Tokeniser, TokenSequence, chat_draft
from hotseat.errors import DataError


@dataclass(frozen=True, eq=False)
class Example:
    """One token sequence, and a mask of the tokens to learn."""

    token_ids: Tensor  # [num_tokens] int64
    mask: Tensor  # [num_tokens] bool: learn this token; never the first, which has no log-prob
    where: str  # file and line of its row
    images: tuple[str, ...] = ()  # of the placeholders among the tokens, in order


def make_examples(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    input_key: str = "input",
    output_key: str | None = None,
    input_template: str | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    max_length: int | None = None,
    multiturn: bool = False,
    pretrain_mode: bool = False,
    image_key: str | None = None,
) -> tuple[list[Example], RowReport]:
    """Make examples in the order of the rows. The learned tokens end with one end-of-sequence token.

    - `apply_chat_template`: the input is a list of messages that ends with the answer; or, with `output_key`, messages
      or a string, and the output is the answer. The last answer is learned, or every one with `multiturn`. Answers are
      found by the marks of the template (`{% generation %}`) if it has them; otherwise the conversation is rendered up
      to each answer and has to begin with exactly these tokens, or an error says why it does not.
    - otherwise the input, put into `input_template`, is followed by the output, which is learned. Without `output_key`
      all of it is learned.
    - `pretrain_mode`: all of it is learned.

    A sequence longer than `max_length` is cut, and then does not end with the end-of-sequence token. image_key: the
    rows went through `images.prepare_rows`, which left their images there.
    """
    if multiturn and not apply_chat_template:
        raise DataError("data.multiturn needs messages: set data.apply_chat_template")
    template = ChatTemplate(tokenizer, chat_template) if apply_chat_template else None
    check_input_template(input_template)
    tokeniser = Tokeniser(tokenizer, max_length)

    def draft_of(values: Mapping[str, Any]) -> Draft:
        if template is None:
            prompt = fill_in(input_template, text_of(values, input_key))
            if output_key is None:
                return Draft(input_key, prompt)
            text = prompt + text_of(values, output_key)
            return Draft(input_key, text) if pretrain_mode else Draft(output_key, text, prompt=prompt)
        answers = [] if output_key is None else messages_of(values, output_key, "assistant")
        messages = messages_of(values, input_key, "user") + answers
        if pretrain_mode:
            return Draft(input_key, template.render(messages, input_key))
        return chat_draft(template, messages, output_key or input_key, every_turn=multiturn)

    examples, report = [], RowReport(len(rows))
    for row, sequence in zip(rows, sequences_of(rows, draft_of, tokeniser, image_key), strict=True):
        has_answer = bool(sequence.mask.any())
        report.longest = max(report.longest, sequence.num_tokens)
        if sequence.is_truncated:
            report.add(partial(lost_row, row, draft_of, sequence), is_dropped=not has_answer)
        if has_answer:
            examples.append(Example(sequence.token_ids, sequence.mask, row.where, sequence.images))
    if not examples:
        raise DataError(
            f"none of the {len(rows)} rows has an answer within data.max_length {max_length}{report.example}"
        )
    report.num_kept, report.num_no_answer = len(examples), len(rows) - len(examples)
    return examples, report


def lost_row(row: Row, draft_of: Callable[[Mapping[str, Any]], Draft], sequence: TokenSequence) -> LostRow:
    """Describe the row of a sequence that was cut, for messages."""
    draft = draft_of(row.values)
    has_prompt = draft.prompt is not None or bool(draft.beginnings) or bool(draft.marks)
    first = sequence.first_answer_token if has_prompt else None
    return LostRow(row.where, row.values, draft.text, sequence.num_tokens, first)


def sequences_of(
    rows: Sequence[Row], draft_of: Callable[[Mapping[str, Any]], Draft], tokeniser: Tokeniser, image_key: str | None
) -> list[TokenSequence]:
    """Return a sequence for each row, or raise one error with all problems of the rows."""

    def draft(row: Row) -> Draft:
        draft = draft_of(row.values)
        return draft if image_key is None else replace(draft, images=row.values[image_key])

    def unless_bad(row: Row, sequence: TokenSequence | BadValue) -> TokenSequence:
        if isinstance(sequence, BadValue):
            raise sequence
        return sequence

    return from_rows(rows, unless_bad, list(tokeniser.sequences(from_rows(rows, draft))))
