"""Blocks of code in the pages of the documentation, and what their tags ask for.

The tag stands behind the language: ```bash run. CONTRIBUTING.md lists the tags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = {"reference", "_build"}
DOCUMENTS = tuple(sorted(path for path in (ROOT / "docs").rglob("*.md") if not GENERATED & set(path.parts)))
PAGES = (ROOT / "README.md", *DOCUMENTS)
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_NAMED = ("file", "h200", "tested")
_PLAIN = ("run", "long", "output", "planned", "shown")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the words behind that, and its text."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @cached_property
    def named(self) -> dict[str, str]:
        """Return the words with a value, such as file=rl.yaml."""
        return dict(word.split("=", 1) for word in self.words if "=" in word)

    @property
    def mistake(self) -> str:
        """Return what is wrong with the tag; empty if nothing is."""
        unknown = [word for word in self.words if word not in _PLAIN and word.partition("=")[0] not in _NAMED]
        kinds = {word.partition("=")[0] for word in self.words} - {"long"}
        if unknown:
            return f"unknown words {unknown}"
        return "" if len(kinds) == 1 else f"needs one of {', '.join(sorted({*_PLAIN, *_NAMED} - {'long'}))}"

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """List the fenced blocks of a page, without those that build the site, such as {toctree}."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, found.start()) + 1, found[1], tuple(found[2].split()), found[3])
        for found in _BLOCK.finditer(text)
        if not found[2].startswith("{")
    ]


def texts_of(page: Path, language: str) -> list[str]:
    """List the texts of a page's blocks in a language."""
    return [block.text for block in blocks_of(page) if block.language == language]
