"""Functions and classes in users' files: how they are named, and how they are loaded."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hotseat.errors import UserError

# Folder, beside that of a run, with the files of objects that a script gave to `hotseat.run`, while that lasts.
SCRIPT_FOLDER = ".{name}.python"


def is_user_function(name: str) -> bool:
    """Tell whether a name is `FILE.py:FUNCTION`, and not that of a built-in function."""
    return re.fullmatch(r".+\.py:\w+", name) is not None


def located(name: str) -> tuple[Path, str | None]:
    """Return the absolute path of `FILE.py` or `FILE.py:NAME`, and the name; None without one."""
    named = re.fullmatch(r"(.+\.py):(\w+)", name)
    return Path(named[1] if named else name).expanduser().absolute(), named[2] if named else None


def absolute(name: str) -> str:
    """Return `FILE.py:FUNCTION` with an absolute path, which means the same in every process; other names as given."""
    if not is_user_function(name):
        return name
    file, function = located(name)
    return f"{file}:{function}"


def is_of_script(path: Path) -> bool:
    """Tell whether a path is in the folder of a script's objects, which is there only while the script trains."""
    return any(re.fullmatch(r"\..+\.python", part) for part in path.parts)


def shown_place(file: Path) -> str:
    """Return where a file's function stands, for messages: the file, or the line of the script whose object it is."""
    if is_of_script(file) and file.is_file():
        match = re.match(r'"""from (.+)"""', file.read_text(encoding="utf-8"))
        if match is not None:
            return match[1]
    return str(file)


def load_file(file: Path, name: str) -> ModuleType:
    """Run a file as a module of this name. It can import the modules beside it."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


@cache
def user_function(name: str) -> Callable[..., Any]:
    """Load the function that `FILE.py:FUNCTION` names, once per process."""
    path, _, function_name = absolute(name).rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    try:
        module = load_file(file, f"hotseat_own_{file.stem}")
    except Exception as error:
        raise UserError(f"{file} cannot be loaded: {described(error, file)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"{file} has no function {function_name}")
    return function


def load_component(path: str) -> type:
    """Load the class that `FILE.py:CLASS` or `package.module:CLASS` names. Raises `UserError` if there is none."""
    if is_user_function(path):
        loaded: Any = user_function(path)
    else:
        module_name, _, class_name = path.rpartition(":")
        try:
            module = importlib.import_module(module_name)
        except Exception as error:
            raise UserError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
        loaded = getattr(module, class_name, None)
    if not inspect.isclass(loaded):
        raise UserError(f"{path} is no class")
    return loaded


def described(error: BaseException, file: Path | None = None) -> str:
    """Format an error with the line that raised it: of the user's file, or else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == str(file)]
    if isinstance(error, SyntaxError):
        lines = [error.lineno]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{f' at line {lines[-1]}' if lines else where}"
