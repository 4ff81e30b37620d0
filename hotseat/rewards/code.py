"""Verdict on generated code: its output for the inputs of the tests, compared here with the expected output.

A row's label is a list of tests, or an object with it under `tests`. A test gives the program some `input` and
expects an `output`, or evaluates a `call` after the program and expects its `result`. Only inputs and calls go into the
sandbox.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotseat.errors import SandboxError
from hotseat.failed import Failed
from hotseat.rewards.builtin import last_block
from hotseat.rewards.sandbox import Sandbox, SandboxRun

_FORM = '[{"input": "2 3", "output": "5"}] or [{"call": "add(2, 3)", "result": 5}]'


@dataclass(frozen=True)
class CodeTest:
    """One test: standard input and expected output, or an expression and its expected value."""

    expected: Any
    stdin: str = ""
    call: str | None = None

    def is_passed(self, run: SandboxRun) -> bool:
        if not run.is_success:
            return False
        text = run.output.decode(errors="replace")
        if self.call is None:
            return _lines(text) == _lines(self.expected)
        try:
            return is_equal(json.loads(text), self.expected)
        except (ValueError, RecursionError):
            return False


def grade_code(sandbox: Sandbox, answer: str, label: Any, *, partial: bool = False) -> float | Failed:
    """Return 1 if the code in an answer passes all tests of the label, else 0; with `partial`, the share it passes.

    The code is the last fenced block of the answer, or all of it. `Failed` if the tests or the sandbox are at fault.
    """
    try:
        tests = list(read_tests(label))
    except ValueError as error:
        return Failed(str(error))
    program = last_block(answer)
    num_passed = 0
    for test in tests:
        try:
            passed = test.is_passed(sandbox.run(program, test.stdin, test.call))
        except SandboxError as error:
            return Failed(f"the sandbox failed: {error}")
        if not passed and not partial:
            return 0.0
        num_passed += passed
    return num_passed / len(tests)


def read_tests(label: Any) -> Iterator[CodeTest]:
    """Yield the tests of a label. Raises `ValueError` if it has none that can be read."""
    if label is None or label == "":
        raise ValueError("the row has no label")
    try:
        value = json.loads(label) if isinstance(label, str) else label
    except ValueError as error:
        raise ValueError(f"the label is not JSON ({error}); it has to be a list of tests: {_FORM}") from None
    tests = value.get("tests") if isinstance(value, dict) else value
    if not isinstance(tests, list) or not tests:
        raise ValueError(f"the label is no list of tests: {_FORM}")
    for number, test in enumerate(tests):
        keys = set(test) if isinstance(test, dict) else set()
        if keys == {"input", "output"} and all(isinstance(test[key], str) for key in keys):
            yield CodeTest(test["output"], stdin=test["input"])
        elif keys == {"call", "result"} and isinstance(test["call"], str):
            yield CodeTest(test["result"], call=test["call"])
        else:
            raise ValueError(f"test {number} of the label is neither {_FORM.replace(' or ', ' nor ')}")


def is_equal(returned: Any, expected: Any) -> bool:
    """Compare values of JSON: numbers with a relative tolerance of 1e-9, lists and objects member by member."""
    if isinstance(returned, bool) or isinstance(expected, bool):
        return returned is expected
    if isinstance(returned, float) or isinstance(expected, float):
        is_number = isinstance(returned, int | float) and isinstance(expected, int | float)
        return is_number and math.isclose(returned, expected, rel_tol=1e-9, abs_tol=1e-12)
    if isinstance(returned, list) and isinstance(expected, list):
        return len(returned) == len(expected) and all(map(is_equal, returned, expected))
    if isinstance(returned, dict) and isinstance(expected, dict):
        return returned.keys() == expected.keys() and all(is_equal(returned[key], expected[key]) for key in returned)
    return bool(returned == expected)


def _lines(text: str) -> list[str]:
    """Return the lines of a text without spaces at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
