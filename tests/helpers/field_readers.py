"""Which code reads which config field, found in the source itself.

A function that takes the config, or one of its sections, is followed through plain assignments: after
`train = config.train`, `train.batch_size` is a reading of that field.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

from hotseat.config.load import valid_keys
from hotseat.config.schema import Config
from hotseat.registry.roles import ROLES

PACKAGE = Path(__file__).parents[2] / "hotseat"
# Checking a field, deriving which roles there are, or advising another value, is not yet doing what it says.
NOT_READERS = (
    *("config/schema/", "config/conflicts.py", "config/conditions.py", "config/load.py", "config/unsupported.py"),
    *("config/presence.py", "config/reward_conflicts.py"),
    *("checks/named_files.py", "checks/cpu.py", "planning/advisor.py", "cli/"),
)
_LAST = ("planning/config_plan.py", "planning/role_specs.py", "config/")  # these size a run; others carry it out

Names = dict[str, tuple[str, ...]]  # variable -> the dotted sections it may be; the whole config is ""


def find_readers(package: Path = PACKAGE) -> dict[str, str]:
    """Field -> `hotseat/file.py:function`, of several readers the one that carries it out."""
    known = frozenset(valid_keys())
    found: dict[str, list[tuple[int, str]]] = {}
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package).as_posix()
        if where.startswith(NOT_READERS):
            continue
        for field, function in readings(path.read_text(), known):
            rank = next((place for place, last in enumerate(_LAST, 1) if where.startswith(last)), 0)
            found.setdefault(field, []).append((rank, f"{package.name}/{where}:{function}"))
    return {field: min(readers)[1] for field, readers in found.items()}


def readings(source: str, known: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(field, function) of every reading in a module."""
    sections = {name: tuple(keys) for name, keys in _sections(Config, "").items()}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in _fields_read(node, sections, known):
                yield field, node.name


def _sections(model: type[BaseModel], at: str) -> dict[str, list[str]]:
    """Name of a section's class, or of one that it derives from -> where in the tree it stands."""
    found: dict[str, list[str]] = {each.__name__: [at] for each in model.__mro__ if issubclass(each, BaseModel)}
    for name, info in model.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            for below, keys in _sections(info.annotation, f"{at}.{name}" if at else name).items():
                found.setdefault(below, []).extend(keys)
    return found


def _fields_read(
    function: ast.FunctionDef | ast.AsyncFunctionDef, sections: Mapping[str, tuple[str, ...]], known: frozenset[str]
) -> Iterator[str]:
    names: Names = {}
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        if argument.annotation is not None:
            names[argument.arg] = sections.get(ast.unparse(argument.annotation).strip("'\"").split(" ")[0], ())
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            for name, value in _pairs(node.targets[0], node.value):
                names[name] = tuple(_resolve(value, names))
        if isinstance(node, ast.Attribute):
            yield from (key for key in _resolve(node, names) if key in known)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, of in zip(target.elts, value.elts, strict=False):
            yield from _pairs(each, of)
    elif isinstance(target, ast.Name):
        yield target.id, value


def _resolve(node: ast.expr, names: Names) -> Iterator[str]:
    """The dotted keys that an expression like `config.train.batch_size` stands for."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
        if isinstance(node, ast.Name) and parts[0].lstrip("_") == "config":  # of an object that holds the config
            yield ".".join(parts[1:])
            return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "section_of_role":
        for role in ROLES.values():  # it may be any
            yield ".".join([role.section, *parts])
    if isinstance(node, ast.Name):
        for section in names.get(node.id, ()):
            yield ".".join([section, *parts] if section else parts)
