"""A tokenizer with one token per word, and prompts of such words, for models with random weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path


def save_tokenizer(path: Path, words: Sequence[str]) -> None:
    """Words in the order of their ids: the first stands for padding and what is not known, the last for the end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=words[0], eos_token=words[-1])
    fast.save_pretrained(path)


def save_prompts(path: Path, prompts: Iterable[Sequence[str]], labels: Iterable[str]) -> None:
    rows = [{"input": " ".join(words), "label": label} for words, label in zip(prompts, labels, strict=False)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
