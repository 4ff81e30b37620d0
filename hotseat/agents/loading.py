"""Loading of the agent in a user's file."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
import traceback
import types
from pathlib import Path
from typing import Any

from hotseat.agents._globals import needs_own_globals
from hotseat.agents._openrlhf import ExecutorAgent, FunctionTurns, InstanceTurns, accepted, stand_in
from hotseat.agents.agent import Agent, AgentError, SingleTurn
from hotseat.agents.gateway.settings import ProgramSettings
from hotseat.agents.multi_turn import Environment, MultiTurn
from hotseat.agents.sight import ImagePreparer
from hotseat.errors import UnsupportedError, UserError

_MODULE = "hotseat_agent"

_FORMS = (
    "a subclass of hotseat.Environment or of hotseat.Agent; play(prompt, client); for OpenRLHF, class AgentExecutor,"
    " class AgentInstance, or step(state, action, label, **kwargs)"
)


def load_agent(
    path: str | Path | None,
    tokenizer: Any,
    *,
    max_length: int,
    max_steps: int | None = None,
    programs: ProgramSettings | None = None,
    sight: ImagePreparer | None = None,
) -> Agent:
    """Load the agent in `FILE.py`, or the class NAME in it (`FILE.py:NAME`). Without a file it is `SingleTurn`.

    programs: settings of agents that are programs; if they have a command or an environment, that is the agent.

    sight: prepares images of environments; None: the run has no images.

    `max_length` is the most tokens that a context and the answer to it may have together, `max_steps` the most turns.
    A user's own `Agent` gets those of tokenizer, max_length and max_steps that its constructor has parameters for.
    """
    programs = programs or ProgramSettings()
    if programs.environment is not None:
        from hotseat.agents.environments.agent import EnvironmentAgent

        limits: dict[str, Any] = {"max_length": max_length, "max_steps": max_steps, "sight": sight}
        return EnvironmentAgent(tokenizer, programs, programs.environment, **limits)
    if programs.command is not None:
        from hotseat.agents.black_box import Program

        return Program(tokenizer, programs, max_length=max_length, max_steps=max_steps, sight=sight)
    if path is None:
        return SingleTurn(tokenizer)
    named = re.fullmatch(r"(.+\.py):(\w+)", str(path))
    file, class_name = Path(named[1] if named else path).expanduser().absolute(), named[2] if named else None
    agent = _load(file, class_name, tokenizer, {"max_length": max_length, "max_steps": max_steps}, programs, sight)
    with contextlib.suppress(AttributeError):
        agent.name = str(file)  # type: ignore[attr-defined]  # for messages
    return agent


def load_file(file: Path, class_name: str | None) -> tuple[types.CodeType, types.ModuleType]:
    """Load the file of an agent without making the agent; return its code and module. Raises if it has none."""
    source = _Source(file)
    module = source.load()
    _choose(module, file, class_name)
    return source.code, module


def _load(
    file: Path,
    class_name: str | None,
    tokenizer: Any,
    limits: dict[str, Any],
    programs: ProgramSettings,
    sight: ImagePreparer | None,
) -> Agent:
    source = _Source(file)
    module = source.load()
    name, form = _choose(module, file, class_name)
    seed = programs.run_seed
    if name == "play":
        from hotseat.agents.black_box import PlayFunction

        try:
            return PlayFunction(form, tokenizer, programs, sight=sight, **limits)
        except AgentError as error:
            raise UserError(f"{file}: {error}") from None
    if name == "step":
        load = source.load if needs_own_globals(module, source.text) else lambda: module
        return MultiTurn.of_turns(lambda: FunctionTurns(load), tokenizer, run_seed=seed, sight=sight, **limits)
    if name == "AgentInstance":
        return MultiTurn.of_turns(lambda: InstanceTurns(form), tokenizer, run_seed=seed, sight=sight, **limits)
    if Environment in form.__mro__:
        return MultiTurn(form, tokenizer, run_seed=seed, sight=sight, **limits)
    try:
        if name == "AgentExecutor":
            return ExecutorAgent(form, tokenizer, sight=sight, **limits)
        return form(**accepted(form.__init__, {"tokenizer": tokenizer, **limits}, f"{name}.__init__"))
    except UnsupportedError as error:
        raise UnsupportedError(f"{file}: {error}") from error
    except Exception as error:
        raise UserError(f"{file}: {name} cannot be made: {describe(error, str(file))}") from error


def _choose(module: types.ModuleType, file: Path, class_name: str | None) -> tuple[str, Any]:
    own = {
        name: value
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == _MODULE and not name.startswith("_")
    }
    ours = {name: cls for name, cls in own.items() if Environment in cls.__mro__ or Agent in cls.__mro__}
    if class_name is not None:
        if class_name in ours:
            return class_name, ours[class_name]
        raise UserError(f"{file}: no agent or environment {class_name!r} in it; it has: {', '.join(ours) or 'none'}")
    for name in ("AgentExecutor", "AgentInstance"):
        if name in own and name not in ours:
            return name, own[name]
    if len(ours) > 1:
        raise UserError(f"{file} has several agents or environments: name one, as {file.name}:{min(ours)}")
    if ours:
        return next(iter(ours.items()))
    functions = [name for name in ("step", "play") if callable(getattr(module, name, None))]
    if len(functions) > 1:
        raise UserError(f"{file} has both step and play, each of which would be the agent: rename one of them")
    if functions:
        return functions[0], getattr(module, functions[0])
    raise UserError(f"{file}: no agent in it; what would fit: {_FORMS}")


class _Source:
    """A file that can be loaded more than once: read and compiled the first time, run each time."""

    def __init__(self, file: Path):
        self._file = file
        try:
            self.text = file.read_text(encoding="utf-8")
            self.code = compile(self.text, str(file), "exec")
        except OSError as error:
            raise UserError(f"agent: {file}: {error.strerror or error}") from None
        except (SyntaxError, ValueError) as error:
            line = f" at line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise UserError(f"{file}: not Python: {error.args[0]}{line}") from None
        folder = str(file.parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for the modules beside it, also those imported later

    def load(self) -> types.ModuleType:
        """Run the file in a fresh module, with globals of its own."""
        module = types.ModuleType(_MODULE)
        module.__file__ = str(self._file)
        with stand_in():
            before = sys.modules.get(_MODULE)
            sys.modules[_MODULE] = module
            try:
                exec(self.code, module.__dict__)
            except UnsupportedError as error:
                raise UnsupportedError(f"{self._file}: {error}") from error
            except BaseException as error:
                raise UserError(f"{self._file}: {describe(error, str(self._file))}") from error
            finally:
                if before is None:
                    del sys.modules[_MODULE]
                else:
                    sys.modules[_MODULE] = before
        return module


def describe(error: BaseException, file: str | None = None) -> str:
    """Format an error with the line that raised it: of the user's file, or else of the innermost frame."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    where = f" at line {own[-1].lineno}" if own else ""
    if not own and frames:
        where = f" ({frames[-1].filename}:{frames[-1].lineno})"
    return f"{type(error).__name__}: {error}{where}"
