"""`hotseat replay`: trains a recorded run again from kept groups, and compares the weights."""

from __future__ import annotations

import argparse
import filecmp
from collections.abc import Sequence
from pathlib import Path

from hotseat.config import Config
from hotseat.config.schema.data_options import EvaluationConfig
from hotseat.config.schema.record_options import CheckpointConfig
from hotseat.errors import UserError
from hotseat.loop.state.checkpoints import MODEL
from hotseat.loop.state.fork import directory_of, fork, forked
from hotseat.loop.steering import Steering


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a run; print whether its weights are those of the recorded run, if that has ended. Return an exit code."""
    run_dir, start, end = Path(arguments.run_dir), arguments.from_step, arguments.to_step
    if start < 0 or (end is not None and end <= start):
        raise UserError(f"steps {start} to {end}: --from-step is a checkpoint's step, or 0, and --to-step is after it")
    config = replay_config(run_dir, "replay", start, arguments.overrides, evaluates=arguments.evaluate)
    last_step = replay(run_dir, config, start, end)
    if end is not None:
        print(f"steps {start + 1} to {last_step} are done; models are compared without --to-step")
        return 0
    return _compare(run_dir / MODEL, directory_of(config) / MODEL)


def replay_config(run_dir: Path, suffix: str, start: int, overrides: Sequence[str], evaluates: bool) -> Config:
    """Return the config of a run's replay, which is a run of its own beside it."""
    config = forked(run_dir, suffix, start, overrides)
    resumes, allowed = config.checkpoint.resume, config.checkpoint.allow_changes
    return config.model_copy(
        update={
            "eval": config.eval if evaluates else EvaluationConfig(),
            "checkpoint": CheckpointConfig(every_minutes=0, resume=resumes, allow_changes=allowed),
            "log": config.log.model_copy(update={"keep_rollouts": False}),
        }
    )


def replay(run_dir: Path, config: Config, start: int, end: int | None, steering: Steering | None = None) -> int:
    """Replay steps of a run after `start`, to `end` or as far as groups were kept; return the last one."""
    from hotseat.loop.rl.stream import Recording
    from hotseat.loop.run import start as start_run

    recording = Recording(run_dir, start, end)
    steps = f"the {recording.last_step} recorded steps" if start == 0 else f"steps {start + 1} to {recording.last_step}"
    print(f"replay: {steps} of {run_dir}, into {directory_of(config)}")
    with fork(run_dir, start, config):
        start_run(config, recording=recording, steering=steering)
    return recording.last_step


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
