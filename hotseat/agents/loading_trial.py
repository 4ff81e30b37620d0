"""Loads the file of an agent in a process of its own, before a run starts, and reports what is wrong with it.

Run by `processes/child.py`. The task has `file`, `name` (that of a class, or null), `path`, the folders to import from,
and `limit_s`, after which the process ends itself.
"""

from __future__ import annotations

import builtins
import dis
import os
import signal
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.abc import InspectLoader
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.processes.child import FrameChannel

# With one of these a file may make names that the check would miss.
_MAKES_NAMES = {"exec", "eval", "globals", "setattr", "NameError"}


def undefined_names(code: types.CodeType, names: Iterable[str]) -> list[tuple[str, int, str]]:
    """List (name, line, function) of the global names that functions of a module use and nothing defines.

    code: the module's. names: its globals after it was loaded, and names that others may set in it. What the module
    assigns on a line that was not reached counts as defined: an optional import, or names under
    `if __name__ == "__main__"`.
    """
    codes = list(_inside(code))
    if any(_MAKES_NAMES & set(each.co_names) for each in (code, *codes)):
        return []
    assigned = {
        each.argval
        for one in (code, *codes)
        for each in dis.get_instructions(one)
        if each.opname == "STORE_GLOBAL" or (one is code and each.opname == "STORE_NAME")
    }
    known = {*names, *vars(builtins), *assigned}
    absent = []
    for one in codes:
        for line, each in _by_line(one):
            if each.opname == "LOAD_GLOBAL" and each.argval not in known:
                known.add(each.argval)  # once
                absent.append((each.argval, line, one.co_name))
    return absent


def _by_line(code: types.CodeType) -> Iterator[tuple[int, dis.Instruction]]:
    """Yield the instructions of a function, each with its line."""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        line = (each.positions and each.positions.lineno) or line
        if each.opname != "CACHE":
            yield line, each


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of every function in a module, methods and nested ones too."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _inside(constant)


def absent_names(code: types.CodeType, names: Mapping[str, Any]) -> list[tuple[str, int, str]]:
    """List (name, line, function) of the names that functions of a module read from `hotseat`, and that it has not."""
    absent = []
    for one in _inside(code):
        for (_, first), (line, second) in pairwise(_by_line(one)):
            module = names.get(first.argval) if first.opname == "LOAD_GLOBAL" else None
            if not isinstance(module, types.ModuleType) or module.__name__ != "hotseat":
                continue
            if second.opname in ("LOAD_ATTR", "LOAD_METHOD") and not hasattr(module, second.argval):
                absent.append((f"hotseat.{second.argval}", line, one.co_name))
    return absent


def _beside(file: Path, names: Iterable[str]) -> Iterator[tuple[types.CodeType, types.ModuleType]]:
    """Yield code and module of those of the named modules that are in the folder of a file."""
    for name in names:
        module = sys.modules[name]
        path, loader = getattr(module, "__file__", None), getattr(module, "__loader__", None)
        if path and Path(path).parent == file.parent and isinstance(loader, InspectLoader):
            code = loader.get_code(name)
            if code is not None:
                yield code, module


def problem_of(file: str, name: str | None) -> dict[str, Any]:
    """Load an agent's file; return its `problem`, whether a package is `absent` here, and a `note` for the user.

    The modules beside the file that it imports are checked too.
    """
    from hotseat.agents.agent_file import load_file
    from hotseat.errors import HotseatError

    before = set(sys.modules)
    try:
        source, note = load_file(Path(file), name)
    except HotseatError as error:
        return {"problem": str(error), "absent": isinstance(error.__cause__, ImportError), "note": None}
    loaded = [(source.code, source.module), *_beside(Path(file), sorted(sys.modules.keys() - before))]
    # A function may set a name in another module once it is called.
    settable = {
        each.argval
        for code, _ in loaded
        for one in (code, *_inside(code))
        for each in dis.get_instructions(one)
        if each.opname == "STORE_ATTR"
    }
    listed = [
        f"{code.co_filename}:{line}: {user} uses the name {each!r}, which nothing defines"
        for code, module in loaded
        for each, line, user in [*undefined_names(code, {*vars(module), *settable}), *absent_names(code, vars(module))]
    ]
    return {"problem": "; ".join(listed[:3]) or None, "absent": False, "note": note}


def main(channel: FrameChannel, task: dict[str, Any]) -> None:
    signal.alarm(task["limit_s"])
    sys.path[:] = task["path"]
    channel.send(problem_of(task["file"], task["name"]))
    os._exit(0)  # threads of the agent's file have nothing left to do
