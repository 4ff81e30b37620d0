"""Requirements of verl's data that only its translation knows: a violation is found before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hotseat.config import Config
from hotseat.errors import DataError
from hotseat.verl.key_values import BUILT_IN_REWARD
from hotseat.verl.overrides import HydraLine
from hotseat.verl.scores import GSM8K

SOURCE_KEY = "data_source"


def data_problems(config: Config, line: HydraLine) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of data that this run would misread. Files that cannot be read are left to checks.

    The built-in scoring knows one source of rows; and a column of images under verl's default name is not taken for
    text.
    """
    images = line["data.image_key"]
    for key, path in (("data.train_files", config.data.path), ("data.val_files", config.eval.path)):
        files = [Path(part).expanduser() for part in (path or "").split(",")]
        for file in filter(Path.is_file, files):
            try:
                sources, columns = _read(file)
            except (DataError, OSError):
                continue
            others = sorted(sources - {GSM8K})
            if config.reward.function == BUILT_IN_REWARD and others:
                yield (
                    key,
                    f"given {file} with {SOURCE_KEY} {', '.join(others)}: without reward.custom_reward_function.path"
                    f" only {GSM8K} is scored; give a file with compute_score(data_source, solution_str, ground_truth,"
                    " extra_info)",
                )
            if not line.has("data.image_key") and config.data.image_key is None and images in columns:
                yield (
                    "data.image_key",
                    f"not given, and {file} has a column {images}: give data.image_key={images} for a model that sees"
                    " images, or data.image_key=null",
                )


def _read(file: Path) -> tuple[set[str], set[str]]:
    """Return the sources of a file's rows, where `(none)` stands for rows without one, and the file's columns."""
    if file.suffix == ".parquet":
        columns, values = _read_parquet(file)
    else:
        from hotseat.data import load_rows

        rows = load_rows(str(file))
        columns = {name for row in rows for name in row.values}
        values = [row.values.get(SOURCE_KEY) for row in rows]
    return {"(none)" if value is None else str(value) for value in values}, columns


def _read_parquet(file: Path) -> tuple[set[str], list[str | None]]:
    """Return the columns of a file and its sources, without reading other columns: rows with images are large."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        columns = set(pq.read_schema(file).names)
        if SOURCE_KEY not in columns:
            return columns, [None]
        return columns, pq.read_table(file, columns=[SOURCE_KEY])[SOURCE_KEY].to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}") from error
