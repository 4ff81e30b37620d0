"""Prompts, made from rows: rendered and tokenised here, once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hotseat.data.chat_rendering import ChatTemplate, messages_of
from hotseat.data.columns import NotPassed, passed
from hotseat.data.images import RowImages
from hotseat.data.row_problems import BadValue, LostRow, RowReport, from_rows, text_of, value_of
from hotseat.data.rows import Row
from hotseat.data.sequences import CHUNK, encode
from hotseat.errors import DataError
from hotseat.types import Prompt

_SOURCE_KEYS = ("datasource", "data_source")


def make_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    input_template: str | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    prompt_max_length: int | None = None,
    limit: tuple[str, str] = ("", "raise data.prompt_max_length"),
    image_key: str | None = None,
    columns: Sequence[str] | None = None,
    answer_key: str | None = None,
    teacher_key: str | None = None,
) -> tuple[list[Prompt], RowReport]:
    """Make prompts in the order of the rows; `index` counts those that are kept.

    With `apply_chat_template` the input is a list of messages, or a string that becomes the user's message, and
    `input_template` is not used; otherwise the input is a string that replaces the `{}` in `input_template`. No special
    tokens are added to those in the text. The other keys name columns of rows:

    - label_key: labels, kept as they are; None: labels are ""
    - answer_key: answers that the data gives, tokenised by themselves, with an end token; a row may have none
    - teacher_key: inputs that a teacher reads instead, rendered like the others; a row may have none
    - image_key: images, which `images.prepare_rows` has left there
    - columns: kept for functions, None where a row lacks one, as in `datasets`; None: no column is kept

    limit: the option that sets `prompt_max_length`, and how to raise it, for the error if every prompt is too long.
    """
    template = ChatTemplate(tokenizer, chat_template, chat_template_kwargs) if apply_chat_template else None
    check_input_template(input_template)
    form = _Form(input_key, label_key, answer_key, teacher_key, columns, template, input_template)
    drafts = from_rows(rows, form.draft)
    encoded = _encoded(tokenizer, [draft.text for draft in drafts])
    answers = _encoded(tokenizer, [draft.answer for draft in drafts])
    teacher_prompts = _encoded(tokenizer, [draft.teacher_text for draft in drafts])
    prompts: list[Prompt] = []
    report = RowReport(len(rows))

    def add(row: Row, draft: _Draft, ids: list[int], answer: list[int], teacher_ids: list[int]) -> None:
        images: RowImages | None = None if image_key is None else row.values[image_key]
        ids = _with_images(ids, images, draft.text, input_key)
        report.longest = max(report.longest, len(ids))
        if prompt_max_length is not None and len(ids) > prompt_max_length:
            report.add(partial(LostRow, row.where, row.values, draft.text, len(ids)), is_dropped=True)
            return
        source = str(next((row.values[key] for key in _SOURCE_KEYS if row.values.get(key) is not None), ""))
        paths = () if images is None else images.paths
        ended = (*answer, tokenizer.eos_token_id) if answer else ()
        known = (draft.text, tuple(ids), draft.label, source, paths, draft.columns, ended, tuple(teacher_ids))
        prompts.append(Prompt(len(prompts), *known))

    from_rows(rows, add, drafts, encoded, answers, teacher_prompts)
    if not prompts:
        source, fix = limit
        because = f", the limit by {source}" if source else ""
        why = f" with at most {prompt_max_length} tokens{because}: {fix}" if report.num_lost else ""
        raise DataError(f"none of the {len(rows)} rows is a prompt{why}{report.example}")
    report.num_kept = len(prompts)
    return prompts, report


@dataclass(frozen=True)
class _Draft:
    """Texts and values of a row that become a prompt."""

    text: str
    label: Any
    columns: dict[str, Any] | None
    answer: str  # empty: the row has none
    teacher_text: str  # empty: a teacher reads the same prompt


@dataclass(frozen=True)
class _Form:
    """How rows hold prompts: arguments of `make_prompts`."""

    input_key: str
    label_key: str | None
    answer_key: str | None
    teacher_key: str | None
    columns: Sequence[str] | None
    template: ChatTemplate | None
    input_template: str | None

    def draft(self, row: Row) -> _Draft:
        values = row.values
        # A row may lack an answer, and a prompt for a teacher.
        answer_key = self.answer_key if values.get(self.answer_key or "") is not None else None
        teacher_key = self.teacher_key if values.get(self.teacher_key or "") is not None else None
        return _Draft(
            text=self._text(values, self.input_key),
            columns=None if self.columns is None else _kept(values, self.columns, self.input_key),
            answer="" if answer_key is None else text_of(values, answer_key),
            teacher_text="" if teacher_key is None else self._text(values, teacher_key),
            label=_label(values, self.label_key),
        )

    def _text(self, values: Mapping[str, Any], key: str) -> str:
        if self.template is None:
            return fill_in(self.input_template, text_of(values, key))
        return self.template.render(messages_of(values, key, "user"), key, for_generation=True)


def _encoded(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Tokenise texts; where all are empty, no tokenizer is called."""
    if not any(texts):
        return [[] for _ in texts]
    return [ids for at in range(0, len(texts), CHUNK) for ids, _ in encode(tokenizer, [*texts[at : at + CHUNK]])]


def _with_images(ids: list[int], images: RowImages | None, text: str, key: str) -> list[int]:
    """Return the tokens of a prompt with those that stand for its images."""
    if images is not None:
        ids, _ = images.expand(ids, key)
    if not ids:
        raise BadValue(f"{key}: the prompt {text!r} has no tokens")
    if images is not None and ids[-1] == images.image_token_id:
        raise BadValue(
            f"{key}: the prompt ends with an image, and engines continue text: put text after it, such as a line break"
        )
    return ids


def _kept(values: Mapping[str, Any], columns: Sequence[str], input_key: str) -> dict[str, Any]:
    """Return the columns for functions that are called by names, and the input as `prompt`."""
    try:
        return {**{name: passed(values.get(name)) for name in columns}, "prompt": passed(values[input_key])}
    except NotPassed as error:
        raise BadValue(f"{input_key}: has {error} in it, which the reward function cannot get") from None


def _label(values: Mapping[str, Any], key: str | None) -> Any:
    if key is None:
        return ""
    value = value_of(values, key)
    try:
        # Through JSON: tuples of columnar files become lists.
        return value if isinstance(value, str) else json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise BadValue(f"{key}: a {type(value).__name__}, which has no JSON text to hand to a reward") from None


def check_input_template(template: str | None) -> None:
    """Refuse a template without exactly one place for the input."""
    if template is None:
        return
    try:
        if template.count("{}") == 1 and template.format("x") is not None:
            return
    except (IndexError, KeyError, ValueError):
        pass
    raise DataError(
        f"data.input_template {template!r}: needs exactly one {{}} for the prompt, and other braces written twice"
    )


def fill_in(template: str | None, text: str) -> str:
    return text if template is None else template.format(text)
