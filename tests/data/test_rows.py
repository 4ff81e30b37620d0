import os

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import write_lines

from hotseat.data import load_rows
from hotseat.errors import DataError

ROWS = [{"input": f"question {number}", "label": str(number)} for number in range(5)]


def values(path, **options):
    return [dict(row.values) for row in load_rows(str(path), **options)]


def fails(path, **options) -> str:
    with pytest.raises(DataError) as caught:
        load_rows(str(path), **options)
    return str(caught.value)


# --- formats ----------------------------------------------------------------------------------------------------------


def test_json_lines_know_their_lines(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n{"a": 2}\n')
    rows = load_rows(str(path))
    assert [(row.values["a"], row.where) for row in rows] == [(1, f"{path}:1"), (2, f"{path}:3")]


def test_a_json_list_knows_the_lines_of_its_elements(tmp_path):
    path = tmp_path / "train.json"
    path.write_text('[\n  {"a": 1},\n  {\n    "a": 2\n  }, {"a": 3}\n]\n')
    assert [(row.values["a"], row.number) for row in load_rows(str(path))] == [(1, 2), (2, 3), (3, 5)]


def test_json_lines_under_the_name_json(tmp_path):
    assert values(write_lines(tmp_path / "train.json", ROWS)) == ROWS


def test_csv_and_tsv(tmp_path):
    (tmp_path / "a.csv").write_text('input,label\n"two\nlines",1\nplain,"x, y"\n')
    rows = load_rows(str(tmp_path / "a.csv"))
    assert [dict(row.values) for row in rows] == [
        {"input": "two\nlines", "label": "1"},
        {"input": "plain", "label": "x, y"},
    ]
    assert [row.number for row in rows] == [2, 4]
    (tmp_path / "a.tsv").write_text("input\tlabel\nq\t1\n")
    assert values(tmp_path / "a.tsv") == [{"input": "q", "label": "1"}]


def test_a_csv_field_may_be_long(tmp_path):
    (tmp_path / "a.csv").write_text("input\n" + "x" * 200_000 + "\n")
    assert len(values(tmp_path / "a.csv")[0]["input"]) == 200_000


def test_parquet_and_arrow(tmp_path):
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.OSFile(str(tmp_path / "file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert values(tmp_path / name) == ROWS
    assert load_rows(str(tmp_path / "a.parquet"))[3].where == f"{tmp_path / 'a.parquet'}[3]"


def test_saved_data_sets(tmp_path):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([4])}).save_to_disk(tmp_path / "both")
    assert values(tmp_path / "one") == ROWS
    assert values(tmp_path / "both", split="test") == ROWS[4:]
    assert "no split 'dev'; it has: train, test" in fails(tmp_path / "both", split="dev")


def test_a_folder_of_files_has_the_splits_that_its_names_say(tmp_path):
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data" / "train-00001.jsonl", ROWS[2:4])
    write_lines(tmp_path / "data" / "train-00000.jsonl", ROWS[:2])
    write_lines(tmp_path / "data" / "dev.jsonl", ROWS[4:])
    write_lines(tmp_path / "data" / ".hidden.jsonl", ROWS)
    assert values(tmp_path) == ROWS[:4]
    assert values(f"{tmp_path}@data", split="validation") == ROWS[4:]
    assert "no files of split 'test'; by their names it has: train, validation" in fails(tmp_path, split="test")


def test_a_folder_whose_names_say_nothing_is_train(tmp_path):
    write_lines(tmp_path / "part1.jsonl", ROWS)
    assert values(tmp_path) == ROWS
    assert "no files of split 'test'" in fails(tmp_path, split="test")


def test_folders_that_cannot_be_read(tmp_path):
    assert "has no data files" in fails(tmp_path)
    write_lines(tmp_path / "train.jsonl", ROWS)
    (tmp_path / "train.csv").write_text("input\nx\n")
    assert "mixes .csv, .jsonl files" in fails(tmp_path)
    assert "has no folder 'sub'" in fails(f"{tmp_path}@sub")
    assert "is a file: it has no folder 'sub'" in fails(f"{tmp_path / 'train.csv'}@sub")


def test_a_single_file_is_whatever_split_it_is_asked_for(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    assert values(path, split="test") == ROWS
    assert values(path, split="test[1:3]") == ROWS[1:3]
    assert values(path, split="train[:40%]") == ROWS[:2]
    assert "give a name such as train" in fails(path, split="train[")
    assert "no rows in split 'train[7:9]'" in fails(path, split="train[7:9]")
    assert "data.split 'train[:200%]' of 5 rows" in fails(path, split="train[:200%]")


def test_a_hub_name_is_tried_where_no_path_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def hub(name, folder, split):
        asked.append((name, folder, split))
        return ROWS

    rows = load_rows("owner/name@folder", split="test", load_from_hub=hub)
    assert asked == [("owner/name", "folder", "test")]
    assert rows[1].where == "owner/name[1]"
    for missing in ("./owner/name", "/owner/name", "name.jsonl", "a/b/c"):
        assert "no such file or folder" in fails(missing, load_from_hub=hub)


def test_a_hub_name_that_cannot_be_had_offline_is_a_data_error(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    where = "owner/nothing: there is no such file or folder here, and it could not be loaded from the hub"
    with pytest.raises(DataError, match=where):
        load_rows("owner/nothing")


# --- mixing -----------------------------------------------------------------------------------------------------------


def test_several_parts_without_probabilities_follow_each_other(tmp_path):
    a, b = write_lines(tmp_path / "a.jsonl", ROWS[:2]), write_lines(tmp_path / "b.jsonl", ROWS[2:])
    assert values(f"{a}, {b}") == ROWS
    assert values(f"{a},{b}", max_samples=3) == ROWS[:3]


@pytest.mark.parametrize("seed", [0, 7])
def test_mixing_gives_what_datasets_gives(tmp_path, seed):
    parts = [[{"x": f"{name}{number}"} for number in range(size)] for name, size in (("a", 7), ("b", 30), ("c", 3))]
    paths = ",".join(write_lines(tmp_path / f"{at}.jsonl", part) for at, part in enumerate(parts))
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_list(part) for part in parts],
        probabilities=[0.5, 0.3, 0.2],
        seed=seed,
        stopping_strategy="all_exhausted",
    )["x"]
    mixed = [row["x"] for row in values(paths, probs="0.5,0.3,0.2", seed=seed)]
    assert mixed == list(expected)
    assert set(mixed) == {row["x"] for part in parts for row in part}
    assert [row["x"] for row in values(paths, probs=[0.5, 0.3, 0.2], seed=seed, max_samples=9)] == mixed[:9]


def test_mixing_over_more_than_a_block_of_draws_gives_what_datasets_gives(tmp_path):
    parts = [[{"x": number} for number in range(2500)], [{"x": -1}]]
    paths = ",".join(write_lines(tmp_path / f"{at}.jsonl", part) for at, part in enumerate(parts))
    expected = datasets.interleave_datasets(
        [datasets.Dataset.from_list(part) for part in parts], [0.9, 0.1], seed=1, stopping_strategy="all_exhausted"
    )["x"]
    assert [row["x"] for row in values(paths, probs="0.9,0.1", seed=1)] == list(expected)


def test_probabilities_that_cannot_be(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    assert "not numbers" in fails(f"{path},{path}", probs="half,half")
    assert "has 1 probabilities for 2 data sets" in fails(f"{path},{path}", probs="1")
    assert "must add up to 1" in fails(f"{path},{path}", probs="0.5,0.6")
    assert "each must be above 0" in fails(f"{path},{path}", probs="0,1")
    assert "has an empty part" in fails(f"{path},,{path}")


# --- malformed --------------------------------------------------------------------------------------------------------


def test_bad_json_lines_are_named_and_counted(tmp_path):
    """Scenario 34."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n"\xff"\n{"a" 1}\nnull\n{\n{\n')
    message = fails(path)
    assert message.startswith("6 problems in the data:\n")
    assert f"{path}:2: not JSON: Expecting value at column" in message
    assert f"{path}:3: a list, not an object with keys" in message
    assert f"{path}:4: not UTF-8 at byte 1 of the line" in message
    assert f"{path}:6: null, not an object" in message
    assert message.endswith("and 1 more")  # both lines with a lone brace


def test_a_bad_line_within_max_samples_is_not_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{\n{"a": 1}\n{"a": 2}\n')
    assert f"{path}:1: not JSON" in fails(path, max_samples=1)


def test_problems_of_all_parts_are_shown_together(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n")
    (tmp_path / "b.csv").write_text("x,y\n1\n")
    message = fails(f"{tmp_path / 'a.jsonl'},{tmp_path / 'b.csv'}")
    assert "2 problems" in message
    assert f"{tmp_path / 'b.csv'}:2: 1 fields, but the header has 2: x, y" in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"a": 1},\n {"a": }]', ":2: not JSON: Expecting value"),
        ('[{"a": 1}\n {"a": 2}]', ":2: not JSON: Expecting ',' or ']'"),
        ('[{"a": 1},\n3]', ":2: a number, not an object"),
        ('[{"a": 1}', ":1: not JSON: Expecting ',' or ']'"),
        ('[{"a": 1}]\n]', ":1: not JSON: text after the end"),
        ('{"a": 1,\n"b": 2}', ":1: not JSON"),
    ],
)
def test_bad_json_lists(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    assert message in fails(tmp_path / "a.json")


def test_bad_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,x\n1,2\n")
    assert f"{path}:1: the header names a column twice" in fails(path)
    path.write_text('x\n1\n"open\n')
    assert f"{path}:3: not CSV: unexpected end of data" in fails(path)
    path.write_bytes(b"x\n\xff\n")
    assert "not UTF-8" in fails(path)
    (tmp_path / "b.json").write_bytes(b"[\xff]")
    assert "not UTF-8 at byte 1" in fails(tmp_path / "b.json")


def test_files_that_are_empty_or_something_else(tmp_path):
    (tmp_path / "a.jsonl").write_text("")
    assert "a.jsonl is empty" in fails(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("\n\n")
    assert "b.jsonl: no rows in split 'train'" in fails(tmp_path / "b.jsonl")
    (tmp_path / "c.csv").write_text("x,y\n")
    assert "no rows" in fails(tmp_path / "c.csv")
    (tmp_path / "d.json").write_text("[]")
    assert "no rows" in fails(tmp_path / "d.json")
    for name, kind in (("e.parquet", "Parquet"), ("f.arrow", "Arrow")):
        (tmp_path / name).write_text("no such thing")
        assert f"{name}: cannot be read as {kind}" in fails(tmp_path / name)
    (tmp_path / "g.txt").write_text("x")
    assert "files that end in '.txt' cannot be read" in fails(tmp_path / "g.txt")
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "state.json").write_text("{}")
    assert "cannot be read as a saved data set" in fails(tmp_path / "h")


@pytest.mark.skipif(os.getuid() == 0, reason="root reads everything")
def test_a_file_that_may_not_be_read(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ROWS)
    os.chmod(path, 0)
    assert "Permission denied" in fails(path)
