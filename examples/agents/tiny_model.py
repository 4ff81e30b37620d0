"""A chat model small enough to learn on a laptop's cores: an untrained Llama of 2 layers over characters.

Its tokenizer has a token for every printable character of ASCII, for the markers of its chat template, and for what an
example wants to write at once. It has a `response_template`, so tool calls of its answers are parsed.
"""

from __future__ import annotations

import json
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

MARKERS = ("<pad>", "<end>", "<system>", "<user>", "<assistant>", "<tool>", "<tools>", "<call>", "</call>")

CHAT_TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<end>{% endif -%}
{%- for message in messages -%}
<{{ message.role }}>{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor -%}
<end>
{%- endfor -%}
{%- if add_generation_prompt %}<assistant>{% endif -%}
"""

RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<end>", "content": "text"},
    },
}


def make_tokenizer(phrases: Sequence[str] = ()) -> Any:
    """Make a tokenizer with one token per character and for each of the phrases."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [letter for letter in string.printable if letter.isprintable() or letter == "\n"]
    backend = Tokenizer(models.WordLevel({text: at for at, text in enumerate([*MARKERS, *letters])}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in MARKERS])
    backend.add_tokens([AddedToken(text, normalized=False) for text in phrases])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def make_model(path: Path, seed: int, *, phrases: Sequence[str] = (), width: int = 128, max_length: int = 128) -> Any:
    """Write the model and its tokenizer into a folder, and return the tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(phrases)
    tokenizer.save_pretrained(path)
    torch.manual_seed(seed)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=width * 8 // 3,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=max_length,
            tie_word_embeddings=True,
            initializer_range=0.06,  # the usual 0.02 is for wide models: narrow ones learn late with it
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    ).save_pretrained(path)
    return tokenizer


def examples_of(
    tokenizer: Any, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
) -> Iterable[dict[str, str]]:
    """Yield a conversation as rows for SFT: each answer, after everything that the model reads before it."""
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            read = tokenizer.apply_chat_template(
                list(messages[:at]), tools=tools, tokenize=False, add_generation_prompt=True
            )
            whole = tokenizer.apply_chat_template(list(messages[: at + 1]), tools=tools, tokenize=False)
            assert whole.startswith(read)
            assert whole.endswith("<end>")
            yield {"input": read, "output": whole[len(read) : -len("<end>")]}


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
