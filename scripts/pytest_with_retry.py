"""Run pytest, and give at most three failed tests one more try, on their own.

    python scripts/pytest_with_retry.py [PYTEST ARGUMENTS]

A test that passes the second time is printed as `FLAKY name` and does not fail the run, but has to be mended. More than
three failures, errors outside of tests, and tests that fail twice fail the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MAX_RETRIED = 3
TESTS_FAILED = 1  # pytest's exit code; others mean that it was interrupted, or found something wrong with its arguments


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as cache:
        code = run_pytest([*arguments, "-o", f"cache_dir={cache}"])
        if code != TESTS_FAILED:
            return code
        failed = failed_tests(Path(cache))
    if not 0 < len(failed) <= MAX_RETRIED:
        return code
    flaky = []
    for name in failed:
        if run_pytest([name, "-p", "no:cacheprovider"]) != 0:
            return code
        flaky.append(name)
    for name in flaky:
        print(f"FLAKY {name}", flush=True)
    return 0


def run_pytest(arguments: list[str]) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", *arguments]).returncode


def failed_tests(cache: Path) -> list[str]:
    """Names of the tests that failed in the run with this cache. A module that could not be imported is no test."""
    path = cache / "v" / "cache" / "lastfailed"
    names = list(json.loads(path.read_text())) if path.exists() else []
    return names if all("::" in name for name in names) else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
