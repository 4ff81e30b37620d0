"""Checks that the directory of a run is free."""

from __future__ import annotations

import fcntl
from collections.abc import Iterable
from pathlib import Path

from hotseat.checks.stage import CheckContext
from hotseat.config import Config
from hotseat.errors import Problem, UserError
from hotseat.files import link_error, opened
from hotseat.observe import METRICS, read_lines

CONFIG = "config.yaml"
LOCK = ".lock"  # held by the process of the run
INITIAL_MODEL = "initial_model"  # folder of a model that a script gave as an object, saved before the run begins


def is_free(context: CheckContext) -> Iterable[Problem]:
    """Raise if the run's name cannot name a directory, or is taken."""
    if context.config.name is not None:
        run_directory(context.config)
    return ()


def run_directory(config: Config) -> Path:
    """Return the directory of a run. Raises if its name cannot name one, or is taken."""
    assert config.name is not None
    name = Path(config.name)
    if name.is_absolute() or ".." in name.parts or len(name.parts) != 1:
        raise UserError(f"name {config.name!r}: give one plain word, it becomes a directory under run_dir")
    path = Path(config.run_dir) / name
    owner = owner_of(path)
    if owner is not None:
        raise in_use(path, owner)
    for each in path.iterdir() if path.is_dir() else ():
        if each.is_symlink():
            raise link_error(each)
    is_empty = not path.exists() or all(each.name == INITIAL_MODEL for each in path.iterdir())
    if not is_empty and not config.checkpoint.resume and not _made_no_step(path):
        folder = Path(config.checkpoint.folder) if config.checkpoint.folder is not None else path / "checkpoints"
        has_checkpoint = folder.is_dir() and any(folder.iterdir())
        resume = f"resume it (`hotseat resume {path}`), " if has_checkpoint else ""
        raise UserError(f"{path} holds a run already: {resume}choose another name (name=...), or remove it")
    return path


def owner_of(run_dir: Path) -> str | None:
    """Name the process that a run directory belongs to at this moment; None if no run is under way there."""
    try:
        with opened(run_dir / LOCK) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "another run"
    except OSError:
        return None
    return None


def in_use(run_dir: Path, owner: str) -> UserError:
    return UserError(f"{run_dir} is in use by {owner}, whose run is under way: wait for it, or choose another name")


def _made_no_step(path: Path) -> bool:
    """Tell whether a run began here and failed before its first step: it left nothing that could be lost."""
    if not (path / CONFIG).exists() or any((path / name).exists() for name in ("model", "checkpoints")):
        return False
    metrics = path / METRICS
    return not metrics.exists() or all(record.get("step", 0) == 0 for record in read_lines(metrics))
