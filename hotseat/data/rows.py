"""Reading of rows from files, folders, saved data sets and the hub.

A row knows its place: `train.jsonl:12` is line 12 (from 1) of a text file, `train.parquet[12]` is row 12 (from 0) of a
file or data set that has no lines.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from hotseat.data.row_problems import Problems, kind_of
from hotseat.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One row with its file and line."""

    values: Mapping[str, Any]
    file: str
    number: int
    has_line: bool

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}" if self.has_line else f"{self.file}[{self.number}]"


def load_rows(
    path: str,
    *,
    split: str = "train",
    probs: str | Sequence[float] | None = None,
    seed: int = 42,
    max_samples: int | None = None,
    load_from_hub: Callable[[str, str | None, str], Sequence[Mapping[str, Any]]] | None = None,
) -> list[Row]:
    """Read all rows of `path`, or the first `max_samples` of them.

    `path` is a file (.jsonl, .json, .csv, .tsv, .parquet, .arrow), a folder of such files, a data set saved by
    `datasets`, or, where nothing of that name exists, a data set on the hub; `NAME@FOLDER` is a folder in it. Several
    parts are joined by commas. Without `probs` they follow one another. With `probs` each row comes from a part drawn
    by these probabilities, until every part has been used up; parts that are used up earlier start again, as in
    `datasets.interleave_datasets` with "all_exhausted".

    `split` names the split of a folder, a saved data set or the hub, also as a slice: `train[:5%]`, `train[100:]`. For
    a single file only the slice matters.
    """
    parts = [part.strip() for part in path.split(",")]
    if "" in parts:
        raise DataError(f"data.path {path!r} has an empty part: give names joined by single commas")
    shares = _shares(probs, len(parts))
    hub = load_from_hub or _load_from_hub
    problems = Problems()
    # Each part is cut, too: the first n rows of a mixture come from the first n rows of each part.
    loaded = [list(islice(_read_part(part, split, hub, problems), max_samples)) for part in parts]
    problems.raise_if_any()
    for part, rows in zip(parts, loaded, strict=True):
        if not rows:
            raise DataError(f"{part}: no rows in split {split!r}")
    if shares is None:
        return [row for rows in loaded for row in rows][:max_samples]
    draws = _interleave([len(rows) for rows in loaded], shares, seed, max_samples)
    return [loaded[part][number] for part, number in draws]


def _shares(probs: str | Sequence[float] | None, num_parts: int) -> list[float] | None:
    if probs is None:
        return None
    texts = probs.split(",") if isinstance(probs, str) else list(probs)
    try:
        shares = [float(prob) for prob in texts]
    except ValueError:
        raise DataError(f"data.probs {probs!r}: not numbers joined by commas") from None
    if len(shares) != num_parts:
        raise DataError(f"data.probs has {len(shares)} probabilities for {num_parts} data sets")
    if not all(0 < share <= 1 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise DataError(
            f"data.probs {probs!r}: each must be above 0, since every part is to be used up, and they must add up to 1"
        )
    return [share / sum(shares) for share in shares]


def _interleave(
    lengths: Sequence[int], shares: Sequence[float], seed: int, max_samples: int | None
) -> Iterator[tuple[int, int]]:
    """Yield (part, row in it) until every part is used up. Draws in blocks of 1000, to give what `datasets` gives."""
    generator = np.random.default_rng(seed)
    taken, num_unused, num_rows = [0] * len(lengths), len(lengths), 0
    while True:
        for part in generator.choice(len(lengths), size=1000, p=shares).tolist():
            if num_unused == 0 or num_rows == max_samples:
                return
            yield part, taken[part] % lengths[part]
            num_rows += 1
            taken[part] += 1
            num_unused -= taken[part] == lengths[part]


# --- one part ---------------------------------------------------------------------------------------------------------


def _read_part(
    part: str, split: str, hub: Callable[..., Sequence[Mapping[str, Any]]], problems: Problems
) -> Iterator[Row]:
    name, _ = _split_name(split)
    path = Path(part).expanduser()
    folder = None
    if not path.exists() and "@" in part:
        part, folder = (each.strip() for each in part.rsplit("@", 1))
        path = Path(part).expanduser()
    if folder is not None and path.is_dir():
        if not (path / folder).is_dir():
            raise DataError(f"{path} has no folder {folder!r}")
        path = path / folder
    if path.is_file():
        if folder is not None:
            raise DataError(f"{path} is a file: it has no folder {folder!r}")
        return _sliced(_read_file(path, problems), split)
    if path.is_dir():
        saved = (path / "dataset_dict.json").exists() or (path / "state.json").exists()
        rows = _saved_rows(path, name) if saved else _folder_rows(path, name, problems)
        return _sliced(rows, split)
    if part.startswith((".", "/", "~")) or path.suffix in _READERS or part.count("/") > 1:
        raise DataError(f"no such file or folder: {path}")
    return _rows_of(hub(part, folder, split), part)


def _split_name(split: str) -> tuple[str, str]:
    """Split `train[:5%]` into `train` and `:5%`."""
    match = re.fullmatch(r"([\w.-]+)(?:\[([-\d%:]+)\])?", split)
    if not match:
        raise DataError(f"data.split {split!r}: give a name such as train, or a slice such as train[:5%]")
    return match[1], match[2] or ""


def _sliced(rows: Iterator[Row], split: str) -> Iterator[Row]:
    name, slicing = _split_name(split)
    if not slicing:
        return rows
    from datasets import ReadInstruction

    everything = list(rows)
    try:
        bounds = ReadInstruction.from_spec(split).to_absolute({name: len(everything)})[0]
    except (ValueError, AssertionError) as error:
        raise DataError(f"data.split {split!r} of {len(everything)} rows: {error}") from None
    return iter(everything[bounds.from_ or 0 : bounds.to])


def _rows_of(values: Sequence[Mapping[str, Any]], name: str) -> Iterator[Row]:
    return (Row(row, name, number, has_line=False) for number, row in enumerate(values))


def _saved_rows(path: Path, split: str) -> Iterator[Row]:
    from datasets import DatasetDict, load_from_disk

    try:
        saved = load_from_disk(str(path))
    except Exception as error:
        raise DataError(f"{path}: cannot be read as a saved data set: {error}") from error
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise DataError(f"{path} has no split {split!r}; it has: {', '.join(map(str, saved))}")
        saved = saved[split]
    return _rows_of(saved, str(path))


def _load_from_hub(name: str, folder: str | None, split: str) -> Sequence[Mapping[str, Any]]:
    from datasets import load_dataset

    try:
        return load_dataset(name, data_dir=folder, split=split)
    except Exception as error:
        where = name if folder is None else f"{name}@{folder}"
        raise DataError(
            f"{where}: there is no such file or folder here, and it could not be loaded from the hub as a data set with"
            f" split {split!r}: {type(error).__name__}: {error}"
        ) from error


# --- folders of files -------------------------------------------------------------------------------------------------

_SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}


def _folder_rows(path: Path, split: str, problems: Problems) -> Iterator[Row]:
    """Read the files of a split, recognised by words in their names as on the hub; without any, all are train."""
    files = sorted(file for file in path.rglob("*") if file.suffix in _READERS and file.is_file())
    files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    if not files:
        raise DataError(f"{path} has no data files: none ends in {', '.join(_READERS)}")
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(_split_of(file.relative_to(path)), []).append(file)
    if set(by_split) == {""}:
        by_split = {"train": files}
    chosen = by_split.get(_SPLIT_WORDS.get(split, split), [])
    if not chosen:
        names = ", ".join(sorted(filter(None, by_split)))
        raise DataError(f"{path} has no files of split {split!r}; by their names it has: {names}")
    suffixes = {file.suffix for file in chosen}
    if len(suffixes) > 1:
        raise DataError(f"{path} mixes {', '.join(sorted(suffixes))} files: name the ones to use, joined by commas")
    return (row for file in chosen for row in _read_file(file, problems))


def _split_of(file: Path) -> str:
    """Return the split that a file's name, or else its folders' names, contain; "" if none does."""
    for name in (file.stem, *reversed(file.parts[:-1])):
        for word in re.findall(r"[a-z]+", name.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return ""


# --- files ------------------------------------------------------------------------------------------------------------


def _read_file(path: Path, problems: Problems) -> Iterator[Row]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f"{path}: files that end in {path.suffix!r} cannot be read; {', '.join(_READERS)} can")
    try:
        if os.path.getsize(path) == 0:
            raise DataError(f"{path} is empty")
        yield from reader(path, problems)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_json_lines(path: Path, problems: Problems) -> Iterator[Row]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if text.strip():
                    yield from _row(json.loads(text), path, number, problems)
            except UnicodeDecodeError as error:
                problems.add(where, f"not UTF-8 at byte {error.start} of the line")
            except json.JSONDecodeError as error:
                problems.add(where, f"not JSON: {error.msg} at column {error.colno}")


def _read_json(path: Path, problems: Problems) -> Iterator[Row]:
    """Read a list of objects element by element, to know their lines; a file without a list is read as JSON lines."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        problems.add(str(path), f"not UTF-8 at byte {error.start}")
        return
    if not text.lstrip().startswith("["):
        yield from _read_json_lines(path, problems)
        return
    decoder, line, seen = json.JSONDecoder(), 1, 0
    at = _skip_space(text, text.index("[") + 1)
    while text[at : at + 1] != "]":
        line, seen = line + text.count("\n", seen, at), at
        try:
            values, end = decoder.raw_decode(text, at)
            at = _skip_space(text, end)
            if text[at : at + 1] == ",":
                at = _skip_space(text, at + 1)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        except json.JSONDecodeError as error:
            problems.add(f"{path}:{error.lineno}", f"not JSON: {error.msg} at column {error.colno}")
            return
        yield from _row(values, path, line, problems)
    if text[at + 1 :].strip():
        problems.add(f"{path}:{text.count(chr(10), 0, at) + 1}", "not JSON: text after the end of the list")


def _skip_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at


def _row(values: Any, path: Path, line: int, problems: Problems) -> Iterator[Row]:
    if isinstance(values, dict):
        yield Row(values, str(path), line, has_line=True)
    else:
        problems.add(f"{path}:{line}", f"{kind_of(values)}, not an object with keys")


def _read_csv(path: Path, problems: Problems, delimiter: str = ",") -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # a text may be longer than the 128 KiB that the module allows by default
    with open(path, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        header, begin = None, 1
        try:
            for fields in reader:
                line, begin = begin, reader.line_num + 1
                if not fields:
                    continue
                if header is None:
                    header = fields
                    if len(set(header)) < len(header):
                        problems.add(f"{path}:{line}", f"the header names a column twice: {', '.join(header)}")
                        return
                elif len(fields) != len(header):
                    expected = f"the header has {len(header)}: {', '.join(header)}"
                    problems.add(f"{path}:{line}", f"{len(fields)} fields, but {expected}")
                else:
                    yield Row(dict(zip(header, fields, strict=True)), str(path), line, has_line=True)
        except csv.Error as error:
            problems.add(f"{path}:{begin}", f"not CSV: {error}")
        except UnicodeDecodeError as error:
            problems.add(f"{path}:{begin}", f"not UTF-8 here or soon after: {error.reason}")


def _read_parquet(path: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield from _rows_of(_elements(file.iter_batches()), str(path))
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from error


def _read_arrow(path: Path, problems: Problems) -> Iterator[Row]:
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                file = pa.ipc.open_file(source)
                reader = (file.get_batch(number) for number in range(file.num_record_batches))
            yield from _rows_of(_elements(reader), str(path))
    except pa.ArrowException as error:
        raise DataError(f"{path}: cannot be read as Arrow: {error}") from error


def _elements(batches: Any) -> Any:
    return (values for batch in batches for values in batch.to_pylist())


_READERS: dict[str, Callable[[Path, Problems], Iterator[Row]]] = {
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
