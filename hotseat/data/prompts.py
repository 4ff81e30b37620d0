"""Prompts, made from rows: rendered and tokenised here, once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hotseat.data.chat_rendering import ChatTemplate, messages_of
from hotseat.data.images import RowImages
from hotseat.data.row_problems import BadValue, Lost, LostRow, Problems, shown, text_of, value_of
from hotseat.data.rows import Row
from hotseat.data.sequences import CHUNK, encode
from hotseat.errors import DataError
from hotseat.types import Prompt

_SOURCE_KEYS = ("datasource", "data_source")


@dataclass(frozen=True)
class PromptReport:
    """Counts of rows that were kept, and those that were dropped as too long."""

    num_rows: int
    num_prompts: int
    max_length: int  # tokens of the longest prompt that was kept
    lost: Lost


def make_prompts(
    rows: Sequence[Row],
    tokenizer: Any,
    *,
    input_key: str = "input",
    label_key: str | None = None,
    input_template: str | None = None,
    apply_chat_template: bool = False,
    chat_template: str | None = None,
    prompt_max_length: int | None = None,
    limit: tuple[str, str] = ("", "raise data.prompt_max_length"),
    image_key: str | None = None,
    columns: Sequence[str] | None = None,
) -> tuple[list[Prompt], PromptReport]:
    """Make prompts in the order of the rows; `index` counts those that are kept.

    With `apply_chat_template` the input is a list of messages, or a string that becomes the user's message, and
    `input_template` is not used; otherwise the input is a string that replaces the `{}` in `input_template`. A label
    is the row's value as it is, or "" without `label_key`. No special tokens are added to those in the text. limit: the
    option that sets `prompt_max_length`, and how to raise it, for the message if no prompt is short enough. image_key:
    the rows went through `images.prepare_rows`, which left their images there. columns: to keep of every row, which has
    None where it lacks one, as in `datasets`; None: none are kept.
    """
    template = ChatTemplate(tokenizer, chat_template) if apply_chat_template else None
    check_input_template(input_template)
    problems = Problems()
    drafts: list[tuple[str, Any, str]] = []
    for row in rows:
        try:
            if template is not None:
                messages = messages_of(row.values, input_key, "user")
                text = template.render(messages, input_key, for_generation=True)
            else:
                text = fill_in(input_template, text_of(row.values, input_key))
            source = next((row.values[key] for key in _SOURCE_KEYS if row.values.get(key) is not None), None)
            if columns is not None and not _is_json(row.values[input_key]):
                raise BadValue(f"{input_key}: holds more than JSON can, and the reward function is called by names")
            drafts.append((text, _label(row.values, label_key), "" if source is None else str(source)))
        except BadValue as error:
            problems.add(row.where, str(error))
    problems.raise_if_any()

    prompts: list[Prompt] = []
    lost = Lost()
    texts = [text for text, _, _ in drafts]
    encoded = [ids for at in range(0, len(texts), CHUNK) for ids, _ in encode(tokenizer, texts[at : at + CHUNK])]
    for row, (text, label, source), ids in zip(rows, drafts, encoded, strict=True):
        seen: RowImages | None = None if image_key is None else row.values[image_key]
        if seen is not None:
            try:
                ids, _ = seen.expand(ids, input_key)
            except BadValue as error:
                problems.add(row.where, str(error))
                continue
        if not ids:
            problems.add(row.where, f"{input_key}: the prompt {text!r} has no tokens")
            continue
        if seen is not None and ids[-1] == seen.image_token_id:
            problems.add(
                row.where,
                f"{input_key}: the prompt ends with an image, and engines continue text: put text after it, such as a"
                " line break",
            )
            continue
        lost.longest = max(lost.longest, len(ids))
        if prompt_max_length is not None and len(ids) > prompt_max_length:
            lost.add(partial(LostRow, row.where, row.values, text, len(ids)), is_dropped=True)
        else:
            images = () if seen is None else seen.paths
            kept = None
            if columns is not None:
                kept = {**{name: row.values.get(name) for name in columns}, "prompt": row.values[input_key]}
            prompts.append(Prompt(len(prompts), text, tuple(ids), label, source, images, kept))
    problems.raise_if_any()
    if not prompts:
        source, fix = limit
        because = f", the limit by {source}" if source else ""
        why = f" with at most {prompt_max_length} tokens{because}: {fix}" if lost.count else ""
        raise DataError(f"none of the {len(rows)} rows is a prompt{why}{shown(lost)}")
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return prompts, PromptReport(len(rows), len(prompts), longest, lost)


def columns_of(rows: Sequence[Row], image_key: str | None = None) -> list[str]:
    """Return the columns whose values are JSON in every row, in the order in which rows have them."""
    names = dict.fromkeys(name for row in rows for name in row.values)
    return [name for name in names if name != image_key and all(_is_json(row.values.get(name)) for row in rows)]


def _is_json(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and all(map(_is_json, value.values()))
    return value is None or isinstance(value, str | int | float)


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
