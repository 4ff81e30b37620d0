"""`scripts/pytest_with_retry.py`: what CI runs the tests with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "pytest_with_retry.py"
ONCE = """
from pathlib import Path

def test_{name}():
    mark = Path(__file__).with_suffix(".{name}")
    was_there = mark.exists()
    mark.touch()
    assert was_there
"""
pytestmark = pytest.mark.slow


def retried(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(source)
    (folder / "pytest.ini").write_text("[pytest]\n")
    return subprocess.run(
        [sys.executable, str(SCRIPT), "-q", "test_it.py"], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_a_test_that_passes_the_second_time_is_named_and_fails_nothing(tmp_path):
    done = retried(tmp_path, ONCE.format(name="once") + "\ndef test_good():\n    pass\n")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "FLAKY test_it.py::test_once"


def test_a_test_that_fails_twice_fails_the_run(tmp_path):
    done = retried(tmp_path, ONCE.format(name="once") + "\ndef test_bad():\n    raise AssertionError\n")
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


def test_more_than_three_failures_are_not_tried_again(tmp_path):
    done = retried(tmp_path, "".join(ONCE.format(name=name) for name in "abcd"))
    assert done.returncode == 1
    assert "FLAKY" not in done.stdout


def test_a_module_that_cannot_be_imported_fails_the_run(tmp_path):
    assert retried(tmp_path, "import no_such_module_anywhere\n").returncode == 2
