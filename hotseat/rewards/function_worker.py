"""The process in which a user's reward function runs. Run by `processes/child.py`; needs only the standard library.

It loads the user's file, reports that it is ready or why not, and then answers one call after another until the
connection closes. The user's code does not use it; its output goes to the standard output and error that the process
was started with.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import faulthandler
import functools
import importlib.util
import inspect
import os
import random
import runpy
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotseat.processes.child import FrameChannel


def main(channel: FrameChannel, task: dict[str, Any]) -> None:
    """Serve calls until the connection closes. task: `file`, `function`, `kwargs` for it, and `path` (for imports)."""
    faulthandler.enable()
    sys.path[:] = [os.path.dirname(os.path.abspath(task["file"])), *task["path"]]
    sys.argv[:] = [task["file"]]
    # Files may import what examples of other frameworks import, without anything else of this package.
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    extensions = runpy.run_path(os.path.join(package, "extensions.py"))
    for helper in extensions["REWARD_HELPERS"]:
        runpy.run_path(os.path.join(package, helper))["install"]()
    forms = [(form.parameter, os.path.join(package, form.file)) for form in extensions["REWARD_FORMS"]]
    try:
        function = load(task["file"], task["function"], task.get("kwargs") or {}, forms)
        code = getattr(_written(function), "__code__", None)  # which may be of a module, or of a script
        written_in = task["file"] if code is None else code.co_filename
    except BaseException as error:
        channel.send(description(error, task["file"]))
        return
    channel.send({"ready": True, "takes_names": takes_names(function)})
    while True:
        try:
            call = channel.receive()
        except EOFError:
            return
        if call.get("seed") is not None:
            seed_everything(call["seed"])
        try:
            if takes_names(function):
                result = function(**named_arguments(function, call.get("named")))
            else:
                result = function(call["queries"], call["prompts"], call["labels"])
            if inspect.isawaitable(result):
                import asyncio  # which takes most of the time of loading this file

                result = asyncio.run(_wait(result))
            answer = {"result": plain(result)}
        except BaseException as error:  # whatever the user's code raises, even SystemExit, is reported as its answer
            answer = {**description(error, written_in), "is_mistake": isinstance(error, ArgumentMissing)}
        channel.send(answer)


# --- functions of TRL's form ------------------------------------------------------------------------------------------

# TRL passes prompt and answers under their plurals, and no column of these names.
_PASSED_OTHERWISE = ("prompt", "completion", "prompts", "completions", "completion_ids")


class ArgumentMissing(TypeError):
    """A function requires an argument by a name that nothing has."""


def is_trl_form(parameters: Collection[str]) -> bool:
    """Tell by its parameters whether a function is of TRL's form: it takes `completions`, and no `queries`."""
    return "completions" in parameters and "queries" not in parameters


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name, none where it does not show them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def takes_names(function: Any) -> bool:
    """Return whether a function is of TRL's form, which is called by names."""
    parameters = parameters_of(function)
    parameter = parameters["completions"] if is_trl_form(parameters) else None
    return parameter is not None and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)


def named_arguments(function: Any, named: dict[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that TRL's GRPOTrainer passes, as far as the function takes them.

    named: `columns` of the row, packed, `completions` as text, and `completion_ids`; None: the caller has no columns.
    """
    if named is None:
        raise ArgumentMissing("it has a parameter completions, and so is called by names, but there are no columns")
    values = {name: unpacked(value) for name, value in named["columns"].items()}
    prompt, texts = values["prompt"], named["completions"]
    is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict) and "role" in prompt[0]
    offered = {
        "prompts": _copies(prompt, len(texts)),
        "completions": [[{"role": "assistant", "content": text}] for text in texts] if is_chat else texts,
        "completion_ids": named["completion_ids"],
    }
    columns = {name: value for name, value in values.items() if name not in _PASSED_OTHERWISE}
    offered |= {name: _copies(value, len(texts)) for name, value in columns.items()}
    parameters = inspect.signature(function).parameters.values()
    for parameter in parameters:
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if parameter.default is parameter.empty and not is_variable and parameter.name not in offered:
            raise ArgumentMissing(
                f"it requires {parameter.name!r}: no such column (there are: {', '.join(columns) or 'none'}), and what"
                " is passed beside columns is prompts, completions and completion_ids; give the parameter a default"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return offered
    return {parameter.name: offered[parameter.name] for parameter in parameters if parameter.name in offered}


def _copies(value: Any, count: int) -> list[Any]:
    return [copy.deepcopy(value) for _ in range(count)]


def packed(value: Any) -> Any:
    """Return the value of a column as JSON. What is no text, number or list is an object: {name of its type: ...}."""
    if isinstance(value, list):
        return [packed(each) for each in value]
    if isinstance(value, dict):
        return {"dict": {name: packed(each) for name, each in value.items()}}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, timedelta):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, date | time):  # a datetime is a date
        return {type(value).__name__: value.isoformat()}
    return {"Decimal": str(value)} if isinstance(value, Decimal) else value


def unpacked(value: Any) -> Any:
    """Return the value of which `packed` made JSON."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    [(kind, content)] = value.items()
    return _KINDS[kind](content)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "dict": lambda content: {name: unpacked(each) for name, each in content.items()},
    "bytes": base64.b64decode,
    "timedelta": lambda content: timedelta(*content),
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "Decimal": Decimal,
}


def seed_everything(seed: int) -> None:
    """Seed all generators, so that randomness depends on the scored samples, not on the process's history."""
    random.seed(seed)
    for name, limit in (("numpy", 2**32), ("torch", 2**63)):
        module = sys.modules.get(name)  # a module that is not imported cannot be in use
        if module is not None:
            (module.random.seed if name == "numpy" else module.manual_seed)(seed % limit)


async def _wait(awaitable: Any) -> Any:
    return await awaitable


def load(file: str, name: str, kwargs: Mapping[str, Any] | None = None, forms: Sequence[tuple[str, str]] = ()) -> Any:
    """Load a function. kwargs: further arguments of it. forms: (parameter, file) of forms of other frameworks."""
    spec = importlib.util.spec_from_file_location("hotseat_reward", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if callable(function) and kwargs:
        inspect.signature(function).bind_partial(**kwargs)
        function = functools.partial(function, **kwargs)
    if callable(function) and not takes_names(function):
        adapters = [adapter for parameter, adapter in forms if parameter in parameters_of(function)]
        function = runpy.run_path(adapters[0])["adapted"](function) if adapters else function
    if not callable(function):
        has = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise AttributeError(f"no function {name} in it; it has: {', '.join(has) or 'none'}")
    if not takes_names(function):
        with contextlib.suppress(ValueError):  # it has no signature
            signature = inspect.signature(function)
            try:
                signature.bind([], [], [])
            except TypeError:
                raise TypeError(f"{name}{signature} cannot be called with queries, prompts, labels") from None
    return function


def _written(function: Any) -> Any:
    """Return the function that the user wrote, without what was made around it."""
    function = getattr(function, "adapts", function)
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.unwrap(function)


def description(error: BaseException, file: str) -> dict[str, str]:
    """Describe an error in a user's file: `error`, one line of text; `cause`; and `traceback`, where that helps.

    Errors that one line of the file raises for different samples have one cause, whatever their messages quote.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    where = f" at line {lines[-1]}" if lines else ""
    kind = type(error).__name__
    if isinstance(error, SyntaxError):
        return {"error": f"{kind}: {error.msg} at line {error.lineno}"}
    text = f"{kind}: {error}{where}"
    trace = "".join(traceback.format_exception(error)).rstrip()
    return {"error": text, "cause": f"{kind}{where}" if where else text, "traceback": trace}


def plain(value: Any, depth: int = 0) -> Any:
    """Convert a value to JSON's types. Tensors and arrays become lists or numbers, other objects their type's name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth < 8:
        if isinstance(value, dict):
            return {str(key): plain(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [plain(item, depth + 1) for item in value]
        if callable(getattr(value, "tolist", None)):
            return plain(value.tolist(), depth + 1)
    return {"__type__": type(value).__name__}
