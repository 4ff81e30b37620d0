"""Rendering of messages by a chat template, with the places of the answers in the text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hotseat.data.row_problems import BadValue, kind_of, value_of
from hotseat.errors import DataError

Messages = list[dict[str, Any]]


def messages_of(values: Mapping[str, Any], key: str, role: str) -> Messages:
    """Return the messages under a key; a plain string is one message by `role`."""
    value = value_of(values, key)
    if isinstance(value, str):
        if not value:
            raise BadValue(f"{key}: empty")
        return [{"role": role, "content": value}]
    if not isinstance(value, Sequence):
        raise BadValue(f"{key}: {kind_of(value)}, neither a string nor a list of messages")
    if not value:
        raise BadValue(f"{key}: no messages")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise BadValue(f"{key}[{number}]: {kind_of(message)}, not a message with role and content")
        if not isinstance(message.get("role"), str):
            raise BadValue(f"{key}[{number}]: role is {kind_of(message.get('role'))}, not a string")
        if message.get("content") is None and not message.get("tool_calls"):
            raise BadValue(f"{key}[{number}]: content is missing or null")
    # Columnar files fill in nulls for keys that only other rows have; a template treats a null unlike a missing key.
    return [{name: part for name, part in message.items() if part is not None} for message in value]


class ChatTemplate:
    """The tokenizer's chat template, or another one for it. variables: further ones of the template."""

    def __init__(self, tokenizer: Any, template: str | None = None, variables: Mapping[str, Any] | None = None):
        is_given = template is not None
        if template is None:
            if not tokenizer.chat_template:
                raise DataError(
                    f"the tokenizer of {tokenizer.name_or_path or 'the model'} has no chat template: set"
                    " data.chat_template, or turn data.apply_chat_template off and use data.input_template"
                )
            template = tokenizer.get_chat_template()
        self._tokenizer = tokenizer
        self._template = template
        self._variables = variables or {}
        # If the template marks the assistant's text, tokens are matched to it by their offsets.
        self.marks_answers = bool(re.search(r"\{%-?\s*generation\s*-?%\}", template)) and tokenizer.is_fast
        if is_given and self._ignores_messages():
            raise DataError(
                "data.chat_template: two messages with different contents look the same under this template: it has to"
                " show the content of messages"
            )

    def render(self, messages: Messages, key: str, *, for_generation: bool = False) -> str:
        """Render the conversation; `for_generation` adds the text that precedes the assistant's next answer."""
        return self.render_marked(messages, key, for_generation=for_generation, marked=False)[0]

    def _ignores_messages(self) -> bool:
        """Return whether conversations look the same that have one message each, as text or as a list of parts."""
        texts = set()
        for content in ("one", "two", [{"type": "text", "text": "one"}], [{"type": "text", "text": "two"}]):
            try:
                texts.add(self.render([{"role": "user", "content": content}], "", for_generation=True))
            except BadValue:
                return False  # it takes other conversations, and those of the data will show
        return len(texts) == 1

    def render_marked(
        self, messages: Messages, key: str, *, for_generation: bool = False, marked: bool = True
    ) -> tuple[str, list[tuple[int, int]]]:
        """Render the conversation, and return the first and last + 1 character of each text of the assistant."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, marks = render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                return_assistant_tokens_mask=marked,
                add_generation_prompt=for_generation,
                **{**self._tokenizer.special_tokens_map, **self._variables},
            )
        except Exception as error:  # a template may raise any error
            raise BadValue(f"{key}: the chat template does not take these messages: {error}") from error
        return texts[0], [tuple(mark) for mark in marks[0]] if marked else []
