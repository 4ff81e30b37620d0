"""Examples and pairs: which tokens are learned, exactly."""

import pytest
from data_cases import CHATML, MARKED, as_rows, assistant, char_tokenizer, merging_tokenizer, user

from hotseat.data import make_examples, make_pairs
from hotseat.errors import DataError

TALK = [user("hi"), assistant("yo"), user("a"), assistant("b")]


def learned(example, tokenizer) -> str:
    """The sequence as text, what is learned in brackets."""
    text, inside = "", False
    for token, mask in zip(example.token_ids.tolist(), example.mask.tolist(), strict=True):
        if mask != inside:
            text, inside = text + ("[" if mask else "]"), mask
        text += tokenizer.decode([token])
    return text + ("]" if inside else "")


def one(values, tokenizer, **options) -> str:
    examples, _ = make_examples(as_rows([values]), tokenizer, **options)
    return learned(examples[0], tokenizer)


def fails(values, tokenizer=None, make=make_examples, **options) -> str:
    with pytest.raises(DataError) as caught:
        make(as_rows(values), tokenizer or char_tokenizer(), **options)
    return str(caught.value)


# --- examples ---------------------------------------------------------------------------------------------------------


def test_plain_answers_follow_the_prompt_and_end_once():
    tokenizer = char_tokenizer()
    assert one({"input": "1+1", "out": "2"}, tokenizer, output_key="out", input_template="{}=") == "1+1=[2<eos>]"
    assert one({"input": "1+1=", "out": "2<eos>"}, tokenizer, output_key="out") == "1+1=[2<eos>]"


def test_an_answer_whose_first_token_would_reach_into_the_prompt_is_tokenised_by_itself():
    tokenizer = merging_tokenizer()
    # " y" is one token, but an engine is given the prompt with its space, so the answer begins with "y".
    assert one({"input": "A: ", "out": "yes"}, tokenizer, output_key="out") == "A: [yes<eos>]"
    # Where prompt and answer meet at a token, the text is tokenised as a whole.
    examples, _ = make_examples(as_rows([{"input": "A:", "out": " yes"}]), tokenizer, output_key="out")
    assert learned(examples[0], tokenizer) == "A:[ yes<eos>]"
    assert len(examples[0].token_ids) == 6


def test_without_an_output_all_is_learned_but_the_first_token():
    tokenizer = char_tokenizer()
    assert one({"input": "abc"}, tokenizer) == "a[bc<eos>]"
    assert one({"input": "ab", "out": "cd"}, tokenizer, output_key="out", pretrain_mode=True) == "a[bcd<eos>]"
    assert one({"input": "a<eos>b"}, tokenizer, pretrain_mode=True) == "a[<eos>b<eos>]"
    chat = char_tokenizer(CHATML)
    assert one({"input": TALK[:1]}, chat, apply_chat_template=True, pretrain_mode=True) == "<|user|>[hi<eos>\n<eos>]"


@pytest.mark.parametrize(("template", "end"), [(CHATML, "\n"), (MARKED, "")])
def test_chat_learns_the_last_answer_or_every_one(template, end):
    tokenizer = char_tokenizer(template)
    head = f"<|user|>hi<eos>{end}<|assistant|>"
    tail = f"<|user|>a<eos>{end}<|assistant|>[b<eos>]"
    assert one({"input": TALK}, tokenizer, apply_chat_template=True) == f"{head}yo<eos>{end}{tail}"
    every = one({"input": TALK}, tokenizer, apply_chat_template=True, multiturn=True)
    assert every == f"{head}[yo<eos>]{end}{tail}"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_chat_with_an_output_of_its_own(template):
    tokenizer = char_tokenizer(template)
    options = {"output_key": "out", "apply_chat_template": True}
    expected = one({"input": TALK[:2]}, tokenizer, apply_chat_template=True)
    assert one({"input": "hi", "out": "yo"}, tokenizer, **options) == expected
    assert one({"input": TALK[:1], "out": TALK[1:2]}, tokenizer, **options) == expected


def test_a_template_that_ends_answers_without_the_end_of_sequence_gets_one():
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    tokenizer = char_tokenizer(template + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
    every = one({"input": TALK}, tokenizer, apply_chat_template=True, multiturn=True)
    assert every == "<|user|>hi<|assistant|>[yo]<|user|>a<|assistant|>[b<eos>]"


def test_a_template_that_changes_earlier_turns_is_refused_with_an_explanation():
    template = (
        "{% for m in messages %}<|{{ m.role }}|>"
        "{{ m.content if loop.last or m.role == 'user' else m.content.split('|')[-1] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    talk = [user("a"), assistant("think|b"), user("c"), assistant("think|d")]
    tokenizer = char_tokenizer(template)
    message = fails([{"input": talk}], tokenizer, apply_chat_template=True, multiturn=True)
    assert "data.jsonl:1: input: the chat template renders the first 2 messages differently once more follow" in message
    assert "('think|b<eos>' becomes 'b<eos><|user|>c<eos>" in message
    assert one({"input": talk}, tokenizer, apply_chat_template=True).endswith("<|assistant|>[think|d<eos>]")


def test_a_token_that_reaches_over_the_start_of_an_answer_is_refused_with_an_explanation():
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    rows = [{"input": [user("x"), assistant("yes")]}]
    message = fails(rows, merging_tokenizer(plain), apply_chat_template=True)
    assert "data.jsonl:1: input: the tokens of the conversation do not begin with those of its part" in message
    assert "<eos>assistant: ': a token reaches over into 'yes<eos>'" in message
    marked = plain.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    message = fails(rows, merging_tokenizer(marked), apply_chat_template=True)
    assert "data.jsonl:1: input: token ' y' reaches over the edge of the assistant's text 'yes'" in message


def test_conversations_without_an_answer():
    tokenizer = char_tokenizer(CHATML)
    message = fails([{"input": TALK[:1]}, {"input": "hi"}], tokenizer, apply_chat_template=True)
    expected = "data.jsonl:1, data.jsonl:2: input: the last message is by user, and there is no answer to learn"
    assert expected in message
    nothing = "{% for m in messages %}x{% if false %}{% generation %}{% endgeneration %}{% endif %}{% endfor %}"
    message = fails([{"input": TALK}], char_tokenizer(nothing), apply_chat_template=True)
    assert "the chat template marks no text as the assistant's" in message


def test_truncation_is_counted_and_what_has_no_answer_left_is_dropped():
    tokenizer = char_tokenizer()
    rows = as_rows([{"input": "ab", "out": out} for out in ("c", "cd", "cde")] + [{"input": "abcd", "out": "e"}])
    examples, report = make_examples(rows, tokenizer, output_key="out", max_length=4)
    assert [learned(example, tokenizer) for example in examples] == ["ab[c<eos>]", "ab[cd]", "ab[cd]"]
    assert (report.num_rows, report.num_kept, report.num_cut, report.num_no_answer) == (4, 3, 2, 1)
    assert sum(int(example.mask.sum()) for example in examples) == 6
    assert examples[2].where == "data.jsonl:3"
    assert "none of the 1 rows has an answer within data.max_length 2" in fails(
        [{"input": "ab", "out": "c"}], output_key="out", max_length=2
    )


def test_many_rows_keep_their_order():
    tokenizer = char_tokenizer()
    examples, _ = make_examples(
        as_rows([{"input": f"{n}=", "out": f"{n}"} for n in range(1100)]), tokenizer, output_key="out"
    )
    assert [learned(example, tokenizer) for example in examples] == [f"{n}=[{n}<eos>]" for n in range(1100)]


def test_rows_that_are_no_examples():
    message = fails([{"input": "x"}, {"input": "x", "out": ""}, {"out": "x"}], output_key="out")
    assert "data.jsonl:1: out: missing" in message
    assert "data.jsonl:2: out: empty" in message
    assert "data.jsonl:3: input: missing" in message
    assert "data.multiturn needs messages" in fails([{"input": "x"}], multiturn=True)


def test_a_tokenizer_without_an_end():
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    assert "the tokenizer of tiny-model has no end-of-sequence token" in fails([{"input": "x"}], tokenizer)


# --- pairs ------------------------------------------------------------------------------------------------------------


def test_plain_pairs():
    tokenizer = char_tokenizer()
    rows = as_rows([{"p": "1+1", "chosen": "2", "rejected": "3", "margin": 2}])
    pairs, report = make_pairs(rows, tokenizer, prompt_key="p", input_template="{}=")
    assert learned(pairs[0].chosen, tokenizer) == "1+1=[2<eos>]"
    assert learned(pairs[0].rejected, tokenizer) == "1+1=[3<eos>]"
    assert pairs[0].margin == 2.0
    assert report.num_kept == 1
    pairs, _ = make_pairs(as_rows([{"chosen": "ab", "rejected": "ac"}]), tokenizer)
    assert learned(pairs[0].rejected, tokenizer) == "a[c<eos>]"


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_chat_pairs(template):
    tokenizer = char_tokenizer(template)
    whole = as_rows([{"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]}])
    pairs, _ = make_pairs(whole, tokenizer, apply_chat_template=True)
    chosen, rejected = (learned(answer, tokenizer) for answer in (pairs[0].chosen, pairs[0].rejected))
    assert chosen.endswith("<|assistant|>[a<eos>]")
    assert rejected.endswith("<|assistant|>[b<eos>]")
    apart = as_rows([{"p": "q", "chosen": "a", "rejected": [assistant("b")]}])
    pairs, _ = make_pairs(apart, tokenizer, apply_chat_template=True, prompt_key="p")
    assert learned(pairs[0].chosen, tokenizer) == chosen
    assert learned(pairs[0].rejected, tokenizer) == rejected


def test_pairs_that_are_no_pairs_are_dropped_and_counted():
    rows = as_rows(
        [
            {"p": "q", "chosen": "abX", "rejected": "abY"},
            {"p": "q", "chosen": "a", "rejected": "a"},
            {"p": "qqqq", "chosen": "a", "rejected": "b"},
            {"p": "q", "chosen": "a", "rejected": "bcde"},
        ]
    )
    pairs, report = make_pairs(rows, char_tokenizer(), prompt_key="p", max_length=3)
    assert [pair.chosen.where for pair in pairs] == ["data.jsonl:4"]
    assert (report.num_identical, report.num_no_answer, report.num_cut) == (2, 1, 1)
    ended, report = make_pairs(rows, char_tokenizer(), prompt_key="p", max_length=4, keep_end=True)
    assert [learned(pair.rejected, char_tokenizer()) for pair in ended] == ["q[bc<eos>]"]
    assert (report.num_identical, report.num_no_answer, report.num_cut) == (2, 1, 1)
    message = fails([{"chosen": "a", "rejected": "a"}], make=make_pairs)
    assert "none of the 1 rows is a pair: 1 have the same answer twice" in message


def test_rows_that_are_no_pairs():
    assert "data.jsonl:1: rejected: missing" in fails([{"chosen": "a"}], make=make_pairs)
    chat = char_tokenizer(CHATML)
    row = {"chosen": "a", "rejected": "b"}
    assert "chosen: a string: with data.apply_chat_template set data.prompt_key" in fails(
        [row], chat, make=make_pairs, apply_chat_template=True
    )
    assert "data.jsonl:1: margin: a string 'x', not a finite number" in fails([{**row, "margin": "x"}], make=make_pairs)
    assert "margin: a number nan" in fails([{**row, "margin": float("nan")}], make=make_pairs)
