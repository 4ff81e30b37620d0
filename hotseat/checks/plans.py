"""Checks of a run's plan: processes, host memory, transports, and the user's functions that take part."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from hotseat.checks.stage import DeviceContext, PlanContext, RanksContext
from hotseat.checks.weight_files import loaded_bytes
from hotseat.config import Config
from hotseat.config.precision import Dtype, dtype_of, with_dtype
from hotseat.config.presence import has_critic
from hotseat.config.resolved import critic_model, reward_parts
from hotseat.errors import PlacementError, Problem
from hotseat.machine import available_bytes, has_gpu
from hotseat.placement.memory_terms import GIB, SNAPSHOTS
from hotseat.planning.config_plan import host_needs, is_offloaded
from hotseat.processes import kept_driver
from hotseat.registry.roles import role_entry
from hotseat.user_functions import is_user_function


def is_cluster_there(config: Config) -> bool:
    """Tell whether the run will use a Ray cluster that exists already, of other machines than this one."""
    return config.cluster.runtime == "ray" and bool(os.environ.get("RAY_ADDRESS"))


def ranks_in_one_process(context: PlanContext) -> Iterator[Problem]:
    """Find a role with several ranks in one process: their collectives would wait for each other."""
    config = context.config
    if not config.cluster.is_in_process:
        return
    for role in context.plan.roles:
        if not role_entry(role.name).is_independent and len(role.processes) > 1:
            yield Problem(
                "",
                f"cluster.runtime is local, which holds one rank of each model, and {role.name} has"
                f" {len(role.processes)} ranks on {role.on}: set cluster.runtime to ray, or place {role.name} on one"
                " device",
            )


def reference_of_preferences(context: PlanContext) -> Iterable[Problem]:
    """Find a reference of preferences elsewhere than the actor: each rank scores what it learns from."""
    plan = context.plan
    places = {role.name: [process.devices for process in role.processes] for role in plan.roles}
    if context.config.task_entry.compares_answers and "reference" in places and places["reference"] != places["actor"]:
        raise PlacementError(
            f"cluster.component_placement: reference on {plan.role('reference').on}, actor on {plan.role('actor').on}:"
            " in task dpo each rank of the actor holds the reference's part beside its own; leave reference out of the"
            " placement, or write @actor"
        )
    return ()


def memory_snapshots(context: PlanContext, free: int | None = None) -> Iterator[Problem]:
    """Find that memory snapshots have no place, or no room there. free: bytes; None: as measured now."""
    section = context.config.checkpoint
    # A driver that is started again has passed this before.
    if section.memory_every is None or kept_driver.restarts:
        return
    place = Path(section.memory_path)
    if not (place.is_dir() and os.access(place, os.W_OK)):
        yield Problem("checkpoint.memory_path", f"{place} is no folder that can be written: give one on a tmpfs")
        return
    terms = [term for host in context.plan.hosts for term in host.terms if term.name == SNAPSHOTS]
    count = 1 if section.resume else 2  # a run that is resumed may have the other already
    needed = int(sum(term.gib for term in terms) * GIB * count / 2)
    free = shutil.disk_usage(place).free if free is None else free
    if needed > free:
        yield Problem(
            "checkpoint.memory_every",
            f"the last memory snapshot and the one that is being written take {needed:,} bytes in {place}, and"
            f" {free:,} are free: make it larger (`mount -o remount,size=...`, `docker run --shm-size=...`), set"
            " checkpoint.memory_path to another folder, or leave checkpoint.memory_every out",
        )


def launched_ranks(context: RanksContext) -> Iterator[Problem]:
    """Find options that ranks which a launcher started do not support, or that do not divide them."""
    from hotseat.train.sequence import check_ranks
    from hotseat.train.tensor import TENSOR_PARALLEL_SIZE

    train = context.config.train
    if context.config.checkpoint.background:
        yield Problem(
            "",
            "checkpoint.background is true, but ranks that a launcher started wait while they save: leave it unset, or"
            " use `hotseat run`, which starts the ranks itself",
        )
    if context.config.checkpoint.memory_every is not None:
        yield Problem(
            "checkpoint.memory_every",
            "ranks that a launcher started are not started again, so they make no memory snapshots: leave it unset, or"
            " use `hotseat run`",
        )
    check_ranks(train.sequence_parallel_size, context.num_launched)
    check_ranks(train.tensor_parallel_size, context.num_launched, TENSOR_PARALLEL_SIZE)


def host_memory(context: PlanContext, available: int | None = None) -> Iterator[Problem]:
    """Find that the roles of a run on the CPUs of this machine need more memory than it has.

    Counted is what every such run holds at once, so a run that could work is never refused. available: bytes of host
    memory; None: as measured now.
    """
    if is_cluster_there(context.config) or has_gpu():
        return
    available = available_bytes() if available is None else available
    needs = host_needs(with_dtype(context.config, has_gpus=False), context.plan)
    needed = sum(needs.values())
    if not available or needed * GIB <= available:
        return
    listed = ", ".join(f"{role} {gib:.1f} GiB" for role, gib in needs.items() if gib >= 0.05)
    yield Problem(
        "actor.model",
        f"weights, gradients and optimizer state take {needed:.1f} GiB of host memory on CPUs ({listed}), and"
        f" {available / GIB:.1f} GiB are available: choose a smaller model, set train.lora.rank, leave out roles, or"
        " run it on a machine with more memory or with GPUs",
    )


def loading_memory(context: PlanContext, available: int | None = None, on_gpu: bool | None = None) -> Iterator[Problem]:
    """Find that ranks on the GPUs of this machine need more host memory to load a model than it has.

    Every rank loads the whole model before it keeps its share, and waits for the others then. A run that could work is
    never refused: counted are models in folders, weights that are converted, since others may stay in their files, and
    the largest role, since the ranks of two may load one after another. available, on_gpu: None: as measured now.
    """
    if is_cluster_there(context.config) or not (has_gpu() if on_gpu is None else on_gpu):
        return
    available = available_bytes() if available is None else available
    config = with_dtype(context.config, has_gpus=True)
    models = {"actor": config.actor.model, "critic": critic_model(config) if has_critic(config) else None}
    for role in context.plan.roles:
        model = models.get(role.name)
        num_ranks = sum(process.node == 0 for process in role.processes)
        dtype = _loaded_as(config)
        needed = num_ranks * loaded_bytes(Path(model), dtype, are_kept=True) if model is not None else 0
        if available and needed > available:
            yield Problem(
                f"{role.name}.model",
                f"{num_ranks} ranks of this machine each load {model!r} as {dtype} before they keep their share of it,"
                f" which takes {needed / GIB:.1f} GiB of host memory, and {available / GIB:.1f} GiB are available:"
                " train adapters (train.lora.rank), whose base loads in 16 bits, choose a smaller model or fewer ranks"
                " on a machine, or use one with more memory",
            )


def _loaded_as(config: Config) -> Dtype:
    """Return the type in which ranks that train load a model."""
    train, dtype = config.train, dtype_of(config)
    is_exact = train.lora.rank == 0 and (dtype == "fp16" or train.fp32_master)
    return "fp32" if is_exact else dtype


def engine_memory(context: DeviceContext, available: int | None = None) -> Iterator[Problem]:
    """Find that an engine of a command without training needs more memory on the CPUs of this machine than it has."""
    config, available = context.config, available_bytes() if available is None else available
    if context.on_gpu or config.actor.model is None:
        return
    dtype = dtype_of(config)
    needed = loaded_bytes(Path(config.actor.model), dtype)
    if available and needed > available:
        yield Problem(
            "actor.model",
            f"its weights take {needed / GIB:.1f} GiB of host memory as {dtype}, and {available / GIB:.1f} GiB are"
            " available: choose a smaller model, set train.dtype to bf16, or use a machine with more memory or with"
            " GPUs",
        )


def transport(context: PlanContext) -> Iterable[Problem]:
    """Find a weight transport that this machine's devices cannot use. An existing cluster is checked later."""
    from hotseat.weights.transports import check_transport

    if context.config.has_rollouts and not is_cluster_there(context.config):
        check_transport(context.config.rollout.weight_transport, is_cuda=has_gpu())
    return ()


def user_functions(context: PlanContext) -> Iterator[Problem]:
    """Find a custom loss, estimator or sampler that fails on a toy batch."""
    for key, name, problem in _tried(context.config):
        if problem is not None:
            yield Problem(key, f"{name} {problem}\n    docs/algorithms.md has what it gets and returns")


def _tried(config: Config) -> Iterator[tuple[str, str, str | None]]:
    from hotseat.checks.function_trial import estimator_problem, policy_loss_problem, sampler_problem

    algorithm = config.algorithm
    if is_user_function(algorithm.policy_loss):
        problem = policy_loss_problem(algorithm.policy_loss, eps_low=algorithm.clip_low, eps_high=algorithm.clip_high)
        yield "algorithm.policy_loss", algorithm.policy_loss, problem
    if is_user_function(algorithm.estimator):
        problem = estimator_problem(algorithm.estimator, config.rollout.samples_per_prompt, reward_parts(config))
        yield "algorithm.estimator", algorithm.estimator, problem
    if config.data.sampler is not None:
        yield "data.sampler", config.data.sampler, sampler_problem(config.data.sampler)


def components(context: PlanContext) -> Iterator[Problem]:
    """Find a component whose class cannot be loaded, made with its arguments, or called."""
    from hotseat.checks.function_trial import component_problem

    for name, component in context.config.components.items():
        offloaded = is_offloaded(context.plan, name)
        problem = component_problem(name, component.path, component.kwargs, is_offloaded=offloaded)
        if problem is not None:
            yield Problem(f"components.{name}", f"{problem}\n    docs/placement.md has what it gets and returns")
