"""The table of RLinf's keys in docs/rlinf.md: `python -m hotseat.rlinf.config_table FILE` updates it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hotseat.config.load import valid_keys
from hotseat.config.unsupported import UNBUILT
from hotseat.rlinf.config_keys import TABLE, RlinfKey

BEGIN, END = "<!-- table of keys: begin -->", "<!-- table of keys: end -->"
HEADER = "| RLinf | here |\n| --- | --- |"


def render_table() -> str:
    """Render one row per key of RLinf, in the order of the table."""
    valid = set(valid_keys())
    return "\n".join([HEADER, *(f"| `{key.theirs}` | {_here(key, valid)} |" for key in TABLE)])


def with_table(document: str) -> str:
    """Return a document with the table between its two marks replaced."""
    before, _, rest = document.partition(BEGIN)
    return f"{before}{BEGIN}\n{render_table()}\n{END}{rest.partition(END)[2]}"


def _here(key: RlinfKey, valid: set[str]) -> str:
    if not key.ours:
        return f"no effect: {key.because}"
    if key.ours not in valid:
        return f"no effect: this version has no {key.ours}"
    lacking = next((each.what for each in UNBUILT if each.owns(key.ours)), None)
    return f"`{key.ours}`" + (f"; not built yet: {lacking}" if lacking else "")


def main(argv: Sequence[str]) -> None:
    path = Path(argv[0])
    path.write_text(with_table(path.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
