"""Harmony, the form in which gpt-oss answers: messages on channels, in one answer after the chat template's beginning.

    <|channel|>analysis<|message|>TEXT<|end|><|start|>assistant<|channel|>final<|message|>TEXT<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

Thinking is on `analysis`, calls are on `commentary` with a recipient, which may also stand in front of the channel.
What else is on `commentary`, and all of `final`, is for the user.
"""

from __future__ import annotations

import json
import re
from typing import Any

RETURN, CALL, END = "<|return|>", "<|call|>", "<|end|>"
_NEEDED = ("<|start|>", "<|channel|>", "<|message|>", CALL, RETURN)
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?P<header>(?:(?!<\|(?:message|start)\|>).)*)<\|message\|>"
    r"(?P<text>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_CHANNEL = re.compile(r"<\|channel\|>(\w+)")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+?)(?=\s|<\||$)")
_FUNCTIONS = "functions."


def is_harmony(tokenizer: Any) -> bool:
    """Tell whether a tokenizer has the tokens of this form."""
    known = tokenizer.get_vocab() if hasattr(tokenizer, "get_vocab") else {}
    return all(token in known for token in _NEEDED)


def end_token_ids(tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer in this form; none if the tokenizer has another form."""
    vocabulary = tokenizer.get_vocab() if is_harmony(tokenizer) else {}
    return {vocabulary[token] for token in (RETURN, CALL) if token in vocabulary}


def parts(text: str) -> tuple[str, str | None, tuple[tuple[str, str], ...]] | None:
    """Return content, thinking, and calls (name, arguments as JSON text) of an answer; None if it has another form."""
    shown: list[str] = []
    thought: list[str] = []
    calls: list[tuple[str, str]] = []
    at = 0
    while at < len(text):
        message = _MESSAGE.match(text, at)
        if message is None:
            return None
        at = message.end()
        channel, recipient = (pattern.search(message["header"]) for pattern in (_CHANNEL, _RECIPIENT))
        if channel is None:
            return None
        if recipient is not None:
            name = recipient[1]
            if message["end"] != CALL or not name.startswith(_FUNCTIONS) or not _is_object(message["text"]):
                return None
            calls.append((name.removeprefix(_FUNCTIONS), message["text"].strip()))
        else:
            (thought if channel[1] == "analysis" else shown).append(message["text"])
    return "\n".join(shown), "\n".join(thought) or None, tuple(calls)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
