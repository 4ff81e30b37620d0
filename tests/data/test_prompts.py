import pytest
from data_cases import CHATML, as_rows, assistant, char_tokenizer, user

from hotseat.data import make_prompts
from hotseat.errors import DataError


def fails(values, tokenizer=None, **options) -> str:
    with pytest.raises(DataError) as caught:
        make_prompts(as_rows(values), tokenizer or char_tokenizer(), **options)
    return str(caught.value)


def test_plain_prompts_with_template_label_and_source():
    tokenizer = char_tokenizer()
    rows = as_rows([{"q": "1+1", "a": "2", "datasource": "sums"}, {"q": "2+2", "a": 4}, {"q": "3", "a": ["3", None]}])
    prompts, report = make_prompts(rows, tokenizer, input_key="q", label_key="a", input_template="Q: {}\nA:")
    assert [prompt.text for prompt in prompts] == ["Q: 1+1\nA:", "Q: 2+2\nA:", "Q: 3\nA:"]
    assert [prompt.label for prompt in prompts] == ["2", 4, ["3", None]]
    assert [prompt.source for prompt in prompts] == ["sums", "", ""]
    [renamed], _ = make_prompts(as_rows([{"input": "1+1", "datasource": None, "data_source": "more"}]), tokenizer)
    assert renamed.source == "more"
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert tokenizer.decode(prompts[0].token_ids) == prompts[0].text
    assert (report.num_rows, report.num_kept, report.longest) == (3, 3, 9)


def test_labels_are_the_rows_values_and_empty_without_a_key():
    labels = [True, 2.5, {"tests": [{"input": "1", "output": "2"}]}, "", (1, 2)]
    rows = as_rows([{"input": "x", "label": label} for label in labels])
    prompts, _ = make_prompts(rows, char_tokenizer(), label_key="label")
    assert [prompt.label for prompt in prompts] == [*labels[:4], [1, 2]]  # columnar files have tuples
    unlabelled, _ = make_prompts(rows, char_tokenizer())
    assert {prompt.label for prompt in unlabelled} == {""}


def test_braces_in_the_data_are_left_alone():
    prompts, _ = make_prompts(as_rows([{"input": "{x} {}"}]), char_tokenizer(), input_template="{{{}}}")
    assert prompts[0].text == "{{x} {}}"


def test_chat_prompts_from_messages_and_from_strings():
    rows = as_rows([{"input": [user("a"), assistant("b"), user("c")]}, {"input": "d"}])
    prompts, _ = make_prompts(rows, char_tokenizer(CHATML), apply_chat_template=True)
    assert prompts[0].text == "<|user|>a<eos>\n<|assistant|>b<eos>\n<|user|>c<eos>\n<|assistant|>"
    assert prompts[1].text == "<|user|>d<eos>\n<|assistant|>"
    assert len(prompts[1].token_ids) == 5  # the special tokens are one token each


def test_another_chat_template_than_the_tokenizers():
    template = "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    prompts, _ = make_prompts(
        as_rows([{"input": "d"}]), char_tokenizer(), apply_chat_template=True, chat_template=template
    )
    assert prompts[0].text == "d>"


def test_variables_of_the_chat_template():
    template = "{{ messages[0].content }}{{ '' if enable_thinking else '<no>' }}{{ eos_token }}"
    options = {"apply_chat_template": True, "chat_template_kwargs": {"enable_thinking": True}}
    prompts, _ = make_prompts(as_rows([{"input": "d"}]), char_tokenizer(template), **options)
    assert prompts[0].text == "d<eos>"


@pytest.mark.parametrize("template", ["tmpl.jinja", "{% for message in messages %}{{ message.role }}: {% endfor %}"])
def test_a_template_that_shows_no_content_is_refused(template):
    options = {"apply_chat_template": True, "chat_template": template}
    assert "has to show the content of messages" in fails([{"input": "d"}], **options)


def test_a_template_for_parts_alone_is_used():
    template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    rows = as_rows([{"input": [{"role": "user", "content": [{"type": "text", "text": "d"}]}]}])
    prompts, _ = make_prompts(rows, char_tokenizer(), apply_chat_template=True, chat_template=template)
    assert prompts[0].text == "d"


def test_prompts_over_the_limit_are_dropped_and_counted_and_those_at_it_are_kept():
    """Scenario 36."""
    prompts, report = make_prompts(
        as_rows([{"input": "abcd"}, {"input": "abcde"}, {"input": "abc"}]), char_tokenizer(), prompt_max_length=4
    )
    assert [(prompt.index, prompt.text) for prompt in prompts] == [(0, "abcd"), (1, "abc")]
    assert (report.num_lost, max(len(prompt.token_ids) for prompt in prompts)) == (1, 4)


def test_nothing_left_is_an_error():
    message = fails([{"input": "abcde"}], prompt_max_length=4)
    assert message == (
        "none of the 1 rows is a prompt with at most 4 tokens: raise data.prompt_max_length\n"
        '  data.jsonl:1 before: {"input": "abcde"}\n'
        "  after the template, 5 tokens: 'abcde'"
    )
    assert fails([]) == "none of the 0 rows is a prompt"


def test_no_chat_template():
    """Scenario 35."""
    message = fails([{"input": "x"}], apply_chat_template=True)
    assert "the tokenizer of tiny-model has no chat template: set data.chat_template" in message


def test_every_bad_row_is_named_with_line_and_key():
    """Scenario 34."""
    message = fails(
        [{"question": "x"}, {"input": None}, {"input": 3}, {"input": ""}, {"input": [user("x")]}, {}], label_key="label"
    )
    assert message.startswith("6 problems in the data:\n")
    assert "data.jsonl:1: input: missing; the row has: question" in message
    assert "data.jsonl:2: input: null" in message
    assert "data.jsonl:3: input: a number, not a string" in message
    assert "data.jsonl:4: input: empty" in message
    assert "data.jsonl:5: input: a list, not a string; set data.apply_chat_template" in message
    assert message.endswith("and 1 more")


def test_one_cause_in_many_rows_is_one_problem():
    message = fails([{"input": "x", "answer": "1"}] * 300, label_key="label")
    assert message.splitlines() == [
        "1 problem in the data:",
        "  data.jsonl:1, data.jsonl:2, data.jsonl:3 and 297 more: label: missing; the row has: input, answer",
    ]


def test_a_key_that_is_nearly_right_is_suggested():
    assert "did you mean 'prompt'?" in fails([{"prompt": "x"}], input_key="promt")


def test_bad_labels():
    message = fails([{"input": "x"}, {"input": "x", "label": None}, {"input": "x", "label": b"x"}], label_key="label")
    assert "data.jsonl:1: label: missing" in message
    assert "data.jsonl:2: label: null" in message
    assert "data.jsonl:3: label: a bytes, which has no JSON text" in message


def test_bad_messages():
    tokenizer = char_tokenizer("{{ raise_exception('no systems') if messages[0].role == 'system' }}x")
    message = fails(
        [
            {"input": []},
            {"input": ["x"]},
            {"input": [{"content": "x"}]},
            {"input": [user("x"), {"role": "user", "content": None}]},
            {"input": [{"role": "system", "content": "x"}]},
        ],
        tokenizer,
        apply_chat_template=True,
    )
    assert "data.jsonl:1: input: no messages" in message
    assert "data.jsonl:2: input[0]: a string, not a message with role and content" in message
    assert "data.jsonl:3: input[0]: role is null, not a string" in message
    assert "data.jsonl:4: input[1]: content is missing or null" in message
    assert "data.jsonl:5: input: the chat template does not take these messages: no systems" in message
    assert "input: empty" in fails([{"input": ""}], tokenizer, apply_chat_template=True)
    assert "neither a string nor a list" in fails([{"input": {}}], tokenizer, apply_chat_template=True)


def test_nulls_that_a_columnar_file_filled_in_are_not_shown_to_the_template():
    template = "{{ 'tools' if messages[0].tool_calls is defined else 'none' }}"
    rows = as_rows([{"input": [{"role": "user", "content": "x", "tool_calls": None}]}])
    prompts, _ = make_prompts(rows, char_tokenizer(template), apply_chat_template=True)
    assert prompts[0].text == "none"


def test_a_prompt_without_tokens_is_an_error():
    """Scenario 36."""
    assert "data.jsonl:1: input: the prompt '' has no tokens" in fails(
        [{"input": "x"}], char_tokenizer("{{ '' }}"), apply_chat_template=True
    )


@pytest.mark.parametrize("template", ["no place", "{} {}", "{} {name}", "{} {", "{}{0}"])
def test_input_templates_that_cannot_be_filled_in(template):
    assert "needs exactly one {} for the prompt" in fails([{"input": "x"}], input_template=template)
