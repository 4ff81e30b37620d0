"""Columns for reward functions that are called by names: what they can get, and what is left out and why."""

from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import as_rows, char_tokenizer

from hotseat.config import loads
from hotseat.data import columns_of, load_rows, make_prompts
from hotseat.data.columns import NotPassed, passed
from hotseat.errors import DataError, UserError
from hotseat.loop.inputs import rl_prompts

AT = datetime(2026, 11, 19, 8, 30, 1, 250)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": [1, None, True, "x"]}, {"a": [1, None, True, "x"]}),
        ((1, (2,)), [1, [2]]),  # of columnar files
        (AT, AT),
        (date(2026, 11, 19), date(2026, 11, 19)),
        (time(8, 30), time(8, 30)),
        (timedelta(days=-1, microseconds=5), timedelta(days=-1, microseconds=5)),
        (Decimal("0.10"), Decimal("0.10")),
        (bytearray(b"\x00\xff"), b"\x00\xff"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([AT, None], dtype=object), [AT, None]),
        (np.datetime64("2026-11-19T08:30:01.000250999", "ns"), AT),  # nanoseconds are cut
        (np.timedelta64(3, "h"), timedelta(hours=3)),
        (np.array(["2026-11-19", "NaT"], dtype="datetime64[D]"), [datetime(2026, 11, 19), None]),
        (pd.Timestamp(AT) + pd.Timedelta(7, "ns"), AT),
        (pd.Timestamp(AT, tz="Europe/Paris"), AT.replace(tzinfo=timezone(timedelta(hours=1)))),
        (pd.Timedelta(5, "us"), timedelta(microseconds=5)),
        (pd.NaT, None),
    ],
)
def test_values_are_of_pythons_own_types(value, expected):
    got = passed(value)
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "a set"),
        ([{"a": object()}], "a object"),
        ({1: "a"}, "an object with a key that is no text"),
        (np.longdouble(1), f"a {np.longdouble(1).dtype} of numpy"),
        (1j, "a complex"),
        (np.array([1j]), "a complex"),
    ],
)
def test_other_values_are_named(value, said):
    with pytest.raises(NotPassed) as caught:
        passed(value)
    assert str(caught.value) == said


def test_a_column_is_left_out_by_the_first_row_with_such_a_value():
    rows = as_rows([{"input": "a", "at": AT}, {"input": "b", "tags": {1}, "images": "x.png"}, {"tags": "c", "n": 1}])
    assert columns_of(rows, "images") == (["input", "at", "n"], {"tags": "data.jsonl:2 has a set"})


def test_the_input_of_such_a_function_has_no_other_value():
    messages = [{"role": "user", "content": "a", "seen": {1}}]
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    options = {"apply_chat_template": True, "chat_template": template}
    [prompt], _ = make_prompts(as_rows([{"input": messages}]), char_tokenizer(), **options)
    assert prompt.columns is None
    with pytest.raises(DataError, match="data.jsonl:1: input: has a set in it, which the reward function cannot get"):
        make_prompts(as_rows([{"input": messages}]), char_tokenizer(), columns=[], **options)


def test_columns_of_parquet_arrive_as_datasets_has_them(tmp_path):
    values = {
        "input": ["a", "b"],
        "at": [AT, None],
        "day": [date(2026, 1, 2)] * 2,
        "price": [Decimal("1.50"), Decimal("2.00")],
        "raw": [b"\x00", b""],
        "took": [timedelta(seconds=3), None],
        "zoned": [AT.replace(tzinfo=UTC), None],
    }
    pq.write_table(pa.table(values), tmp_path / "rows.parquet")
    rows = load_rows(str(tmp_path / "rows.parquet"))
    names, left_out = columns_of(rows)
    assert (names, left_out) == ([*values], {})
    prompts, _ = make_prompts(rows, char_tokenizer(), columns=names)
    for number, prompt in enumerate(prompts):
        assert prompt.columns == {name: column[number] for name, column in values.items()} | {"prompt": "ab"[number]}


# --- what a run says --------------------------------------------------------------------------------------------------


@pytest.fixture
def config_of(tmp_path):
    """Make a config with a reward function of this text, on rows with a map."""
    maps = pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"input": ["a", "b"], "counts": maps, "at": [AT, AT]}), tmp_path / "rows.parquet")

    def make(source: str, *overrides: str):
        (tmp_path / "reward.py").write_text(source)
        files = [f"data.path={tmp_path}/rows.parquet", f"reward.function={tmp_path}/reward.py"]
        return loads("actor: {model: m}", [*files, *overrides])

    return make


def with_sets(monkeypatch) -> None:
    """Have rows with sets in the column `counts`, as of a data set whose features make objects of their own."""
    from hotseat.loop import inputs

    def load(*args, **options):
        rows = load_rows(*args, **options)
        for row in rows:
            row.values["counts"] = set(dict(row.values["counts"]))
        return rows

    monkeypatch.setattr(inputs, "load_rows", load)


def test_a_map_of_arrow_is_a_list_of_pairs(config_of):
    prompts, _, notes, _ = rl_prompts(config_of("def reward_func(completions, counts, at): ...\n"), char_tokenizer())
    assert prompts[1].columns["counts"] == [["b", 2]]
    assert notes == ["2 prompts"]


def test_a_column_that_no_function_gets_is_named_once_for_each_data_set(config_of, monkeypatch):
    with_sets(monkeypatch)
    config = config_of("def reward_func(completions, counts=None, **columns): ...\n")
    prompts, _, notes, _ = rl_prompts(config, char_tokenizer())
    assert set(prompts[0].columns) == {"input", "prompt", "at"}
    [_, note] = notes
    assert note.startswith("warning: data.path: the column counts is not passed to reward functions, since ")
    assert note.endswith("rows.parquet[0] has a set in it: store it as text or numbers")
    positional = config_of("def reward_func(queries, prompts, labels): ...\n")
    assert rl_prompts(positional, char_tokenizer())[2] == ["2 prompts"]


def test_a_run_whose_function_requires_such_a_column_is_refused_with_the_reason(config_of, monkeypatch):
    with_sets(monkeypatch)
    config = config_of("def reward_func(completions, counts, at): ...\n")
    with pytest.raises(UserError) as caught:
        rl_prompts(config, char_tokenizer())
    assert (
        "reward.py: it has a parameter completions, so it is called by names, as TRL does, and it requires counts:"
        in (str(caught.value))
    )
    assert "rows.parquet[0] has a set" in str(caught.value)


def test_the_functions_that_score_an_evaluation_decide_about_its_columns(config_of, monkeypatch, tmp_path):
    with_sets(monkeypatch)
    lenient, path = "def reward_func(completions, **columns): ...\n", f"eval.path={tmp_path}/rows.parquet"
    _, _, notes, _ = rl_prompts(config_of(lenient, path), char_tokenizer())
    assert [note.split(":")[1] for note in notes if note.startswith("warning")] == [" data.path", " eval.path"]
    (tmp_path / "other.py").write_text("def reward_func(completions, counts): ...\n")
    with pytest.raises(UserError, match=r"eval\.path: eval\.reward .*other\.py: it has a parameter completions"):
        rl_prompts(config_of(lenient, path, f"eval.reward={tmp_path}/other.py"), char_tokenizer())
