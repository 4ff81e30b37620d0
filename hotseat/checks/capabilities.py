"""Checks of packages and devices: what backends, engines and trackers can do here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hotseat.checks.cpu import engine_dtype_problem
from hotseat.checks.plans import is_cluster_there
from hotseat.checks.stage import CheckContext, DeviceContext, TrainingContext, problem_of
from hotseat.config.precision import dtype_of
from hotseat.config.presence import has_critic, has_judge_engine
from hotseat.config.resolved import fp8_options
from hotseat.errors import Problem
from hotseat.machine import has_gpu
from hotseat.registry.backends import backend_entry
from hotseat.registry.engines import engine_entry


def optional_packages(context: CheckContext) -> Iterator[Problem]:
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
        kind, arguments = engine_kind(config.rollout.engine), config.rollout.engine_args
        yield from problem_of("rollout.engine", kind.problem())
        if arguments and kind.problem() is None:
            for name, reason in kind.refused_arguments(arguments):
                yield Problem(f"rollout.engine_args.{name}", reason)
    others = {"reference.engine": config.reference.engine}
    if has_judge_engine(config):
        others["reward.judge.engine.kind"] = config.reward.judge.engine.kind
    for key, engine in others.items():
        if engine is not None:
            yield from problem_of(key, engine_kind(engine).problem())


def backends(context: TrainingContext) -> Iterable[Problem]:
    """Raise for options that the training backends do not have, or that this machine's devices cannot carry out."""
    from hotseat.train import deepcompile, liger
    from hotseat.train.make import check_options

    for options in context.options:
        check_options(options)
    train = context.config.train
    if not is_cluster_there(context.config):  # whose machines may have what this one lacks
        if train.liger_kernel:
            liger.check_device(has_gpu())
        if backend_entry(train.backend).has_zero_options and train.deepspeed.deepcompile:
            deepcompile.check_device(has_gpu())
    return ()


def critic_warmup(context: TrainingContext) -> Iterator[Problem]:
    """Find a run that ends before the actor would begin to learn."""
    warmup_steps, num_steps = context.config.critic.warmup_steps, context.num_steps
    if has_critic(context.config) and warmup_steps >= num_steps:
        yield Problem(
            "",
            f"critic.warmup_steps is {warmup_steps}, and the run has {num_steps} steps: the actor would never learn;"
            f" set it to {max(num_steps, 1) - 1} or less, or add data",
        )


def fp8(context: DeviceContext) -> Iterator[Problem]:
    """Find weights or caches of engines in FP8, where the dtype or the devices do not have them."""
    rollout, is_fp32 = context.config.rollout, dtype_of(context.config) == "fp32"
    for key in fp8_options(context.config) if is_fp32 else ():
        yield Problem(
            "",
            f"{key} is fp8, which is for 16-bit models, and train.dtype is fp32 where there are no devices: set"
            " train.dtype to bf16, or leave it unset",
        )
    if rollout.kv_cache_dtype is not None and not context.on_gpu:
        title = engine_entry(rollout.engine).title
        yield Problem(
            "", f"rollout.kv_cache_dtype is fp8, which {title} has on GPUs alone, and there are none: leave it unset"
        )


def engine_dtype(context: DeviceContext) -> Iterator[Problem]:
    """Find a dtype in which the engine cannot sample on this CPU."""
    return problem_of("", None if context.on_gpu else engine_dtype_problem(context.config))
