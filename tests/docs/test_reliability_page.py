"""docs/reliability.md names only tests that exist, and those say which scenario they are."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
PAGE = TESTS.parent / "docs" / "reliability.md"


def rows() -> list[list[str]]:
    faults = PAGE.read_text().partition("\n## ")[0]
    lines = [line for line in faults.splitlines() if line.startswith("|")]
    header, _, *found = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    assert header == ["#", "injected", "what happens", "test"]
    return found


def existing() -> dict[str, list[str]]:
    """Docstrings by the name of the test."""
    found: dict[str, list[str]] = {}
    for file in TESTS.rglob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(ast.get_docstring(node) or "")
    return found


@pytest.mark.slow
def test_every_test_that_is_named_exists():
    tests = existing()
    for row in rows():
        assert len(row) == 4, row[0]
        named = re.findall(r"`([^`]+)`", row[3])
        assert all(name in tests for name in named), (row[0], [name for name in named if name not in tests])
        assert bool(named) == bool(row[2]), f"{row[0]}: what happens is said where it is tested, and nowhere else"


def test_every_scenario_has_one_row_in_order():
    numbers = [int(row[0]) for row in rows()]
    assert numbers == sorted(set(numbers))
