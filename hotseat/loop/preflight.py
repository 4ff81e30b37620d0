"""Checks everything that can be wrong with a run before a model loads."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra, batch_algebra, left_over_note
from hotseat.config.precision import with_dtype
from hotseat.config.roles import has_critic, has_judge_engine
from hotseat.errors import PlacementError, TooFewDevicesError, UserError
from hotseat.loop.devices.memory import available_bytes
from hotseat.loop.planning.plan import host_needs, is_offloaded, make_plan, num_data_parallel
from hotseat.loop.setup.refusals import check_config
from hotseat.loop.setup.value_models import check_readers
from hotseat.placement import GIB, Inventory, Plan
from hotseat.registry.backends import backend_entry
from hotseat.types import Prompt

if TYPE_CHECKING:
    from hotseat.loop.setup.inputs import SupervisedData

MAX_LOGICAL_DEVICES = 64
INDEPENDENT = ("rollout", "judge", "env")  # roles whose processes work independently of each other, as components do


@dataclass(frozen=True)
class Inputs:
    """Inputs that every run reads before it starts."""

    tokenizer: Any
    rows: Sequence[Any]  # prompts, examples or pairs to learn from, in the order of the file
    notes: list[str]  # warnings and facts for the journal
    algebra: BatchAlgebra


@dataclass(frozen=True)
class RlInputs(Inputs):
    """Inputs of a reinforcement run."""

    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    plan: Plan  # for the devices of this machine, or those that the config names


@dataclass(frozen=True)
class SupervisedInputs(Inputs):
    """Inputs of a supervised run."""

    data: SupervisedData
    plan: Plan | None  # None: a launcher has placed the ranks


def rl_inputs(config: Config) -> RlInputs:
    """Read tokenizer and data of a reinforcement run. Raises for everything that would stop it."""
    from hotseat.loop.setup.inputs import check_models, check_teachers, load_tokenizer, rl_prompts

    # Placement and batch sizes first: they need neither tokenizer nor data.
    plan = make_plan(config, local_inventory(config))
    num_ranks = num_data_parallel(config, plan)
    batch_algebra(config, num_ranks)
    _check_runtime(config, plan)
    check_host_memory(config, plan)
    _check_transport(config, plan)
    check_user_functions(config)
    check_components(config, plan)
    tokenizer = load_tokenizer(config)
    check_models(config)
    check_readers(config, tokenizer)
    prompts, eval_prompts, notes = rl_prompts(config, tokenizer)
    check_teachers(config, prompts)
    algebra = batch_algebra(config, num_ranks, len(prompts))
    check_training(config, algebra)
    if has_critic(config) and config.critic.warmup_steps >= (algebra.num_steps or 0):
        raise UserError(
            f"critic.warmup_steps is {config.critic.warmup_steps}, and the run has {algebra.num_steps} steps: the actor"
            f" would never learn; set it to {(algebra.num_steps or 1) - 1} or less, or add data"
        )
    notes += _left_over(config, algebra)
    return RlInputs(tokenizer, prompts, notes, algebra, prompts, eval_prompts, plan)


def supervised_inputs(config: Config, num_launched: int | None = None) -> SupervisedInputs:
    """Read tokenizer and data of a supervised run. Raises for everything that would stop it.

    num_launched: number of ranks that a launcher started; None: the run starts its ranks itself.
    """
    from hotseat.loop.setup.inputs import check_models, load_tokenizer, supervised

    tokenizer = load_tokenizer(config)
    check_models(config)
    if config.task == "dpo":
        check_readers(config, tokenizer)
    data = supervised(config, tokenizer)
    plan = None
    if num_launched is None:
        plan = make_plan(config, local_inventory(config))
        _check_runtime(config, plan)
        check_host_memory(config, plan)
        _check_reference_place(plan)
        num_ranks = num_data_parallel(config, plan)
    else:
        num_ranks = _check_launched(config, num_launched)
    algebra = batch_algebra(config, num_ranks, len(data.items))
    check_training(config, algebra)
    notes = [*data.notes, *_left_over(config, algebra)]
    return SupervisedInputs(tokenizer, data.items, notes, algebra, data, plan)


def _left_over(config: Config, algebra: BatchAlgebra) -> list[str]:
    """Return the note on rows that are not learned from; a user's sampler chooses rows without an end."""
    note = None if config.data.sampler is not None else left_over_note(algebra, config)
    return [] if note is None else [note]


def _check_reference_place(plan: Plan) -> None:
    """Raise unless the reference of preferences is on the actor's devices: each rank scores what it learns from."""
    places = {role.name: [process.devices for process in role.processes] for role in plan.roles}
    if "reference" in places and places["reference"] != places["actor"]:
        raise PlacementError(
            f"cluster.component_placement: reference on {plan.role('reference').on}, actor on {plan.role('actor').on}:"
            " in task dpo each rank of the actor holds the reference's part beside its own; leave reference out of the"
            " placement, or write @actor"
        )


def _check_launched(config: Config, num_launched: int) -> int:
    """Return the number of data-parallel ranks among those launched. Raises for options that they do not support."""
    from hotseat.train.sequence import check_ranks
    from hotseat.train.tensor import TENSOR_PARALLEL_SIZE

    if config.checkpoint.background:
        raise UserError(
            "checkpoint.background is true, but ranks that a launcher started wait while they save: leave it unset, or"
            " use `hotseat run`, which starts the ranks itself"
        )
    check_ranks(config.train.sequence_parallel_size, num_launched)
    check_ranks(config.train.tensor_parallel_size, num_launched, TENSOR_PARALLEL_SIZE)
    return num_launched // config.train.num_model_parallel


def check_prerequisites(config: Config) -> None:
    """Raise for everything that would stop the run and can be seen without reading the data."""
    check_config(config)
    absent = _missing_packages(config)
    if absent:
        raise UserError("this run cannot start:\n" + "\n".join(f"  {key}: {message}" for key, message in absent))


def _missing_packages(config: Config) -> list[tuple[str, str]]:
    from hotseat.observe.tracker_sink import MLFLOW, TRACKIO, WANDB
    from hotseat.rollout.kinds import engine_kind
    from hotseat.train import liger

    absent = []
    if config.train.liger_kernel and not liger.is_installed():
        absent.append(("train.liger_kernel", liger.HINT))
    trackers = ((WANDB, config.log.wandb), (MLFLOW, config.log.mlflow), (TRACKIO, config.log.trackio))
    for tracker, section in trackers:
        if section.enabled and not tracker.is_installed():
            absent.append((f"log.{tracker.kind}.enabled", tracker.hint))
    if config.task == "rl":
        kind = engine_kind(config.rollout.engine)
        problem = kind.problem()
        if problem is not None:
            absent.append(("rollout.engine", problem))
        elif config.rollout.engine_args:
            refused = kind.refused_arguments(config.rollout.engine_args)
            absent += [(f"rollout.engine_args.{name}", reason) for name, reason in refused]
    if has_judge_engine(config):
        problem = engine_kind(config.reward.judge.engine.kind).problem()
        if problem is not None:
            absent.append(("reward.judge.engine.kind", problem))
    return absent


def is_cluster_there(config: Config) -> bool:
    """Tell whether the run will use a Ray cluster that exists already."""
    return config.cluster.runtime == "ray" and bool(os.environ.get("RAY_ADDRESS"))


def _check_runtime(config: Config, plan: Plan) -> None:
    """Raise if a role would have several ranks in one process: their collectives would wait for each other."""
    if config.cluster.runtime != "local":
        return
    for role in plan.roles:
        if role.name not in (*INDEPENDENT, *config.components) and len(role.processes) > 1:
            raise PlacementError(
                f"cluster.runtime is local, which holds one rank of each model, and {role.name} has"
                f" {len(role.processes)} ranks on {role.on}: set cluster.runtime to ray, or place {role.name} on one"
                " device"
            )


def check_host_memory(config: Config, plan: Plan, available: int | None = None) -> None:
    """Raise if the roles of a run on the CPUs of this machine need more memory than it has.

    Counted is what every such run holds at once, so a run that could work is never refused. available: bytes of host
    memory; None: as measured now.
    """
    import torch

    if is_cluster_there(config) or torch.cuda.is_available():
        return
    available = available_bytes() if available is None else available
    needs = host_needs(with_dtype(config, has_gpus=False), plan)
    needed = sum(needs.values())
    if not available or needed * GIB <= available:
        return
    listed = ", ".join(f"{role} {gib:.1f} GiB" for role, gib in needs.items() if gib >= 0.05)
    raise UserError(
        f"this run cannot start:\n  actor.model: weights, gradients and optimizer state take {needed:.1f} GiB of host"
        f" memory on CPUs ({listed}), and {available / GIB:.1f} GiB are available: choose a smaller model, set"
        " train.lora.rank, leave out roles, or run it on a machine with more memory or with GPUs"
    )


def _check_transport(config: Config, plan: Plan) -> None:
    """Raise if this machine's devices cannot use the configured weight transport. A remote cluster is checked later."""
    import torch

    from hotseat.loop.setup import settings

    if not is_cluster_there(config):
        settings.weight_transports(config, plan, torch.cuda.is_available())


def check_training(config: Config, algebra: BatchAlgebra) -> None:
    """Raise now for options that ranks would otherwise refuse only after engines have loaded their model."""
    import torch

    from hotseat.loop.setup import settings
    from hotseat.train import deepcompile, liger
    from hotseat.train.make import check_options

    assert algebra.schedule_length is not None
    checked = with_dtype(config, torch.cuda.is_available() or is_cluster_there(config))
    check_options(settings.train_options(checked, algebra.schedule_length))
    if has_critic(config):
        check_options(settings.critic_options(checked, algebra.schedule_length))
    if is_cluster_there(config):
        return  # other machines may have what this one lacks
    if config.train.liger_kernel:
        liger.check_device(torch.cuda.is_available())
    if backend_entry(config.train.backend).has_zero_options and config.train.deepspeed.deepcompile:
        deepcompile.check_device(torch.cuda.is_available())


def check_user_functions(config: Config) -> None:
    """Raise if the user's own loss, estimator or sampler fails on a toy batch."""
    from hotseat.loop.workers.user_functions import estimator_problem, is_own, policy_loss_problem, sampler_problem

    algorithm, problems = config.algorithm, []
    if is_own(algorithm.policy_loss):
        problem = policy_loss_problem(algorithm.policy_loss, eps_low=algorithm.clip_low, eps_high=algorithm.clip_high)
        problems.append(("algorithm.policy_loss", algorithm.policy_loss, problem))
    if is_own(algorithm.estimator):
        problem = estimator_problem(algorithm.estimator, config.rollout.samples_per_prompt)
        problems.append(("algorithm.estimator", algorithm.estimator, problem))
    if config.data.sampler is not None:
        problems.append(("data.sampler", config.data.sampler, sampler_problem(config.data.sampler)))
    wrong = [f"  {key}: {name} {problem}" for key, name, problem in problems if problem is not None]
    if wrong:
        raise UserError(
            "\n".join(["this run cannot start:", *wrong, "  docs/algorithms.md has what they get and return"])
        )


def check_components(config: Config, plan: Plan) -> None:
    """Raise if a component's class cannot be loaded, made with its arguments, or called."""
    from hotseat.loop.setup.settings import component_settings
    from hotseat.loop.workers.component import component_problem

    wrong = []
    for each in component_settings(config, plan):
        problem = component_problem(each, is_offloaded=is_offloaded(plan, each.name))
        if problem is not None:
            wrong.append(f"  components.{each.name}: {problem}")
    if wrong:
        raise UserError(
            "\n".join(["this run cannot start:", *wrong, "  docs/placement.md has what they get and return"])
        )


def local_inventory(config: Config) -> Inventory | None:
    """Return the devices to plan for before a cluster is connected: those of the config, or of this machine.

    None if an existing cluster will be used, whose devices are not known yet.
    """
    if config.cluster.inventory is not None:
        return Inventory.parse(config.cluster.inventory)
    if is_cluster_there(config):
        return None
    import torch

    if torch.cuda.is_available():
        return Inventory.parse(f"1x{torch.cuda.device_count()}")
    # Without accelerators devices are logical: one node with as many as the placement names.
    for num_devices in range(1, MAX_LOGICAL_DEVICES):
        try:
            inventory = Inventory.parse(f"1x{num_devices}")
            make_plan(config, inventory)
            return inventory
        except TooFewDevicesError:
            continue
    return Inventory.parse(f"1x{MAX_LOGICAL_DEVICES}")
