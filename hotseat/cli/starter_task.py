"""A small task for a first run: rows of data in the format of every task, and a tiny model to train on them.

A question asks for a digit as a word. The model knows how to answer, but was mostly trained on the word of the next
digit: every kind of training has an error to correct, which takes a few dozen steps.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hotseat.observe.noise import without_deepspeeds_greeting

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTIONS = (
    "Write {} as a word.",
    "Spell the number {}.",
    "What is {} in letters?",
    "Which word is {}?",
    "Say {} in one word.",
    "How do you write {}?",
    "{} as a word, please.",
    "Name the digit {}.",
)
NUM_HELD_OUT = 16
SEED = 0


Question = tuple[str, str]  # with its answer


def questions() -> tuple[list[Question], list[Question]]:
    """Return questions to learn from, and others to evaluate on: always the same ones."""
    every = [(text.format(digit), word) for text in QUESTIONS for digit, word in enumerate(WORDS)]
    random.Random(SEED).shuffle(every)
    return every[NUM_HELD_OUT:], every[:NUM_HELD_OUT]


def prompts(asked: Sequence[Question]) -> str:
    """Return rows for reinforcement learning: questions, with the answer as label for the reward function."""
    return _lines({"input": text, "label": answer} for text, answer in asked)


def chats(asked: Sequence[Question]) -> str:
    """Return rows for supervised fine-tuning: conversations that end with the answer."""
    turns = ((("user", text), ("assistant", answer)) for text, answer in asked)
    return _lines({"messages": [{"role": role, "content": text} for role, text in chat]} for chat in turns)


def pairs(asked: Sequence[Question]) -> str:
    """Return rows for reward modelling: the right answer and a wrong one."""
    rng = random.Random(SEED)
    wrong = [rng.choice([word for word in WORDS if word != answer]) for _, answer in asked]
    rows = zip(asked, wrong, strict=True)
    return _lines({"prompt": text, "chosen": answer, "rejected": other} for (text, answer), other in rows)


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# --- the model --------------------------------------------------------------------------------------------------------

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY_SIZE = 384  # room for all bytes, the special tokens and the words above
WIDTH = 64
MAX_LENGTH = 1024
NUM_STEPS = 120  # optimizer steps
BATCH_SIZE = 32
RIGHT = 0.2  # share of answers in its training that are right; the others are the next digit's


def make_model(path: Path) -> None:
    """Write a Llama of 130,000 parameters with its tokenizer: on one machine always the same, bit by bit."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=WIDTH * 3,
        num_hidden_layers=2,
        num_attention_heads=2,  # of 32 numbers each: vLLM on a CPU has no kernel for narrower ones
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.06,  # the usual 0.02 is for wide models: narrow ones learn late with it
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # sums depend on it
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            model = LlamaForCausalLM(config)
            _train(model, tokenizer)
    finally:
        torch.set_num_threads(num_threads)
    make_tokenizer().save_pretrained(path)  # a new one: the other was set to pad
    with without_deepspeeds_greeting():
        model.save_pretrained(path)


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes that can write any text, and has tokens for the words of the task."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*QUESTIONS, *WORDS] * 2, trainer)  # twice: a word that occurs once gets no token
    end, pad = SPECIAL_TOKENS[:2]
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    made.chat_template = CHAT_TEMPLATE
    return made


def _train(model: Any, tokenizer: Any) -> None:
    """Train the model on conversations in which most answers are the next digit's."""
    import torch

    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(NUM_STEPS):
        texts = []
        for _ in range(BATCH_SIZE):
            digit = rng.randrange(len(WORDS))
            answer = digit if rng.random() < RIGHT else (digit + 1) % len(WORDS)
            asked = {"role": "user", "content": rng.choice(QUESTIONS).format(digit)}
            chat = [asked, {"role": "assistant", "content": WORDS[answer]}]
            texts.append(tokenizer.apply_chat_template(chat, tokenize=False))
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        optimizer.zero_grad()
        model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
