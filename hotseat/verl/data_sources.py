"""The sources of a run's data: the built-in scoring knows one of them, and refuses a run on others before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hotseat.config import Config
from hotseat.errors import DataError
from hotseat.verl.derive import BUILT_IN_REWARD
from hotseat.verl.scores import GSM8K

SOURCE_KEY = "data_source"


def source_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of data that the built-in scoring cannot score. Files that cannot be read are left out."""
    if config.reward.function != BUILT_IN_REWARD:
        return
    for key, path in (("data.train_files", config.data.path), ("data.val_files", config.eval.path)):
        try:
            others = sorted(_sources(path or "") - {GSM8K})
        except (DataError, OSError):
            continue
        if others:
            yield (
                key,
                f"given {path} with {SOURCE_KEY} {', '.join(others)}: without reward.custom_reward_function.path only"
                f" {GSM8K} is scored; give a file with compute_score(data_source, solution_str, ground_truth,"
                " extra_info)",
            )


def _sources(path: str) -> set[str]:
    """Return the sources of the rows of some files; `(none)` stands for rows without one."""
    found: set[str] = set()
    for part in filter(None, path.split(",")):
        file = Path(part).expanduser()
        if not file.is_file():
            continue
        if file.suffix == ".parquet":
            values = _parquet_column(file)
        else:
            from hotseat.data import load_rows

            values = [row.values.get(SOURCE_KEY) for row in load_rows(str(file))]
        found |= {"(none)" if value is None else str(value) for value in values}
    return found


def _parquet_column(file: Path) -> list[str | None]:
    """Return the column of sources alone: rows with images are large."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if SOURCE_KEY not in pq.read_schema(file).names:
            return [None]
        values: list[str | None] = pq.read_table(file, columns=[SOURCE_KEY])[SOURCE_KEY].to_pylist()
    except pa.ArrowException as error:
        raise DataError(f"{file}: cannot be read as Parquet: {error}") from error
    return values
