"""Measure the shape of the code: how large classes, constructors and files are, and how names and docstrings read.

    python scripts/shape.py [TREE ...]        a column for each tree; this one without any

Counts the package `hotseat` of each tree, without tests and benchmarks.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

MAX_PARAMETERS, MAX_LINES, MAX_FUNCTION_LINES = 8, 500, 60
_PREPOSITIONS = """
about above across after against along among around as at before behind below beneath beside between beyond by during
except for from in inside into like near of off on onto out outside over past since through to toward towards under
until up upon with within without
"""
_PRONOUNS = """
all another each every he it its none she some such that their them these they this those what where which who whoever
whom whose
"""
PREPOSITIONS, PRONOUNS = frozenset(_PREPOSITIONS.split()), frozenset(_PRONOUNS.split())
CALLS = ("call", "start", "scatter", "start_scatter")  # of a worker group, whose first argument names a method
IDENTIFIER = re.compile(r"[a-z_]+$")
ENGINE_NAMES, ENGINES_HOME = {"vllm", "transformers"}, ("rollout", "registry")
BY_NAME = {"getattr", "setattr", "hasattr", "delattr"}  # reach an attribute that a type checker does not see
EVERYWHERE = ("__init__", "__main__")  # file names that have no meaning of their own


@dataclass(frozen=True)
class Size:
    """A class with its number of attributes and methods."""

    name: str
    num_attributes: int
    num_methods: int


def main(trees: list[Path]) -> None:
    """Print the table."""
    table = Table(title="Shape of the code")
    table.add_column("")
    for tree in trees:
        table.add_column(tree.resolve().name, justify="right")
    columns = [measure(tree / "hotseat") for tree in trees]
    for row in columns[0]:
        table.add_row(row, *(column[row] for column in columns))
    Console(width=60 + 30 * len(trees)).print(table)


def measure(package: Path) -> dict[str, str]:
    """Return the rows of the table for one package."""
    sources = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    modules = {path: ast.parse(text) for path, text in sources.items()}
    classes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    sizes = [size_of(node) for node in classes]
    widest, busiest = max(sizes, key=lambda s: s.num_attributes), max(sizes, key=lambda s: s.num_methods)
    constructors = sum(num_parameters(node) > MAX_PARAMETERS for node in classes)
    long_files = [path for path, text in sources.items() if text.count("\n") > MAX_LINES]
    opened = Counter(opening for tree in modules.values() for opening in openings(tree))
    files = Counter(path.stem for path in sources if path.stem not in EVERYWHERE)
    names = Counter(node.name for node in classes if not node.name.startswith("_"))
    return {
        "files": str(len(sources)),
        "lines": f"{sum(text.count(chr(10)) for text in sources.values()):,}",
        "files directly in loop/": str(len(list((package / "loop").glob("*.py"))) - 1),
        f"files over {MAX_LINES} lines": str(len(long_files)),
        "most attributes": f"{widest.num_attributes} ({widest.name})",
        "most methods": f"{busiest.num_methods} ({busiest.name})",
        "classes with over 12 attributes": str(sum(size.num_attributes > 12 for size in sizes)),
        f"functions over {MAX_FUNCTION_LINES} lines": str(sum(long_functions(tree) for tree in modules.values())),
        f"constructors with over {MAX_PARAMETERS} parameters": str(constructors),
        "files outside rollout/ that compare with an engine's name": str(
            sum(names_engine(tree) for path, tree in modules.items() if is_outside(path.relative_to(package)))
        ),
        "getattr, setattr, hasattr, delattr": str(sum(calls_of(tree, BY_NAME) for tree in modules.values())),
        "calls by string": str(sum(calls_by_string(tree) for tree in modules.values())),
        "docstrings that begin with a preposition": str(opened["preposition"]),
        "docstrings that begin with a pronoun": str(opened["pronoun"]),
        "class names with two meanings": str(sum(count > 1 for count in names.values())),
        "file names that occur twice": str(sum(count > 1 for count in files.values())),
        "names `found`, `given`, `told`, `wanted`": str(sum(vague_names(tree) for tree in modules.values())),
    }


def size_of(node: ast.ClassDef) -> Size:
    """Count what a class assigns to `self`, and what it defines. Config sections and records count their fields."""
    attributes = {
        target.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        for target in [each]
        if isinstance(target.value, ast.Name) and target.value.id == "self"
    }
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Size(node.name, len(attributes), len(methods))


def num_parameters(node: ast.ClassDef) -> int:
    """Count the parameters of a class's own constructor, without `self`."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) - 1
    return 0


def long_functions(tree: ast.Module) -> int:
    """Count functions of more lines than one reads at a glance."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum((node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES for node in functions)


def is_outside(path: Path) -> bool:
    """Return whether a module, by its path in the package, belongs neither to the engines nor to their table."""
    return path.parts[0] not in ENGINES_HOME


def names_engine(tree: ast.Module) -> bool:
    """Return whether a module decides by the name of an engine: compares something called engine or kind with it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            subject = " ".join(ast.unparse(side) for side in sides)
            if words & ENGINE_NAMES and re.search(r"\b(engine|kind)\b", subject):
                return True
            if ".vllm" in subject and any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
                return True
    return False


def calls_of(tree: ast.Module, names: set[str]) -> int:
    """Count calls of these functions."""
    return sum(
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
        for node in ast.walk(tree)
    )


def calls_by_string(tree: ast.Module) -> int:
    """Count calls of workers whose method is named by a string."""
    return sum(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CALLS
        and bool(node.args)
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
        and IDENTIFIER.match(node.args[0].value) is not None
        for node in ast.walk(tree)
    )


def openings(tree: ast.Module) -> Iterator[str]:
    """Yield the kind of word that each docstring begins with, where it is a preposition or a pronoun."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        words = re.findall(r"[A-Za-z]+", ast.get_docstring(node) or "")
        first = words[0].lower() if words else ""
        if first in PREPOSITIONS:
            yield "preposition"
        if first in PRONOUNS:
            yield "pronoun"


def vague_names(tree: ast.Module) -> int:
    """Count assignments to names that say nothing of what they hold."""
    vague = {"found", "given", "told", "wanted"}
    return sum(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in vague for node in ast.walk(tree)
    )


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]] or [Path(__file__).parents[1]])
