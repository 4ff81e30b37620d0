"""The value of `data.chat_template`: a Jinja template, or a file that has one."""

from __future__ import annotations

import re
from pathlib import Path

_MARKS = ("{{", "{%")  # every template that shows messages has one of them, and no name of a file does
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag that only transformers knows


def chat_template_text(value: str | None) -> str | None:
    """Return the template that a value of `data.chat_template` stands for: itself, or the text of the file it names."""
    if value is None or any(mark in value for mark in _MARKS):
        return value
    return Path(value).expanduser().read_text(encoding="utf-8")


def chat_template_problem(value: str | None) -> str | None:
    """Return why a value of `data.chat_template` cannot be used, as far as its text shows; None if it can."""
    from jinja2 import Environment, TemplateSyntaxError, meta

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
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        names = meta.find_undeclared_variables(environment.parse(_GENERATION.sub("", text)))
    except TemplateSyntaxError as error:
        return f"no Jinja template: {error.message} at line {error.lineno}"
    if "messages" not in names:
        return (
            "the template ignores the messages: it has to use the variable messages, as {{ messages[0].content }} does"
        )
    return None
