"""Finds a family of simulators: one of `hotseat/envs/families`, or a user's file."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from hotseat.envs import families
from hotseat.errors import UserError
from hotseat.user_functions import load_file

if TYPE_CHECKING:  # numpy is heavy, and refusals are not
    from hotseat.envs.simulator import Simulator

_MODULE = "hotseat_env"
_PACKAGES = {
    "babyai": ("gymnasium", "minigrid"),
    "gym": ("gymnasium",),
    "mujoco_warp": ("mujoco", "mujoco_warp", "warp"),
}
_EXTRAS = {"mujoco_warp": "warp"}  # of pyproject.toml; others are in `sim`
EXAMPLES = {"babyai": "BabyAI-GoToRedBallGrey-v0", "gym": "CartPole-v1", "mujoco_warp": "push-red"}  # of tasks


@dataclass(frozen=True)
class SimulatorSettings:
    """Settings of a simulator. path: name of a family, or a file with a function `make`."""

    path: str
    tasks: tuple[str, ...] = ()
    max_steps: int | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def family_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(families.__path__))


def path_problem(path: str) -> str | None:
    """Return why there is no simulator under this path; None: there may be one. Imports nothing of it."""
    if path.endswith(".py"):
        return None if Path(path).expanduser().is_file() else f"there is no file {path}"
    if path in family_names():
        return None
    return f"no simulator {path!r}: name one of {', '.join(family_names())}, or a file such as my_env.py"


def load_family(settings: SimulatorSettings) -> ModuleType:
    """Import the file of a family. Raises for what is wrong with it."""
    problem = path_problem(settings.path)
    if problem is not None:
        raise UserError(f"env.path: {problem}")
    if settings.path.endswith(".py"):
        file = Path(settings.path).expanduser().absolute()
        try:
            module = load_file(file, _MODULE)
        except Exception as error:
            raise UserError(f"env.path: {file}: {type(error).__name__}: {error}") from None
    else:
        try:
            module = importlib.import_module(f"{families.__name__}.{settings.path}")
        except ImportError as error:
            extra = _EXTRAS.get(settings.path, "sim")
            raise UserError(
                f"env.path {settings.path}: {error}; `pip install 'hotseat[{extra}]'` installs its package"
            ) from None
    if not has_worlds(module) and not callable(getattr(module, "make", None)):
        raise UserError(
            f"env.path: {settings.path} has no function make(tasks, max_steps, **kwargs), and none for batches,"
            " make_worlds(tasks, max_steps, num_worlds, **kwargs)"
        )
    return module


def has_worlds(module: ModuleType) -> bool:
    return callable(getattr(module, "make_worlds", None))


def make_one(module: ModuleType, settings: SimulatorSettings) -> Simulator:
    return module.make(list(settings.tasks), settings.max_steps, **settings.kwargs)


def import_problem(path: str) -> str | None:
    """Return which package a family lacks; None if it lacks none, or is the user's file."""
    absent = [name for name in _PACKAGES.get(path, ()) if importlib.util.find_spec(name) is None]
    if absent:
        return f"{path} needs the package {' and '.join(absent)}: pip install 'hotseat[{_EXTRAS.get(path, 'sim')}]'"
    return None
