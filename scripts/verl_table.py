"""The counts of keys in docs/verl.md: `python scripts/verl_table.py FILE` updates them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

from doc_tables import update

from hotseat.verl.verl_keys import KEYS, Effect

BEGIN, END = "<!-- counts of keys: begin -->", "<!-- counts of keys: end -->"
MEANINGS: dict[Effect, str] = {
    "mapped": "sets fields of the config",
    "without effect": "listed once, with the reason",
    "refused": "with any value but its default, or that of the key that it must agree with",
}


def render_table() -> str:
    """Render the number of keys of each kind, and of sections, which stand for all keys below them."""
    single = Counter(key.effect for key in KEYS if not key.is_section)
    sections = Counter(key.effect for key in KEYS if key.is_section)
    lines = ["| | keys | whole sections | |", "| --- | --- | --- | --- |"]
    lines += [f"| {effect} | {single[effect]} | {sections[effect]} | {text} |" for effect, text in MEANINGS.items()]
    lines.append(f"| all | {single.total()} | {sections.total()} | |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    update(argv[0], render_table(), BEGIN, END)


if __name__ == "__main__":
    main(sys.argv[1:])
