"""Data that limits on length take away: refused above a share, said otherwise, and never whispered."""

import json

import pytest
from data_cases import CHATML, as_rows, assistant, char_tokenizer, user

from hotseat.config import loads
from hotseat.data import make_examples, make_pairs, make_prompts
from hotseat.data.row_problems import LostRow
from hotseat.errors import DataError, UserError
from hotseat.loop.inputs import rl_prompts, supervised
from hotseat.openrlhf.translate import translate


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(path, *overrides: str, task: str = "sft", **data):
    sections = {"path": path, **data}
    text = f"task: {task}\nactor: {{model: m}}\ndata: {json.dumps(sections)}\n"
    return loads(text, overrides)


SHORT, LONG = {"input": "ab", "out": "c"}, {"input": "abcd", "out": "efgh"}


def test_what_is_dropped_and_what_is_cut_is_counted_and_the_first_is_shown():
    rows = as_rows([SHORT, LONG, {"input": "abcdefg", "out": "h"}])
    _, report = make_examples(rows, char_tokenizer(), output_key="out", input_template="<{}>", max_length=7)
    assert (report.num_cut, report.num_dropped, report.longest) == (1, 1, 11)  # 9 + 1 + the end
    assert report.first == LostRow("data.jsonl:2", LONG, "<abcd>efgh", 11, 6)
    assert str(report.first) == (
        '  data.jsonl:2 before: {"input": "abcd", "out": "efgh"}\n'
        "  after the template, 11 tokens, the answer from token 7 on: '<abcd>efgh'"
    )


def test_long_rows_are_shown_by_their_ends():
    row = LostRow("data.jsonl:1", {"input": "a" * 5000 + "z"}, "<" + "a" * 5000 + ">", 5002)
    text = str(row)
    assert len(text) < 1100
    assert "aaa ... aaa" in text
    assert text.endswith("a>'")


def test_a_conversation_is_shown_as_the_template_renders_it():
    talk = {"input": [user("hi"), assistant("yo")]}
    rows = as_rows([talk, {"input": [user("a"), assistant("b")]}])
    tokenizer = char_tokenizer(CHATML)
    _, report = make_examples(rows, tokenizer, apply_chat_template=True, max_length=8)
    assert report.num_lost == 1
    assert report.first.text.startswith("<|user|>hi<eos>\n<|assistant|>yo<eos>")


def test_pairs_are_lost_where_one_answer_is_cut():
    rows = as_rows(
        [
            {"p": "q", "chosen": "a", "rejected": "b"},
            {"p": "q", "chosen": "a", "rejected": "bcde"},  # cut
            {"p": "q", "chosen": "abX", "rejected": "abY"},  # alike once they are cut
            {"p": "q", "chosen": "a", "rejected": "a"},  # alike as they are: nothing that a limit takes
        ]
    )
    _, report = make_pairs(rows, char_tokenizer(), prompt_key="p", max_length=3)
    assert (report.num_cut, report.num_dropped, report.longest) == (1, 1, 6)
    assert report.first.text == "qbcde"


def test_prompts_are_lost_where_they_are_too_long():
    _, report = make_prompts(as_rows([{"input": "ab"}, {"input": "abc"}]), char_tokenizer(), prompt_max_length=2)
    assert (report.num_dropped, report.longest, report.first.num_tokens) == (1, 3, 3)


# --- what a run does about it -----------------------------------------------------------------------------------------


def test_examples_above_the_share_are_refused_with_a_row_before_and_after_the_template(tmp_path):
    path = write(tmp_path / "rows.jsonl", [SHORT] * 18 + [LONG] * 2)
    with pytest.raises(DataError) as caught:
        supervised(config(path, output_key="out", input_template="{}=", max_length=5), char_tokenizer())
    assert str(caught.value) == (
        "data.path: 2 of 20 rows (10%) do not fit data.max_length 5: 2 dropped; data.max_lost_fraction allows"
        " 5%. The first of them:\n"
        f'  {path}:19 before: {{"input": "abcd", "out": "efgh"}}\n'
        "  after the template, 10 tokens, the answer from token 6 on: 'abcd=efgh'\n"
        "raise data.max_length (the longest row has 10 tokens), shorten the rows, or set data.max_lost_fraction to 1 if"
        " that is as it should be"
    )


def test_a_share_that_is_allowed_is_no_more_than_counted(tmp_path):
    path = write(tmp_path / "rows.jsonl", [SHORT] * 19 + [LONG])
    data = supervised(config(path, output_key="out", max_length=6), char_tokenizer())
    assert data.notes == ["20 examples, 40 tokens to learn (1 truncated, 0 dropped without an answer)"]
    with pytest.raises(DataError, match="1 of 20 rows"):
        supervised(
            config(path, "data.max_lost_fraction=0.04", output_key="out", max_length=6),
            char_tokenizer(),
        )


def test_where_the_limit_is_off_the_loss_is_a_warning(tmp_path):
    path = write(tmp_path / "rows.jsonl", [SHORT] * 8 + [LONG] * 2)
    made = config(path, "data.max_lost_fraction=1", output_key="out", max_length=6)
    data = supervised(made, char_tokenizer())
    assert len(data.items) == 10
    assert data.notes[1].startswith(
        "warning: data.path: 2 of 10 rows (20%) do not fit data.max_length 6: 2 cut; raise data.max_length (the"
        " longest row has 9 tokens). The first of them:\n"
    )


def test_prompts_pairs_and_evaluation_data_are_held_to_it_too(tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", [{"input": "ab"}] * 9 + [{"input": "abcdefgh"}])
    message = "data.path: 1 of 10 rows \\(10%\\) do not fit data.prompt_max_length 4"
    with pytest.raises(DataError, match=message) as caught:
        rl_prompts(config(prompts, task="rl", prompt_max_length=4), char_tokenizer())
    assert "raise data.prompt_max_length and data.max_length (the longest row has 8 tokens)" in str(caught.value)
    fine = write(tmp_path / "fine.jsonl", [{"input": "ab"}] * 10)
    with pytest.raises(DataError, match="eval.path: 1 of 10 rows \\(10%\\) do not fit data.prompt_max_length 4"):
        rl_prompts(config(fine, f"eval.path={prompts}", task="rl", prompt_max_length=4), char_tokenizer())
    made = config(fine, f"eval.sets={{sums: {{path: {prompts}}}}}", task="rl", prompt_max_length=4)
    with pytest.raises(DataError, match="eval.sets.sums.path: 1 of 10 rows \\(10%\\) do not fit"):
        rl_prompts(made, char_tokenizer())
    pairs = write(tmp_path / "pairs.jsonl", [{"chosen": "a", "rejected": "bcdefg"}])
    with pytest.raises(DataError, match=r"data.path: 1 of 1 rows \(100%\) do not fit data.max_length 4: 1 cut"):
        supervised(config(pairs, task="rm", max_length=4), char_tokenizer())


def test_named_sets_of_evaluation_data_have_columns_and_limits_of_their_own(tmp_path):
    rows = write(tmp_path / "rows.jsonl", [{"input": "ab", "datasource": "a"}, {"input": "cd", "datasource": "b"}])
    other = write(tmp_path / "other.jsonl", [{"problem": text, "answer": text} for text in ("x", "y", "z")])
    sets = "eval.sets={more: {path: %s, input_key: problem, label_key: answer, max_samples: 2}, again: {path: %s}}"
    made = config(rows, f"eval.path={rows}", sets % (other, rows), task="rl", prompt_max_length=4)
    _, prompts, notes, indices = rl_prompts(made, char_tokenizer())
    assert [(prompt.index, prompt.text, prompt.label) for prompt in prompts] == [
        *((0, "ab", ""), (1, "cd", "")),
        *((2, "x", "x"), (3, "y", "y")),
        *((4, "ab", ""), (5, "cd", "")),
    ]
    assert indices == {"more": range(2, 4), "again": range(4, 6)}
    assert "2 held-out prompts in more" in notes
    clash = config(rows, f"eval.path={rows}", f"eval.sets={{a: {{path: {other}}}}}", task="rl", prompt_max_length=4)
    with pytest.raises(UserError, match="eval.sets.a: rows of eval.path have that datasource, too"):
        rl_prompts(clash, char_tokenizer())


def test_openrlhfs_commands_only_warn_unless_they_are_told():
    line = ["--pretrain", "m", "--dataset", "d"]
    assert translate("train_sft", line, {}).config.data.max_lost_fraction == 1.0
    made = translate("train_sft", [*line, "--max_lost_fraction", "0.1"], {})
    assert made.config.data.max_lost_fraction == 0.1
    assert "raise --max_len" in made.rename_keys("raise data.max_length")
