"""Tables in the documentation, each between two marks of its page."""

from __future__ import annotations

from pathlib import Path


def with_table(document: str, table: str, begin: str, end: str) -> str:
    """Return a document with the table between two marks replaced."""
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def update(page: str, table: str, begin: str, end: str) -> None:
    """Replace the table between two marks of a page."""
    path = Path(page)
    path.write_text(with_table(path.read_text(), table, begin, end))
