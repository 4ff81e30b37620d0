"""The values of `data.chat_template`, a Jinja template or a file that has one, and of `data.chat_template_kwargs`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path

_MARKS = ("{{", "{%")  # every template that shows messages has one of them, and no name of a file does
# Variables and arguments that whoever renders a template sets.
_NOT_OPTIONS = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "conversation"}
    | {"conversations", "chat_template", "tokenize", "tokenizer_kwargs", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "bos_token", "eos_token", "raise_exception"}
)
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag that only transformers knows


def chat_template_text(value: str | None) -> str | None:
    """Return the template that a value of `data.chat_template` stands for: itself, or the text of the file it names."""
    if value is None or any(mark in value for mark in _MARKS):
        return value
    return Path(value).expanduser().read_text(encoding="utf-8")


def chat_template_problem(value: str | None) -> str | None:
    """Return why a value of `data.chat_template` cannot be used, as far as its text shows; None if it can."""
    from jinja2 import TemplateSyntaxError

    try:
        text = chat_template_text(value)
    except (OSError, ValueError, RuntimeError) as error:  # no such file, no name of one, a home that nobody has
        why = getattr(error, "strerror", None) or str(error)
        shown = value if value is None or len(value) <= 100 else f"{value[:100]}..."
        return (
            f"{shown!r} is no template, which would contain {{{{ or {{%, and cannot be read as a file with one: {why}"
        )
    if text is None:
        return None
    try:
        names = _variables_of(text)
    except TemplateSyntaxError as error:
        return f"no Jinja template: {error.message} at line {error.lineno}"
    if "messages" not in names:
        return (
            "the template ignores the messages: it has to use the variable messages, as {{ messages[0].content }} does"
        )
    return None


def variables_problem(text: str | None, names: Iterable[str]) -> str | None:
    """Return why these names cannot be variables of a template of this text; None if they can, as far as that shows.

    text: None if it is not known yet.
    """
    from jinja2 import TemplateSyntaxError

    for name in names:
        if name in _NOT_OPTIONS:
            return f"{name} is set by what renders the template: leave it out"
    try:
        variables = None if text is None else _variables_of(text)
    except TemplateSyntaxError:
        return None  # whoever renders it says so
    unknown = [] if variables is None else sorted(set(names) - variables)
    if not unknown or variables is None:
        return None
    others = sorted(variables - _NOT_OPTIONS)
    close = difflib.get_close_matches(unknown[0], others, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"the chat template has no variable {unknown[0]}; {hint}it has: {', '.join(others) or 'none'}"


def _variables_of(text: str) -> set[str]:
    """Return the variables that a template reads and does not set itself."""
    from jinja2 import Environment, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", text)))
