"""Loading of the agent in a user's file."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import time
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hotseat import extensions
from hotseat.agents.agent import Agent, SingleTurn
from hotseat.agents.environments.environment_worker import play_problem
from hotseat.agents.environments.families import EnvironmentSettings
from hotseat.agents.gateway.program_session import ProgramSettings, ServedPolicy
from hotseat.agents.image_preparer import ImagePreparer
from hotseat.agents.multi_turn import Environment, MultiTurn
from hotseat.agents.thinking import BudgetedThinking
from hotseat.errors import UnsupportedError, UserError
from hotseat.user_functions import described, located

_MODULE = "hotseat_agent"
_SLOW_S = 0.2  # of running a file, which happens for each episode of a function


def load_agent(
    path: str | Path | None,
    tokenizer: Any,
    *,
    max_length: int,
    max_steps: int | None = None,
    programs: ProgramSettings | None = None,
    preparer: ImagePreparer | None = None,
    max_thinking_tokens: int | None = None,
) -> Agent:
    """Load the agent in `FILE.py`, or the class NAME in it (`FILE.py:NAME`). Without a file it is `SingleTurn`.

    programs: settings of agents that are programs; if they have a command or an environment, that is the agent.

    preparer: prepares images of environments; None: the run has no images. max_thinking_tokens: without any agent, the
    tokens after which thinking is ended; None: no bound.

    `max_length` is the most tokens that a context and the answer to it may have together, `max_steps` the most turns.
    A user's own `Agent` gets those of tokenizer, max_length and max_steps that its constructor has parameters for.
    """
    programs = programs or ProgramSettings()
    policy = partial(ServedPolicy, tokenizer, programs, max_length, max_steps, preparer)
    if programs.environment is not None:
        from hotseat.agents.environments.environment_agent import EnvironmentAgent

        return EnvironmentAgent(policy(), programs.environment)
    if programs.command is not None:
        from hotseat.agents.black_box import Program

        return Program(policy())
    if path is None:
        if max_thinking_tokens is not None:
            return BudgetedThinking(tokenizer, max_thinking_tokens, max_length)
        return SingleTurn(tokenizer)
    file, class_name = located(str(path))
    if class_name is None and _has_play_alone(file):
        return _player(file, policy())
    source = AgentFile(file)
    name, value, form = _choose(source.module, file, class_name)
    limits: dict[str, Any] = {"max_length": max_length, "max_steps": max_steps}
    if name == "play":
        return _player(file, policy())
    agent: Agent
    try:
        if form is not None:
            agent = form.make(source, name, tokenizer, run_seed=programs.run_seed, preparer=preparer, **limits)
        elif Environment in value.__mro__:
            agent = MultiTurn(value, tokenizer, run_seed=programs.run_seed, preparer=preparer, **limits)
        else:
            agent = value(**accepted(value.__init__, {"tokenizer": tokenizer, **limits}, f"{name}.__init__"))
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from error
    except Exception as error:
        raise UserError(f"{file}: {name} cannot be made: {described(error, file)}") from error
    with contextlib.suppress(AttributeError):
        agent.name = str(file)  # for messages
    return agent


def _player(file: Path, policy: ServedPolicy) -> Agent:
    """Return an agent that runs the function `play` of a file in a process of its own."""
    from hotseat.agents.environments.environment_agent import EnvironmentAgent

    return EnvironmentAgent(policy, EnvironmentSettings(file=str(file), has_our_rights=True))


def _has_play_alone(file: Path) -> bool:
    """Tell whether a file has a function `play` and surely no other agent, without running it.

    A process of its own runs it. Where this cannot be told, the file has to be run here, too.
    """
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return False  # whoever loads it says what is wrong
    functions = {each.name for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    others = {name for entry in extensions.AGENT_FORMS for name in (*entry.classes, *entry.functions)}
    bound = {each.name for each in body if isinstance(each, ast.ClassDef)} | functions
    has_classes = any(isinstance(each, ast.ClassDef) and each.bases for each in body)
    return "play" in functions and not has_classes and not bound & others


def load_file(file: Path, class_name: str | None) -> tuple[AgentFile, str | None]:
    """Load the file of an agent without making the agent; return it with a note for the user. Raises if it has none."""
    source = AgentFile(file)
    name, value, form = _choose(source.module, file, class_name)
    problem = play_problem(value, str(file)) if name == "play" else None
    if problem is not None:
        raise UserError(problem)
    is_run_again = form is not None and not inspect.isclass(value)
    return source, source.slowness() if is_run_again else None


def _choose(module: types.ModuleType, file: Path, class_name: str | None) -> tuple[str, Any, Any]:
    """Return what in a file is the agent, under its name, and the form if it is another framework's."""
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == _MODULE and not name.startswith("_")
    }
    ours = {name: cls for name, cls in own.items() if Environment in cls.__mro__ or Agent in cls.__mro__}
    if class_name is not None:
        if class_name in ours:
            return class_name, ours[class_name], None
        raise UserError(f"{file}: no agent or environment {class_name!r} in it; it has: {', '.join(ours) or 'none'}")
    for entry in extensions.AGENT_FORMS:
        for name in entry.classes:
            if name in own and name not in ours:
                return name, own[name], extensions.load(entry.form)
    if len(ours) > 1:
        raise UserError(f"{file} has several agents or environments: name one, as {file.name}:{min(ours)}")
    if ours:
        return *next(iter(ours.items())), None
    forms = {name: entry.form for entry in extensions.AGENT_FORMS for name in entry.functions}
    functions = [name for name in (*forms, "play") if callable(getattr(module, name, None))]
    if len(functions) > 1:
        both = " and ".join(functions)
        raise UserError(f"{file} has both {both}, each of which would be the agent: rename one of them")
    if functions:
        (name,) = functions
        return name, getattr(module, name), extensions.load(forms[name]) if name in forms else None
    raise UserError(f"{file}: no agent in it; what would fit: {extensions.describe_agent_forms()}")


def accepted(function: Any, offered: dict[str, Any], name: str, fill_kwargs: bool = False) -> dict[str, Any]:
    """Select from `offered` the arguments that a function takes. A required parameter that is not offered is an error.

    fill_kwargs: a function with `**kwargs` takes all of them.
    """
    taken = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD and fill_kwargs:
            return offered
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name == "self":
            continue
        if parameter.name in offered:
            taken[parameter.name] = offered[parameter.name]
        elif parameter.default is parameter.empty:
            raise UserError(f"{name} requires {parameter.name!r}; it can be given: {', '.join(offered)}")
    return taken


class AgentFile:
    """A user's file: compiled once, run at once, and again by each `load`. module: that of the first run."""

    def __init__(self, file: Path):
        self._file = file
        try:
            self.code = compile(file.read_text(encoding="utf-8"), str(file), "exec")
        except OSError as error:
            raise UserError(f"agent: {file}: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            line = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UserError(f"{file}: not Python: {error.args[0]}{line}") from None
        folder = str(file.parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for the modules beside it, also those imported later
        started_s = time.perf_counter()
        self.module = self.load()
        self._first_s = time.perf_counter() - started_s

    def load(self) -> types.ModuleType:
        """Run the file in a fresh module, with globals of its own."""
        module = types.ModuleType(_MODULE)
        module.__file__ = str(self._file)
        with contextlib.ExitStack() as stand_ins:
            for entry in extensions.AGENT_FORMS:
                stand_ins.enter_context(extensions.load(entry.form).stand_in())
            before = sys.modules.get(_MODULE)
            sys.modules[_MODULE] = module
            try:
                exec(self.code, module.__dict__)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self._file}: {error}") from error
            except BaseException as error:
                raise UserError(f"{self._file}: {described(error, self._file)}") from error
            finally:
                if before is None:
                    del sys.modules[_MODULE]
                else:
                    sys.modules[_MODULE] = before
        return module

    @property
    def _has_shared_globals(self) -> bool:
        return bool(getattr(self.module, "SHARED_GLOBALS", False))

    def loader_for_episodes(self) -> Callable[[], types.ModuleType]:
        """Return a function that gives an episode its module: a new one, unless the file has SHARED_GLOBALS = True."""
        return (lambda: self.module) if self._has_shared_globals else self.load

    def slowness(self) -> str | None:
        """Return a note if running the file again for each episode is slow, though its imports are loaded by then."""
        if self._has_shared_globals or self._first_s <= _SLOW_S:
            return None
        started_s = time.perf_counter()
        self.load()
        took_s = time.perf_counter() - started_s
        if took_s <= _SLOW_S:
            return None
        return (
            f"{self._file} is run for every episode, which takes {took_s:.1f} s: with SHARED_GLOBALS = True in it,"
            " it is run once, and all episodes of a process share its globals"
        )
