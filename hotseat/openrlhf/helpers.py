r"""Stand-ins for the helpers that OpenRLHF's example files import: `from openrlhf.utils import grade_answer`.

Worker processes of rewards load this file by its path, so it needs only the standard library; `grade_answer` needs
math-verify. `install` makes the modules importable, unless OpenRLHF itself is installed: then its own are found first.
"""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

_BOX = "\\boxed{"
_PLAIN = (("\\left", ""), ("\\right", ""), ("\\dfrac", "\\frac"), ("\\tfrac", "\\frac"), ("\\!", ""), ("$", ""))


def extract_boxed_answer(solution: str) -> str | None:
    r"""Return what stands in the last `\boxed{...}` of a text; None if there is none, or if it is not closed."""
    begin = solution.rfind(_BOX)
    if begin < 0:
        return None
    begin += len(_BOX)
    depth = 1
    for at in range(begin, len(solution)):
        depth += {"{": 1, "}": -1}.get(solution[at], 0)
        if depth == 0:
            return solution[begin:at]
    return None


def grade_answer(given_answer: Any, ground_truth: Any) -> bool:
    """Return whether an answer equals the expected one, as text or, by math-verify, as mathematics.

    Both are parsed, never evaluated.
    """
    try:
        from math_verify import parse, verify
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "openrlhf.utils.grade_answer needs the package math-verify here: pip install 'hotseat[graders]'"
        ) from error
    if given_answer is None or ground_truth is None:
        return False
    answer, truth = str(given_answer).strip(), str(ground_truth).strip()
    if _as_plain(answer) == _as_plain(truth):
        return True
    # Whoever calls this has a deadline; the library's own, by signals, works in a main thread only.
    expected, parsed = (parse(_as_latex(text), parsing_timeout=None) for text in (truth, answer))
    return bool(expected) and bool(parsed) and bool(verify(expected, parsed, timeout_seconds=None))


def _as_plain(text: str) -> str:
    """Return a text without the spelling that does not change its meaning."""
    for old, new in _PLAIN:
        text = text.replace(old, new)
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)  # 1,234
    return re.sub(r"\s+", "", text).rstrip(".").lower()


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


_MATHS: dict[str, Callable[..., Any]] = {"extract_boxed_answer": extract_boxed_answer, "grade_answer": grade_answer}
MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    "openrlhf": {},
    "openrlhf.utils": _MATHS,
    "openrlhf.utils.math_utils": _MATHS,
    "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
}


class _Finder(MetaPathFinder, Loader):
    """Finds the modules above where nothing else does."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname not in MODULES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in MODULES)
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(MODULES[module.__name__])


def install() -> None:
    """Make the modules importable in this process, after everything else that can be imported. Once is enough."""
    if not is_installed() and not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


@cache
def is_installed() -> bool:
    """Return whether OpenRLHF itself can be imported: not the modules above, nor the package with its commands."""
    spec = importlib.util.find_spec("openrlhf")
    if spec is None or type(spec.loader).__name__ == _Finder.__name__:
        return False
    return not Path(spec.origin or "").is_relative_to(Path(__file__).parent)
