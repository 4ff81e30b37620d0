"""Whether episodes can share the globals of a user's file: only if nothing in it can keep what an episode did."""

from __future__ import annotations

import ast
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import logging
import pathlib
import re
import reprlib
import sys
import types
import typing
import uuid
from collections.abc import Iterable, Iterator
from typing import Any

_NEVER_CHANGE = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis), type(NotImplemented), re.Pattern,
    pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal,
    fractions.Fraction, uuid.UUID, enum.Enum, types.ModuleType, types.GenericAlias, types.UnionType, typing.TypeVar,
    types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType, types.MethodDescriptorType,
    logging.Logger,  # of the whole process in any case
)  # fmt: skip
# Libraries whose objects are state rather than what takes long to load.
_STATEFUL = sys.stdlib_module_names | {"numpy"}
_STATEFUL_OF_TORCH = ("Tensor", "Parameter", "Generator")
_REACH_GLOBALS = {"globals", "vars", "setattr", "delattr", "exec", "eval", "__dict__", "__setattr__", "__class__"}
_MAKERS = ("<string>", dataclasses.__file__, reprlib.__file__)  # files of the code that dataclasses make
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def needs_own_globals(module: types.ModuleType, text: str) -> bool:
    """Tell whether functions of a module may change what it holds, so that episodes cannot share it. text: its source.

    They may if one of them assigns to a global, to an outer variable or to an attribute (other than of its `self`, or
    of the arguments of `step`), or if what they use can change: containers, iterators and other objects with a state,
    of the file itself, the standard library or numpy, also as attributes of classes and functions and as defaults of
    arguments. Objects of other libraries, such as a tokenizer or a model, are shared: to make them is what takes long.
    """
    tree = ast.parse(text)
    functions = [node for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    if any(_assigns_beyond(function) for function in functions):
        return True
    inner = [node for function in functions for node in ast.walk(function)]
    used = {node.id for node in inner if isinstance(node, ast.Name)}
    used |= {node.attr for node in inner if isinstance(node, ast.Attribute)}
    if used & _REACH_GLOBALS:
        return True
    own = (type, types.FunctionType)  # whether used by name or not: one may be the base of another
    name_of = module.__name__
    values = [
        value
        for name, value in vars(module).items()
        if name in used or name == "step" or (isinstance(value, own) and value.__module__ == name_of)
    ]
    return not _Sharing(name_of).allows_all(values)


def _assigns_beyond(function: ast.AST) -> bool:
    """Tell whether a function assigns to variables outside of it, or to attributes of objects that it did not get."""
    args = function.args  # type: ignore[attr-defined]
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg) if arg]
    own = set(names) if getattr(function, "name", "") == "step" else set(names[:1]) & {"self"}
    return any(
        isinstance(node, ast.Global | ast.Nonlocal)
        or (isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load) and _root(node) not in own)
        for node in _nodes_of(function)
    )


def _nodes_of(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of inner functions, which have names of their own."""
    waiting = list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _FUNCTIONS):
            waiting += ast.iter_child_nodes(node)


def _root(node: ast.expr) -> str | None:
    """Return the name at which an expression such as `a.b["c"].d` begins."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


class _Sharing:
    """Decides which values episodes can share. module: name of the user's file as a module."""

    def __init__(self, module: str):
        self._module = module
        self._seen: set[int] = set()

    def allows_all(self, values: Iterable[object]) -> bool:
        return all(self._allows(value) for value in values)

    def _allows(self, value: Any) -> bool:
        if id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if isinstance(value, type):
            return value.__module__ != self._module or self._allows_class(value)
        if isinstance(value, types.FunctionType):
            return value.__module__ != self._module or self._allows_function(value)
        if isinstance(value, types.BuiltinFunctionType | types.MethodType):
            return self._allows(value.__self__)
        if isinstance(value, staticmethod | classmethod):
            return self._allows(value.__func__)
        if isinstance(value, property):
            return self.allows_all([value.fget, value.fset, value.fdel])
        if isinstance(value, functools.partial):
            return self.allows_all([value.func, *value.args, *value.keywords.values()])
        if isinstance(value, tuple | frozenset):
            return self.allows_all(value)
        library = type(value).__module__.partition(".")[0]
        if library == self._module:
            return isinstance(value, enum.Enum)
        if library in _STATEFUL:
            return library == "typing" or isinstance(value, _NEVER_CHANGE)  # typing: such as Optional[int]
        if library == "torch":
            return all(base.__name__ not in _STATEFUL_OF_TORCH for base in type(value).__mro__)
        return True

    def _allows_function(self, function: types.FunctionType) -> bool:
        cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return self.allows_all([*cells, *defaults, *vars(function).values()])

    def _allows_class(self, cls: type) -> bool:
        if issubclass(cls, enum.Enum):
            return True
        return self.allows_all(value for name, value in vars(cls).items() if not _is_made(cls, name, value))


def _is_made(cls: type, name: str, value: object) -> bool:
    """Tell whether an attribute of a class was made by the standard library for its own use."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # by NamedTuple
        return name.startswith("_") or name in cls._fields
    if isinstance(value, types.FunctionType):
        return "__dataclass_fields__" in vars(cls) and value.__code__.co_filename in _MAKERS
    return name == "_abc_impl" or (name.startswith("__") and name.endswith("__"))


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
