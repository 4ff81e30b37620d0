"""Pairs to learn from token by token: the forms of OpenRLHF's and TRL's data sets, and rows that are refused."""

import pytest
from data_cases import CHATML, MARKED, as_rows, assistant, char_tokenizer, merging_tokenizer, user
from test_sequences import learned

from hotseat.data import make_pairs
from hotseat.errors import DataError


def both(values, tokenizer, **options) -> tuple[str, str]:
    [pair], _ = make_pairs(as_rows([values]), tokenizer, is_preference=True, **options)
    return learned(pair.chosen, tokenizer), learned(pair.rejected, tokenizer)


def fails(values, *others, tokenizer=None, **options) -> str:
    with pytest.raises(DataError) as caught:
        make_pairs(as_rows([values, *others]), tokenizer or char_tokenizer(), is_preference=True, **options)
    return str(caught.value)


def test_a_text_prompt_of_its_own_as_in_trl():
    row = {"prompt": "q=", "chosen": "ab", "rejected": "ac"}
    assert both(row, char_tokenizer(), prompt_key="prompt") == ("q=[ab<eos>]", "q=[ac<eos>]")


def test_whole_texts_begin_with_their_prompt_as_in_trl():
    row = {"chosen": "q=ab", "rejected": "q=acd"}
    assert both(row, char_tokenizer()) == ("q=a[b<eos>]", "q=a[cd<eos>]")
    assert both({**row, "prompt": "q="}, char_tokenizer()) == ("q=a[b<eos>]", "q=a[cd<eos>]")


def test_an_answer_may_continue_the_other():
    assert both({"chosen": "q=a", "rejected": "q=ab"}, char_tokenizer()) == ("q=a[<eos>]", "q=a[b<eos>]")


def test_what_both_texts_begin_with_is_counted_in_tokens():
    tokenizer = merging_tokenizer()
    chosen, rejected = both({"chosen": "aab", "rejected": "aac"}, tokenizer)
    [pair], _ = make_pairs(as_rows([{"chosen": "aab", "rejected": "aac"}]), tokenizer, is_preference=True)
    common = [a == b for a, b in zip(pair.chosen.token_ids, pair.rejected.token_ids, strict=False)]
    assert pair.chosen.mask.tolist()[: len(common)] == [not same for same in common[:-1]] + [True]
    assert chosen != rejected


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_conversations_with_and_without_a_prompt_of_their_own_are_the_same_pair(template):
    tokenizer = char_tokenizer(template)
    prompt = [user("hi"), assistant("yo"), user("q")]
    apart = {"prompt": prompt, "chosen": [assistant("a")], "rejected": [assistant("b")]}
    whole = {"chosen": [*prompt, assistant("a")], "rejected": [*prompt, assistant("b")]}
    found = both(whole, tokenizer, apply_chat_template=True)
    assert found == both(apart, tokenizer, apply_chat_template=True, prompt_key="prompt")
    assert [text[text.index("[") :] for text in found] == ["[a<eos>]", "[b<eos>]"]


def test_conversations_that_part_before_their_last_message_are_learned_from_there():
    tokenizer = char_tokenizer(CHATML)
    row = {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b"), user("r"), assistant("c")]}
    chosen, rejected = both(row, tokenizer, apply_chat_template=True)
    assert chosen.endswith("<|assistant|>[a<eos>]")
    assert rejected[rejected.index("[") :].startswith("[b<eos>")
    assert rejected.endswith("c<eos>]")


def test_an_answer_that_is_cut_has_no_end_to_learn():
    [pair], report = make_pairs(
        as_rows([{"p": "q", "chosen": "abcde", "rejected": "b"}]),
        char_tokenizer(),
        prompt_key="p",
        max_length=4,
        is_preference=True,
    )
    assert learned(pair.chosen, char_tokenizer()) == "q[abc]"
    assert report.num_cut == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"p": "q", "chosen": "a"}, "data.jsonl:1: rejected: missing; the row has: p, chosen"),
        ({"chosen": "a", "rejected": "b"}, "data.jsonl:1: p: missing"),
        ({"p": "q", "chosen": "a", "rejected": "a"}, "data.jsonl:1: chosen and rejected are the same"),
        ({"p": "q", "chosen": "", "rejected": "a"}, "data.jsonl:1: chosen: empty"),
        ({"p": "q", "chosen": "a", "rejected": None}, "data.jsonl:1: rejected: null"),
        ({"p": "q", "chosen": 7, "rejected": "a"}, "data.jsonl:1: chosen: a number, not a string"),
        (
            {"p": "q", "chosen": [assistant("a")], "rejected": [assistant("b")]},
            "data.jsonl:1: chosen: a list, not a string; set data.apply_chat_template",
        ),
    ],
)
def test_texts_that_are_refused(row, message):
    assert message in fails(row, prompt_key="p")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "q=", "chosen": "ab", "rejected": "ac"}, "prompt: neither the beginning of both answers"),
        ({"chosen": "a", "rejected": "b"}, "chosen and rejected have no common beginning that would be the prompt"),
    ],
)
def test_texts_without_a_prompt_are_refused(row, message):
    said = fails({"chosen": "q=a", "rejected": "q=b"}, row)
    assert "data.jsonl:2: " in said
    assert message in said
    assert "set data.prompt_key to the column of the prompt" in said


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("a")]}, "are the same"),
        ({"chosen": [assistant("a")], "rejected": [assistant("b")]}, "have no message in common"),
        ({"chosen": [user("q"), assistant("a")], "rejected": [user("q")]}, "rejected: no answer, only the messages"),
        (
            {"chosen": [user("q"), user("r"), assistant("a")], "rejected": [user("q"), assistant("b")]},
            "chosen[1]: by user: chosen and rejected must diverge at an assistant message",
        ),
        (
            {"chosen": [user("q"), assistant("")], "rejected": [user("q"), assistant("b")]},
            "chosen[1]: content is empty",
        ),
        ({"chosen": [user("q"), "a"], "rejected": [user("q"), assistant("b")]}, "chosen[1]: a string, not a message"),
        ({"chosen": [], "rejected": [user("q"), assistant("b")]}, "chosen: no messages"),
        ({"chosen": {"a": 1}, "rejected": [user("q")]}, "chosen: an object, neither a string nor a list of messages"),
        ({"chosen": "a", "rejected": "b"}, "chosen: a string: with data.apply_chat_template set data.prompt_key"),
    ],
)
def test_conversations_that_are_refused(row, message):
    said = fails(row, tokenizer=char_tokenizer(CHATML), apply_chat_template=True)
    assert "data.jsonl:1: " in said
    assert message in said


def test_a_whole_conversation_beside_a_prompt_is_refused():
    row = {"p": "q", "chosen": [user("q"), assistant("a")], "rejected": [assistant("b")]}
    said = fails(row, tokenizer=char_tokenizer(CHATML), apply_chat_template=True, prompt_key="p")
    assert "data.jsonl:1: chosen: begins with a message by user, but data.prompt_key 'p' has the prompt" in said


def test_pairs_that_are_too_long_are_counted_with_their_rows():
    row = {"p": "qqqq", "chosen": "a", "rejected": "b"}
    said = fails(row, prompt_key="p", max_length=4)
    assert "none of the 1 rows is a pair" in said
    assert "data.jsonl:1" in said
