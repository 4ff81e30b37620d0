"""Checks that the packages which a run needs are installed."""

from __future__ import annotations

from collections.abc import Iterator

from hotseat.checks.stage import Context
from hotseat.config.presence import has_judge_engine
from hotseat.errors import Problem


def optional_packages(context: Context) -> Iterator[Problem]:
    """Find extras that the config needs and this machine lacks, and arguments that the engine does not take."""
    from hotseat.observe.tracker_sink import MLFLOW, TRACKIO, WANDB
    from hotseat.rollout.kinds import engine_kind
    from hotseat.train import liger

    config = context.config
    if config.train.liger_kernel and not liger.is_installed():
        yield Problem("train.liger_kernel", liger.HINT)
    trackers = ((WANDB, config.log.wandb), (MLFLOW, config.log.mlflow), (TRACKIO, config.log.trackio))
    for tracker, section in trackers:
        if section.enabled and not tracker.is_installed():
            yield Problem(f"log.{tracker.kind}.enabled", tracker.hint)
    if config.has_rollouts:
        kind = engine_kind(config.rollout.engine)
        problem = kind.problem()
        if problem is not None:
            yield Problem("rollout.engine", problem)
        elif config.rollout.engine_args:
            for name, reason in kind.refused_arguments(config.rollout.engine_args):
                yield Problem(f"rollout.engine_args.{name}", reason)
    if has_judge_engine(config):
        problem = engine_kind(config.reward.judge.engine.kind).problem()
        if problem is not None:
            yield Problem("reward.judge.engine.kind", problem)
