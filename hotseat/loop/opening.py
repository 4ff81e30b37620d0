"""Opens a run: its directory, saver, checkpoint and journal, then its cluster and plan; and closes them in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

from hotseat import clock, faults, interrupts
from hotseat.checks.cpu import slow_dtype
from hotseat.checks.nodes import NodesContext
from hotseat.checks.pipeline import NODES, PLACEMENT
from hotseat.checks.plans import is_cluster_there
from hotseat.checks.stage import PlanContext, run_checks
from hotseat.config import Config, loads_saved
from hotseat.config.batches import batch_algebra
from hotseat.config.precision import idle_in_fp32, with_dtype, with_dtype_of
from hotseat.data import check_saved, digest_of
from hotseat.errors import CheckpointError, HotseatError, RunError, UserError
from hotseat.loop.state.checkpoints import MODEL, Checkpoint, critic_folder, digest_of_checkpoint
from hotseat.loop.state.run_dir import (
    NOTES,
    forget_records,
    kept_config,
    make_run_dir,
    named_run,
    record_changes,
    save_plan,
    sole_owner,
    without_empty_folders,
    write_config,
)
from hotseat.loop.state.saving import Saver, for_ranks
from hotseat.loop.state.watched import devices_of, watched
from hotseat.loop.workers.exports import Origin, is_exported, run_of
from hotseat.loop.workers.folder_proof import FolderProof, witness
from hotseat.observe import LiveView
from hotseat.observe.tracker_sink import renaming, trackers
from hotseat.placement import Inventory, Plan
from hotseat.planning import config_plan
from hotseat.planning.budgets import ChosenBudgets, describe, uses, with_budgets_of
from hotseat.planning.slots import is_chosen_by_run
from hotseat.processes import kept_driver

if TYPE_CHECKING:
    from hotseat.cluster import Cluster, Template, WorkerGroup
    from hotseat.loop.inputs import Inputs
    from hotseat.loop.steering import Steering
    from hotseat.observe import Journal, Monitor

RESUME = "hotseat resume {run_dir}"  # the command that continues a run
PUSH = "hotseat push {run_dir}"  # the command that pushes its model again
Exported = Literal["critic", "moving average", "model"]


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory belongs to this process."""

    config: Config  # with the token budgets that the run kept, which may be smaller than the checkpoint's
    run_dir: Path
    saver: Saver
    checkpoint: Checkpoint | None  # to resume from
    journal: Journal
    evaluation: dict[str, float] | None  # the last one of a run that is finished already; None: there are steps to make
    monitor: Monitor | None = None  # of a run that has steps to make, in its driver


@dataclass(frozen=True)
class ClusterContext:
    """Cluster and plan of a run, and its config for these devices."""

    config: Config  # with dtype and token budgets for these devices
    cluster: Cluster
    plan: Plan
    has_new_budgets: bool  # token budgets were chosen now, not by an earlier part of the run


@contextmanager
def open_run(
    config: Config,
    inputs: Inputs,
    columns: Mapping[str, str],
    view: LiveView,
    command: str = RESUME,
    steering: Steering | None = None,
) -> Iterator[OpenRun]:
    """Open the run's directory for this process alone, find the checkpoint it resumes from, and begin its journal.

    columns: formats of the metrics to print at each step. command: how messages tell the user to resume. steering: of
    a script, if one started the run.
    """
    with ExitStack() as stack:
        savers = stack.enter_context(stoppable())
        config = named_run(config)
        planned = Path(config.run_dir) / str(config.name)
        checkpoints = Path(config.checkpoint.folder or planned / "checkpoints")
        stack.enter_context(without_empty_folders(checkpoints, planned, planned.parent))
        run_dir = make_run_dir(config)
        stack.enter_context(sole_owner(run_dir))
        kept = kept_config(run_dir) if config.checkpoint.resume else None
        if kept is not None and kept.task == config.task:
            config = with_budgets_of(config, kept)
        saver = Saver(config, run_dir, inputs.tokenizer, num_steps=inputs.algebra.num_steps)
        savers.append(saver)
        advice = (steering and steering.command()) or command.format(run_dir=run_dir)
        interrupts.current().describe = lambda: saver.ending(advice)
        stack.enter_context(_advice(saver, advice))
        checkpoint = saver.find(stack, inputs.notes.append, lambda text: view.stage(text))
        _begin_records(config, run_dir, inputs.rows, saver, checkpoint)
        kept_driver.tell(
            run=str(run_dir), max_restarts=config.run.max_restarts, allowed=list(config.checkpoint.allow_changes)
        )
        if checkpoint is not None and _is_finished(config, checkpoint, inputs.algebra.num_steps or 0, run_dir):
            from hotseat.observe import NullJournal

            evaluation = dict(checkpoint.state["evaluation"])
            with saver.uploading(lambda text, kind="note": print(text), print):
                saver.finish(print)
            yield OpenRun(config, run_dir, saver, checkpoint, NullJournal(), evaluation)
            return
        journal = stack.enter_context(_journal(config, run_dir, inputs, columns, view, checkpoint))
        _record_restarts(journal, is_new=checkpoint is None)
        stack.callback(_report, run_dir, journal)
        monitor = stack.enter_context(watched(config, run_dir, journal))
        journal.run_progress.uploads = saver.upload_facts
        stack.enter_context(saver.uploading(journal.say, journal.stage))
        if steering is not None:
            journal.stepped = steering.stepped
            steering.begin(run_dir, saver, journal.say)
        yield OpenRun(config, run_dir, saver, checkpoint, journal, None, monitor)


@contextmanager
def cluster_context(
    run: OpenRun, dry_plan: Plan, pinged: Sequence[str] = (), template: Template | None = None
) -> Iterator[ClusterContext]:
    """Start or attach to a cluster, choose what depends on its devices, plan, and watch over the run's processes.

    dry_plan: the plan that was made without a cluster. pinged: roles that answer pings while they work.
    template: a process from which those of the run are forked.
    """
    from hotseat.cluster import Cluster
    from hotseat.loop.state.watchdog import watch_processes
    from hotseat.loop.workers.notes import notes_shown

    journal = run.journal
    journal.stage(_starting(run.config))
    with ExitStack() as stack:
        devices = [device for role in dry_plan.roles for device in role.devices]
        section, is_there = run.config.cluster, is_cluster_there(run.config)
        num_devices = None if is_there else 1 + max(devices, default=0)  # an existing cluster has devices of its own
        cluster = stack.enter_context(
            Cluster(
                section.runtime,
                num_devices=num_devices,
                timeout_s=section.call_timeout_s,
                template=template,
                has_dashboard=section.ray_dashboard,
            )
        )
        if cluster.dashboard_url is not None:
            journal.say(f"Ray's dashboard: {cluster.dashboard_url}, with the token in RAY_AUTH_TOKEN")
        stack.callback(faults.reach, "closing")
        interrupts.current().check()
        has_gpus = not config_plan.are_devices_logical(cluster)
        inventory = config_plan.inventory_of(cluster) if has_gpus else None
        config, has_new_budgets = for_devices(
            run, has_gpus, lambda config: config_plan.budgets_on(config, cluster), inventory
        )
        plan = config_plan.plan_on(config, cluster)
        check_plan(config, plan)
        save_plan(run.run_dir, plan)
        _check_nodes(config, cluster, plan, journal)
        if run.monitor is not None:
            run.monitor.watch_devices(devices_of(cluster, plan))
        silence_s = config.cluster.silence_timeout_s
        stack.enter_context(watch_processes(cluster, journal, run.run_dir, silence_s, pinged))
        stack.enter_context(notes_shown(run.run_dir / NOTES, lambda note: journal.say(note, kind="warning")))
        yield ClusterContext(config, cluster, plan, has_new_budgets)


def check_plan(config: Config, plan: Plan) -> None:
    """Raise if batches do not divide over the ranks of the plan for the cluster, or roles do not go together there."""
    batch_algebra(config, config_plan.num_data_parallel(config, plan))
    run_checks(PlanContext(config=config, plan=plan), PLACEMENT)


def _check_nodes(config: Config, cluster: Cluster, plan: Plan, journal: Journal) -> None:
    """Raise if a node of the plan lacks what its processes need, before any of them starts."""
    context = NodesContext(config=config, plan=plan, nodes=cluster.nodes, home=cluster.home, ask=cluster.facts)
    run_checks(context, NODES)
    for note in context.notes:
        journal.say(note, kind="warning")


def record_plan(journal: Journal, context: ClusterContext, notes: Sequence[str] = ()) -> None:
    """Record the placement of each role, and notes on the plan."""
    roles = ", ".join(f"{role.name} on {role.on}" for role in context.plan.roles)
    if context.config.has_rollouts:
        journal.say(f"{context.plan.label}: {roles}")
    for note in [*notes, *config_plan.plan_notes(context.config, context.cluster, context.plan)]:
        journal.say(note)


def _begin_records(
    config: Config, run_dir: Path, rows: Sequence[Any], saver: Saver, checkpoint: Checkpoint | None
) -> None:
    """Start the files of a new run, or record changed settings in a resumed one. Raises if its data changed."""
    if checkpoint is not None:
        check_saved(checkpoint.state["order"], len(rows), config.seed, digest_of(rows))
        record_changes(run_dir, checkpoint.step, saver.changes)
    else:
        was_exported = config.checkpoint.resume and run_of(model_folder(config, run_dir)) == run_dir.name
        if (run_dir / MODEL).exists() or (was_exported and kept_config(run_dir) is not None):
            raise UserError(f"{run_dir} holds a run that was finished without checkpoints: choose another name")
        forget_records(run_dir)
    write_config(run_dir, config)


def for_devices(
    run: OpenRun, has_gpus: bool, choose: Callable[[Config], ChosenBudgets], inventory: Inventory | None = None
) -> tuple[Config, bool]:
    """Return the config with dtype and token budgets, and whether the budgets are new, not from the checkpoint.

    choose: chooses token budgets for these devices. inventory: GPUs, by which the number of engines and of their slots
    is chosen where it is unset; None: there are none.
    """
    journal = run.journal
    config = _with_known_dtype(run.config, run.checkpoint, has_gpus, journal)
    if run.checkpoint is not None:
        config = with_budgets_of(config, loads_saved(str(run.checkpoint.state["config"])))
    if inventory is not None:
        unset, config = config, config_plan.with_engines_on(config, inventory)
        if unset.rollout.num_engines != config.rollout.num_engines:
            journal.say(f"rollout.num_engines: {config.rollout.num_engines}, several on each device (it is unset)")
        if is_chosen_by_run(unset):
            slots = config.rollout.num_slots
            journal.say(f"rollout.num_slots: {slots} sequences at a time for each engine (it is unset)")
    chosen = choose(config)
    if uses(config) and chosen.config == config:
        journal.say(f"micro-batches: {describe(config)} (as this run has chosen before)")
    for note in chosen.notes:
        journal.say(note)
    return chosen.config, bool(uses(config)) and chosen.config != config


def _with_known_dtype(config: Config, checkpoint: Checkpoint | None, has_gpus: bool, journal: Journal) -> Config:
    """Return the config with its dtype: as it is set, else as in the checkpoint, else by the devices."""
    chosen = config if checkpoint is None else with_dtype_of(config, loads_saved(str(checkpoint.state["config"])))
    chosen = with_dtype(chosen, has_gpus)
    if config.train.dtype is None:
        where = "as in the checkpoint" if checkpoint is not None else f"for {'GPUs' if has_gpus else 'CPUs'}"
        journal.say(f"train.dtype: {chosen.train.dtype}, {where} (it is unset)")
        if chosen.train.dtype == "fp32":
            for key in idle_in_fp32(config):
                journal.say(f"{key}: no effect here: train.dtype is fp32")
    warning = None if has_gpus else slow_dtype(chosen)
    if warning is not None:
        journal.say(warning, kind="warning")
    return chosen


def are_budgets_tried(has_gpus: bool) -> bool:
    """Tell whether budgets are tried out before the first step: on GPUs, and where a test simulates full memory."""
    return has_gpus or faults.is_armed("trial.forward")


def model_folder(config: Config, run_dir: Path) -> Path:
    """Return the folder to which the trained model is exported."""
    return Path(config.checkpoint.export_path) if config.checkpoint.export_path else run_dir / MODEL


def export_folders(config: Config, run_dir: Path) -> dict[Exported, Path]:
    """Return the models that a run exports at its end, and the folder of each."""
    model = model_folder(config, run_dir)
    folders: dict[Exported, Path] = {}
    if config.checkpoint.export_critic:
        folders["critic"] = critic_folder(model)
    if config.train.ema.enabled:
        folders["moving average"] = model.with_name(f"{model.name}_ema")
    return folders | {"model": model}


def export_models(
    run: OpenRun,
    ranks: Mapping[str, WorkerGroup[Any] | None],
    write: Callable[[Exported, str], object],
    tokenizer: Any,
    num_steps: int,
) -> None:
    """Export every model that is not exported yet, each with the tokenizer, and conclude the run's checkpoints.

    ranks: worker groups by the model that they hold. Their first rank writes it, perhaps on another node than this.
    write: has all ranks of a model write it into a folder. num_steps: the steps that the run has made.
    """
    from hotseat.loop.workers.model_workers import BackendWorker

    run.journal.phase("export")
    faults.reach("export")
    origin = Origin(run.run_dir.name, num_steps, run.saver.digest(num_steps))
    for what, folder in export_folders(run.config, run.run_dir).items():
        if run.checkpoint is not None and origin.checkpoint is not None and is_exported(folder, origin):
            continue  # before the run was ended, in another export
        group = ranks[what]
        assert group is not None
        first, writing, is_written = group.on(0), None, False
        try:
            [writing] = first.call(BackendWorker.begin_export, for_ranks(folder))
            write(what, writing)
            is_written = True
            first.call(BackendWorker.finish_export, writing, for_ranks(folder), _files_of(tokenizer), origin)
        except Exception as error:
            if is_written and origin.checkpoint is None:
                hint = f"its weights are in {writing}"  # nowhere else
            else:
                if writing is not None:
                    with suppress(Exception):  # the error of the export counts
                        first.call(BackendWorker.drop_export, writing)
                hint = "once the cause is removed, a resumed run exports it"
                if origin.checkpoint is None:
                    hint = "there is no checkpoint of the last step to export it from"
            raise RunError(f"the {what} could not be exported to {folder}: {error}; {hint}") from error
        is_here = is_exported(folder, origin)
        run.journal.say(f"{what}: {folder}{'' if is_here else ' on the node of the first rank'}")
    run.saver.finish(run.journal.say)


def push_model(run: OpenRun) -> None:
    """Push the exported model to the hub, if the run is to. If that fails, print why: the run itself did not fail."""
    from hotseat.loop.state.hub_push import push

    checkpoint, folder = run.config.checkpoint, model_folder(run.config, run.run_dir)
    if checkpoint.push_to_hub is None:
        return
    run.journal.phase("push")
    try:
        url = push(run.run_dir, folder, checkpoint.push_to_hub, checkpoint.push_private)
    except HotseatError as error:
        again = PUSH.format(run_dir=run.run_dir)
        text = f"the model is in {folder}, but not in {checkpoint.push_to_hub}: {error}; push it again with: {again}"
        run.journal.say(text, kind="warning")
    else:
        run.journal.say(f"pushed to {url}")


def _files_of(tokenizer: Any) -> dict[str, bytes]:
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        paths = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def folder_witness(config: Config, run_dir: Path, is_local: bool) -> AbstractContextManager[FolderProof | None]:
    """Answer ranks that prove that they see the folder of checkpoints; None: they need not.

    is_local: all ranks are in this process.
    """
    if is_local or not config.checkpoint.is_used:
        return nullcontext()
    return witness(Path(config.checkpoint.folder) if config.checkpoint.folder else run_dir)


# --- the parts of opening ---------------------------------------------------------------------------------------------


@contextmanager
def _advice(saver: Saver, command: str) -> Iterator[None]:
    """Add a note to the error that ends a run: how to resume it; to an interrupt also what is lost."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        interrupt.add_note(saver.ending(command))
        raise
    except RunError as error:
        step = saver.resumable_step()
        if step is not None and not isinstance(error, CheckpointError):
            error.add_note(f"resume after step {step}: {command}")
        raise


def _is_finished(config: Config, checkpoint: Checkpoint, num_steps: int, run_dir: Path) -> bool:
    """Tell whether the checkpoint is of the last step and the model was exported; if so, print that."""
    if checkpoint.step > num_steps:
        raise UserError(
            f"{checkpoint.path} is of step {checkpoint.step}, and this run would end after {num_steps}: set"
            f" {'train.num_episodes' if config.has_rollouts else 'train.max_epochs'} higher, or use the model of that"
            " checkpoint"
        )
    origin = Origin(run_dir.name, num_steps, digest_of_checkpoint(checkpoint.path))
    folders = export_folders(config, run_dir)
    if checkpoint.step != num_steps or not all(is_exported(folder, origin) for folder in folders.values()):
        return False
    print(f"nothing to do: all {checkpoint.step} steps are done, the model is {folders['model']}")
    return True


def _journal(
    config: Config,
    run_dir: Path,
    inputs: Inputs,
    columns: Mapping[str, str],
    view: LiveView,
    checkpoint: Checkpoint | None,
) -> Journal:
    from hotseat.observe import Journal, QuietLimits

    num_steps = inputs.algebra.num_steps or 0
    view.expect(num_steps, columns)
    journal = Journal(
        run_dir,
        view,
        num_steps=num_steps,
        log_every=config.log.every,
        limits=QuietLimits(config.cluster.silence_timeout_s, config.cluster.call_timeout_s),
        tensorboard=Path(config.log.tensorboard_path) if config.log.tensorboard_path else None,
        last_step=None if checkpoint is None else checkpoint.step,
        started_s=clock.began_s(),
        for_trackers=renaming(config),
    )
    for sink in trackers(config, run_dir, journal.say, is_resumed=checkpoint is not None):
        journal.add(sink)
    for note in inputs.notes:
        journal.say(note, kind="warning" if note.startswith("warning:") else "note")
    if config.eval.is_switched_off:
        journal.say("nothing is evaluated: eval.path is null, so the other keys of eval have no effect")
    return journal


def _record_restarts(journal: Journal, is_new: bool) -> None:
    """Record why the driver was started again, which was printed then. is_new: the files of the run begin anew."""
    for restart in kept_driver.restarts if is_new else kept_driver.restarts[-1:]:
        journal.record(restart.text, "restart")


def _report(run_dir: Path, journal: Any) -> None:
    """Write the report, however the run ended. If that fails, print why: the run itself did not fail."""
    from hotseat.observe.report import write_report

    try:
        journal.end_phase()
        journal.timeline.flush()
        journal.say(f"report: {write_report([run_dir], run_dir / 'report.html')}")
    except Exception as error:
        # To the screen, not to a file: the disk may be full.
        print(f"the report could not be written: {type(error).__name__}: {error}", file=sys.stderr)


def _starting(config: Config) -> str:
    if config.cluster.is_in_process:
        return "preparing to run in this process"
    return f"attaching to Ray at {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else "starting Ray"


@contextmanager
def stoppable() -> Iterator[list[Saver]]:
    """Hear Ctrl-C and SIGTERM. With a saver in the list that this yields, the first one lets the run save its work."""
    savers: list[Saver] = []

    def finish() -> str | None:
        return next(filter(None, [saver.stop_when_finished() for saver in savers]), None)

    with interrupts.handled() as handler, handler.finishing(finish):
        yield savers
