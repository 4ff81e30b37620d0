"""`hotseat replay`: trains a recorded run again without engines, and compares the weights."""

from __future__ import annotations

import argparse
import filecmp
import itertools
from collections.abc import Sequence
from pathlib import Path

from hotseat.checks.run_directory import CONFIG
from hotseat.config import Config, loads_saved
from hotseat.config.schema.data_options import EvaluationConfig
from hotseat.config.schema.record_options import CheckpointConfig, WandbConfig
from hotseat.errors import UserError
from hotseat.loop.state.saving import MODEL


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a run; print whether its weights are those of the recorded run, if that has ended. Return an exit code."""
    run_dir = Path(arguments.run_dir)
    config = replay_config(run_dir, arguments.overrides)
    from hotseat.loop.rl.stream import Recording
    from hotseat.loop.run import start

    recording = Recording(run_dir)
    print(f"replay: the {recording.num_steps} recorded steps of {run_dir}, into {_directory(config)}")
    start(config, recording=recording)
    return _compare(run_dir / MODEL, _directory(config) / MODEL)


def replay_config(run_dir: Path, overrides: Sequence[str]) -> Config:
    """Return the config of a run's replay, which is a run of its own beside it."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise UserError(f"{run_dir} holds no run: there is no {path}")
    config = loads_saved(path.read_text(), overrides)
    names = (f"{run_dir.name}-replay-{number}" for number in itertools.count(1))
    log = {"keep_rollouts": False, "tensorboard_path": None, "wandb": WandbConfig()}
    return config.model_copy(
        update={
            "run_dir": str(run_dir.parent),
            "name": next(name for name in names if not (run_dir.parent / name).exists()),
            "eval": EvaluationConfig(),  # without engines nothing can be evaluated
            "checkpoint": CheckpointConfig(every_minutes=0),
            "log": config.log.model_copy(update=log),
        }
    )


def _directory(config: Config) -> Path:
    assert config.name is not None
    return Path(config.run_dir) / config.name


def _compare(recorded: Path, replayed: Path) -> int:
    """Print whether two exported models are the same, byte by byte. Return 1 if they are not."""
    names = sorted(path.name for path in replayed.glob("*.safetensors"))
    if not all((recorded / name).is_file() for name in names):
        print(f"{recorded} has no model to compare with: the recorded run did not come to its end there")
        return 0
    different = [name for name in names if not filecmp.cmp(recorded / name, replayed / name, shallow=False)]
    if different:
        print(f"other weights than {recorded}: {', '.join(different)} differ")
        return 1
    print(f"the same weights as {recorded}, bit for bit")
    return 0
