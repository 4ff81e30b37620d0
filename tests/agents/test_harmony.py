"""Answers in harmony, the form of gpt-oss, with its parts in every order that the form allows."""

from __future__ import annotations

import pytest
from chat_templates import tokenizer_of

from hotseat.agents.harmony import end_token_ids, is_harmony, parts

THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>4<|return|>", ("4", None, ())),
        (f"{THOUGHT}<|channel|>final<|message|>4<|return|>", ("4", "hm", ())),
        (f"{THOUGHT}<|channel|>final<|message|>4", ("4", "hm", ())),  # cut short
        (
            f'{THOUGHT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a": 1}}<|call|>',
            ("", "hm", (("add", '{"a": 1}'),)),
        ),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", None, (("add", '{"a": 1}'),))),
        (
            "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant to=functions.a.b<|channel|>commentary"
            "<|message|> {}<|call|>",
            ("I add.", None, (("a.b", "{}"),)),
        ),
    ],
)
def test_an_answer_is_cut_into_its_parts(text: str, expected: object) -> None:
    assert parts(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "4",
        "<|channel|>final 4",
        "<|message|>4<|return|>",
        '<|channel|>commentary to=functions.add<|message|>{"a": 1}',  # cut short
        "<|channel|>commentary to=functions.add<|message|>[1]<|call|>",
        "<|channel|>commentary to=functions.add<|message|>{a<|call|>",
        "<|channel|>commentary to=browser.search<|message|>{}<|call|>",  # no function of the program's
        "<|channel|>final<|message|>4<|end|>and more",
    ],
)
def test_what_is_in_no_form_is_left_to_the_program(text: str) -> None:
    assert parts(text) is None


def test_the_tokens_that_end_an_answer_are_those_of_the_form() -> None:
    tokenizer = tokenizer_of("gptoss")
    ends = {tokenizer.convert_tokens_to_ids(token) for token in ("<|return|>", "<|call|>")}
    assert end_token_ids(tokenizer) == ends
    assert not is_harmony(tokenizer_of("qwen3"))
    assert end_token_ids(tokenizer_of("qwen3")) == set()
    assert end_token_ids(object()) == set()
