"""Runs that continue from a checkpoint of another run, beside it: that one stays as it is."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hotseat.checks.run_directory import CONFIG
from hotseat.config import Config, loads_saved
from hotseat.config.changes import keys_to_allow
from hotseat.config.schema.record_options import EndpointConfig, MlflowConfig, TrackioConfig, WandbConfig
from hotseat.errors import CheckpointError, UserError
from hotseat.loop.state.checkpoints import BACKEND, STATE, CheckpointStore
from hotseat.loop.state.run_dir import CHANGES
from hotseat.observe import METRICS, SAMPLES
from hotseat.observe.journal import DISTRIBUTIONS

_RECORDS = (METRICS, DISTRIBUTIONS, SAMPLES, CHANGES)  # a run that resumes removes what is of later steps


def resumable_steps(run_dir: Path, config: Config) -> list[int]:
    """Return the steps of the checkpoints on disk that a run can resume from, oldest first."""
    store = _store(run_dir, config)
    return [step for step in store.steps() if (store.path(step) / BACKEND).is_dir()]


def forked(run_dir: Path, suffix: str, step: int, overrides: Sequence[str]) -> Config:
    """Return the config of a run that continues from the checkpoint of a step of the run in `run_dir`, or from step 0.

    Its name is that of the run with a suffix and the first number that is free. All that overrides change is allowed to
    change, as far as anything may. It reports to no tracker. Nothing is written yet.
    """
    recorded = config_of(run_dir)
    config = config_of(run_dir, overrides)
    names = (f"{run_dir.name}-{suffix}-{number}" for number in itertools.count(1))
    name = next(name for name in names if not (run_dir.parent / name).exists())
    log = {"tensorboard_path": None, "endpoint": EndpointConfig()}
    trackers = {"wandb": WandbConfig(), "mlflow": MlflowConfig(), "trackio": TrackioConfig()}
    own: dict[str, Any] = {"path": None, "export_path": None, "push_to_hub": None, "push_private": True}
    config = config.model_copy(
        update={
            "run_dir": str(run_dir.parent),
            "name": name,
            "checkpoint": config.checkpoint.model_copy(update=own),
            "log": config.log.model_copy(update=log | trackers),
        }
    )
    if step == 0:
        return config
    if step not in (steps := resumable_steps(run_dir, recorded)):
        raise UserError(
            f"{run_dir} has no checkpoint of step {step}: it has {', '.join(map(str, steps)) or 'none'}; 0 is the"
            " beginning. checkpoint.every and checkpoint.keep_last say which ones a run makes and keeps"
        )
    try:
        state = json.loads((_store(run_dir, recorded).path(step) / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the checkpoint of step {step} of {run_dir} cannot be read: {error}") from None
    resuming = {"resume": True, "allow_changes": keys_to_allow(str(state["config"]), config)}
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update=resuming)})


def config_of(run_dir: Path, overrides: Sequence[str] = ()) -> Config:
    """Return the config of the run in a directory. Raises if there is none."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir} holds no run: there is no {path}")
    return loads_saved(path.read_text(), overrides)


def directory_of(config: Config) -> Path:
    assert config.name is not None
    return Path(config.run_dir) / config.name


@contextmanager
def fork(run_dir: Path, step: int, config: Config) -> Iterator[None]:
    """Give the directory of a forked run the records and the checkpoint that it continues from.

    If it is refused in this block, the directory is removed. Files of the checkpoint are links where the disk has them:
    nothing ever changes them.
    """
    path = directory_of(config)
    try:
        path.mkdir()
    except OSError as error:
        raise UserError(
            f"{path} could not be made: {error.strerror}; if another command has just begun a run there, give this one"
            " again"
        ) from None
    try:
        if step > 0:
            _begin(run_dir, step, path)
        yield
    except (UserError, CheckpointError):
        shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        with suppress(OSError):
            path.rmdir()  # nothing was written


def _begin(run_dir: Path, step: int, path: Path) -> None:
    source, target = _store(run_dir, config_of(run_dir)).path(step), CheckpointStore(path / "checkpoints").path(step)
    try:
        for name in _RECORDS:
            if (run_dir / name).is_file():
                shutil.copyfile(run_dir / name, path / name)
        shutil.copytree(source, target, copy_function=_link)
    except OSError as error:
        raise CheckpointError(f"{path} could not be made from {source}: {error}") from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)


def _store(run_dir: Path, config: Config) -> CheckpointStore:
    return CheckpointStore(Path(config.checkpoint.folder or run_dir / "checkpoints"))
