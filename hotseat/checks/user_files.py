"""Looks into users' Python files without running them: syntax, and the names that a reward or an agent must have.

A file may make a name in ways that its text does not show (`from x import *`, `exec`, `globals()`). Such a file is not
refused here, but by the process that loads it.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from dataclasses import dataclass, field
from pathlib import Path

from hotseat.extensions import AGENT_FORMS, REWARD_FUNCTIONS, describe_agent_forms
from hotseat.rewards.builtin import FUNCTIONS

_MAKES_NAMES = ("exec", "eval", "globals", "locals", "vars", "setattr")
_AGENT_FUNCTIONS = ("play", *(name for entry in AGENT_FORMS for name in entry.functions))


@dataclass
class Names:
    """Names that a module binds at its top level.

    functions: those defined there, with their lines. arguments: of those without decorators. can_be_class: some name is
    bound to a class, or to the result of a call. is_certain: the module's text shows all of its names.
    """

    bound: set[str] = field(default_factory=set)
    functions: dict[str, int] = field(default_factory=dict)
    arguments: dict[str, ast.arguments] = field(default_factory=dict)
    can_be_class: bool = False
    is_certain: bool = True


def reward_problem(file: Path, function: str | None = None) -> str | None:
    """Return why a file cannot be a reward function; None if it can, as far as its text shows."""
    names = _names_in(file)
    if isinstance(names, str):
        return names
    function_name = function or "reward_func"
    if not names.is_certain or function_name in names.bound:
        return None
    there = ", ".join(f"{name} (line {line})" for name, line in names.functions.items() if not name.startswith("_"))
    return (
        f"{file} has no {function_name}(queries, prompts, labels); its functions are: {there or 'none'}. Rename one of"
        f" them, or say which to use: {file}:NAME"
    )


def is_reward_key(key: str) -> bool:
    """Tell whether the value of a key is a reward function."""
    return key.startswith("reward.function") or key == "eval.reward"


def spelling_problem(key: str, path: str) -> str | None:
    """Return why the value of a key is neither FILE.py, nor FILE.py:NAME, nor a built-in reward; None if it is one."""
    is_reward = is_reward_key(key)
    if is_reward and path in (*FUNCTIONS, *REWARD_FUNCTIONS):
        return None
    if not is_reward and Path(path).expanduser().is_file():
        return agent_problem(Path(path).expanduser())
    what = "function" if is_reward else "class"
    fits = f"FILE.py or FILE.py:NAME, where NAME is a {what} in it" + f", {' or '.join(FUNCTIONS)}" * is_reward
    if path.startswith(("http://", "https://")):
        return f"{path} is an address: set reward.url to it" if is_reward else f"{path} is an address: give {fits}"
    if "," in path:
        return f"given {path!r}, which is several: give one {what}, as {fits}"
    if ".py:" in path:
        return f"given {path!r}: after .py: comes the name of a {what}; give {fits}"
    return f"given {path!r}, must be {fits}{_meant(path, is_reward)}"


def _meant(path: str, is_reward: bool) -> str:
    """Return a hint at what a value was meant to be: a file by the name of its module, or a built-in reward."""
    module, _, name = path.partition(":")
    for stem, attribute in ((module, name), (module.rpartition(".")[0], name or module.rpartition(".")[2])):
        for file in (Path(f"{stem}.py"), Path(f"{stem.replace('.', '/')}.py")):
            if stem and file.is_file():
                return f"; did you mean {file}{f':{attribute}' if attribute else ''}?"
    close = difflib.get_close_matches(path, FUNCTIONS, n=1) if is_reward else []
    return f"; did you mean {close[0]}?" if close else ""


def function_problem(file: Path, function: str | None = None) -> str | None:
    """Return why a file does not have a function; None if it has, as far as its text shows."""
    names = _names_in(file)
    if isinstance(names, str):
        return names
    if not names.is_certain or function in names.bound:
        return None
    there = ", ".join(f"{name} (line {line})" for name, line in names.functions.items() if not name.startswith("_"))
    return f"{file} has no function {function}; its functions are: {there or 'none'}"


def line_of_function(file: Path, function: str) -> int | None:
    """Return the line on which a file defines a function; None if its text does not show it."""
    names = _names_in(file)
    return None if isinstance(names, str) else names.functions.get(function)


def parameters_of(file: Path, function: str) -> dict[str, bool] | None:
    """Return the parameters that a function can be called with by name, and whether each of them is required.

    None if the file's text does not show them.
    """
    names = _names_in(file)
    arguments = None if isinstance(names, str) or not names.is_certain else names.arguments.get(function)
    if arguments is None:
        return None
    positional = [*arguments.posonlyargs, *arguments.args]
    num_required, num_unnamed = len(positional) - len(arguments.defaults), len(arguments.posonlyargs)
    parameters = {each.arg: at < num_required for at, each in enumerate(positional) if at >= num_unnamed}
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return parameters | {each.arg: default is None for each, default in named}


def agent_problem(file: Path, name: str | None = None) -> str | None:
    """Return why a file cannot be an agent; None if it can, as far as its text shows."""
    names = _names_in(file)
    if isinstance(names, str):
        return names
    if not names.is_certain:
        return None
    if name is not None:
        return None if name in names.bound else f"{file} has no class {name}"
    if names.can_be_class or names.bound.intersection(_AGENT_FUNCTIONS):
        return None
    return f"{file} has no agent in it; what would fit: {describe_agent_forms()}"


def _names_in(file: Path) -> Names | str:
    """Return the names of a file, or why it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python prints them when the file is loaded
            tree = ast.parse(file.read_bytes(), str(file))
    except SyntaxError as error:
        return f"{file}:{error.lineno or 1}: not Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{file} cannot be read as Python: {error}"
    names = Names()
    for node in tree.body:
        _collect(node, names)
    return names


def _collect(node: ast.AST, names: Names) -> None:
    """Add the names that a statement binds at the top level, also inside `if`, `try` and `with`, not in functions."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        names.bound.add(node.name)
        if isinstance(node, ast.ClassDef):
            names.can_be_class = names.can_be_class or not node.name.startswith("_")
        else:
            names.functions[node.name] = node.lineno
            if not node.decorator_list:
                names.arguments[node.name] = node.args
        names.is_certain = names.is_certain and node.name != "__getattr__"
        for inner in ast.walk(node):
            _note_dynamic(inner, names)
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        names.bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        names.is_certain = names.is_certain and all(alias.name != "*" for alias in node.names)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        names.bound.add(node.id)
    if isinstance(node, ast.Assign | ast.AnnAssign) and any(isinstance(part, ast.Call) for part in ast.walk(node)):
        names.can_be_class = True
    _note_dynamic(node, names)
    for child in ast.iter_child_nodes(node):
        _collect(child, names)


def _note_dynamic(node: ast.AST, names: Names) -> None:
    """Record global names, and ways to bind names that the text does not show."""
    if isinstance(node, ast.Global):
        names.bound |= set(node.names)
    if isinstance(node, ast.Name) and node.id in _MAKES_NAMES:
        names.is_certain = False
    if isinstance(node, ast.Attribute) and node.attr in ("modules", "__dict__"):
        names.is_certain = False
