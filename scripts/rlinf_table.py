"""The table of RLinf's keys in docs/rlinf.md: `python scripts/rlinf_table.py FILE` updates it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from doc_tables import update

from hotseat.config.load import valid_keys
from hotseat.config.unsupported import UNSUPPORTED
from hotseat.rlinf.config_keys import TABLE, RlinfKey

BEGIN, END = "<!-- table of keys: begin -->", "<!-- table of keys: end -->"
HEADER = "| RLinf | here |\n| --- | --- |"


def render_table() -> str:
    """Render one row per key of RLinf, in the order of the table."""
    valid = set(valid_keys())
    return "\n".join([HEADER, *(f"| `{key.theirs}` | {_here(key, valid)} |" for key in TABLE)])


def _here(key: RlinfKey, valid: set[str]) -> str:
    if not key.ours:
        return f"no effect: {key.because}"
    if key.ours not in valid:
        return f"no effect: this version has no {key.ours}"
    lacking = UNSUPPORTED.get(key.ours)
    return f"`{key.ours}`" + (f"; not built yet: {lacking}" if lacking else "")


def main(argv: Sequence[str]) -> None:
    update(argv[0], render_table(), BEGIN, END)


if __name__ == "__main__":
    main(sys.argv[1:])
