"""Small tokenizers and rows for the tests of `hotseat.data`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotseat.data import Row

CHARS = [chr(code) for code in range(32, 127)] + ["\n"]

CHATML = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def char_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per character, and the special tokens <eos>, <|user|>, <|assistant|>, <|system|>."""
    backend = Tokenizer(models.WordLevel({char: at for at, char in enumerate(CHARS)}, "?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return _wrapped(backend, template)


def merging_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Characters, but a space and the y after it are one token."""
    vocabulary = {char: at for at, char in enumerate([*CHARS, " y"])}
    backend = Tokenizer(models.BPE(vocabulary, [(" ", "y")]))
    backend.decoder = decoders.Fuse()
    return _wrapped(backend, template)


def _wrapped(backend: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    special = ["<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", name_or_path="tiny-model")
    tokenizer.chat_template = template
    return tokenizer


def as_rows(values: list[dict[str, Any]]) -> list[Row]:
    return [Row(row, "data.jsonl", line, has_line=True) for line, row in enumerate(values, 1)]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
