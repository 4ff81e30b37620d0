"""Opens a run: its directory, saver, checkpoint and journal, then its cluster and plan; and closes them in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotseat import clock, faults
from hotseat.config import Config, loads_saved
from hotseat.config.precision import idle_in_fp32, with_dtype, with_dtype_of
from hotseat.data import check_saved, digest_of
from hotseat.errors import CheckpointError, RunError, UserError
from hotseat.loop.planning.budgets import describe, uses, with_budgets_of
from hotseat.loop.planning.plan import are_devices_logical, budgets_on, plan_notes, plan_on
from hotseat.loop.preflight import Inputs, is_cluster_there
from hotseat.loop.setup.cpu import slow_dtype
from hotseat.loop.setup.trackers import renaming, trackers
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.state.run_dir import (
    NOTES,
    forget_records,
    kept_config,
    make_run_dir,
    record_changes,
    save_plan,
    write_config,
)
from hotseat.loop.state.saving import MODEL, Saver, sole_owner
from hotseat.observe import LiveView
from hotseat.placement import Plan

if TYPE_CHECKING:
    from hotseat.cluster import Cluster, Template
    from hotseat.observe import Journal

RESUME = "hotseat resume {run_dir}"  # the command that continues a run


@dataclass(frozen=True)
class OpenRun:
    """A run whose directory belongs to this process."""

    config: Config  # with the token budgets that the run kept, which may be smaller than the checkpoint's
    run_dir: Path
    saver: Saver
    checkpoint: Checkpoint | None  # to resume from
    journal: Journal
    evaluation: dict[str, float] | None  # the last one of a run that is finished already; None: there are steps to make

    @property
    def model_folder(self) -> Path:
        """Return the folder to which the trained model is exported."""
        return model_folder(self.config, self.run_dir)


@dataclass(frozen=True)
class OnCluster:
    """Cluster and plan of a run, and its config for these devices."""

    config: Config  # with dtype and token budgets for these devices
    cluster: Cluster
    plan: Plan
    has_new_budgets: bool  # token budgets were chosen now, not by an earlier part of the run


@contextmanager
def open_run(
    config: Config, inputs: Inputs, columns: Mapping[str, str], view: LiveView, command: str = RESUME
) -> Iterator[OpenRun]:
    """Open the run's directory for this process alone, find the checkpoint it resumes from, and begin its journal.

    columns: formats of the metrics to print at each step. command: how messages tell the user to resume.
    """
    with ExitStack() as stack:
        savers = stack.enter_context(stoppable())
        run_dir = make_run_dir(config)
        stack.enter_context(sole_owner(run_dir))
        kept = kept_config(run_dir) if config.checkpoint.resume else None
        if kept is not None and kept.task == config.task:
            config = with_budgets_of(config, kept)
        saver = Saver(config, run_dir, inputs.tokenizer)
        savers.append(saver)
        stack.enter_context(_advice(saver, command.format(run_dir=run_dir)))
        checkpoint = saver.find(stack, inputs.notes.append)
        _begin_records(config, run_dir, inputs.rows, saver, checkpoint)
        if checkpoint is not None and _is_finished(config, checkpoint, inputs.algebra.num_steps or 0, run_dir):
            from hotseat.observe import Silence

            evaluation = dict(checkpoint.state["evaluation"])
            yield OpenRun(config, run_dir, saver, checkpoint, Silence(), evaluation)
            return
        journal = stack.enter_context(_journal(config, run_dir, inputs, columns, view, checkpoint))
        stack.callback(_report, run_dir, journal)
        yield OpenRun(config, run_dir, saver, checkpoint, journal, None)


@contextmanager
def on_cluster(
    run: OpenRun, dry_plan: Plan, pinged: Sequence[str] = (), template: Template | None = None
) -> Iterator[OnCluster]:
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
        cluster = stack.enter_context(_cluster(Cluster, run.config, dry_plan, template))
        config, has_new_budgets = _for_devices(run, cluster)
        plan = plan_on(config, cluster)
        save_plan(run.run_dir, plan)
        silence_s = config.cluster.silence_timeout_s
        stack.enter_context(watch_processes(cluster, journal, run.run_dir, silence_s, pinged))
        stack.enter_context(notes_shown(run.run_dir / NOTES, lambda note: journal.say(note, kind="warning")))
        yield OnCluster(config, cluster, plan, has_new_budgets)


def record_plan(journal: Journal, place: OnCluster, notes: Sequence[str] = ()) -> None:
    """Record the placement of each role, and notes on the plan."""
    roles = ", ".join(f"{role.name} on {role.on}" for role in place.plan.roles)
    if place.config.task == "rl":
        journal.say(f"{place.plan.label}: {roles}")
    for note in [*notes, *plan_notes(place.config, place.cluster, place.plan)]:
        journal.say(note)


def _begin_records(
    config: Config, run_dir: Path, rows: Sequence[Any], saver: Saver, checkpoint: Checkpoint | None
) -> None:
    """Start the files of a new run, or record changed settings in a resumed one. Raises if its data changed."""
    if checkpoint is not None:
        check_saved(checkpoint.state["order"], len(rows), config.seed, digest_of(rows))
        record_changes(run_dir, checkpoint.step, saver.changes)
    else:
        if (run_dir / MODEL).exists():
            raise UserError(f"{run_dir} holds a run that was finished without checkpoints: choose another name")
        forget_records(run_dir)
    write_config(run_dir, config)


def _for_devices(run: OpenRun, cluster: Cluster) -> tuple[Config, bool]:
    """Return the config with dtype and token budgets, and whether the budgets are new, not from the checkpoint."""
    journal = run.journal
    config = with_known_dtype(run.config, run.checkpoint, not are_devices_logical(cluster), journal)
    if run.checkpoint is not None:
        config = with_budgets_of(config, loads_saved(str(run.checkpoint.state["config"])))
    chosen = budgets_on(config, cluster)
    if uses(config) and chosen.config == config:
        journal.say(f"micro-batches: {describe(config)} (as this run has chosen before)")
    for note in chosen.notes:
        journal.say(note)
    return chosen.config, bool(uses(config)) and chosen.config != config


def with_known_dtype(config: Config, checkpoint: Checkpoint | None, has_gpus: bool, journal: Journal) -> Config:
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


def export_models(run: OpenRun, export: Callable[..., object], tokenizer: Any) -> None:
    """Export the Hugging Face model with its tokenizer, and beside it the moving average if there is one.

    export: writes the model into a folder; with True, the moving average. tokenizer: None on ranks that write none.
    """
    path = run.model_folder
    run.journal.phase("export")
    # The model last: its presence shows that everything was exported.
    if run.config.train.ema.enabled:
        average = path.with_name(f"{path.name}_ema")
        export(average, True)
        if tokenizer is not None:
            tokenizer.save_pretrained(average)
        run.journal.say(f"moving average: {average}")
    export(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    run.journal.say(f"model: {path}")


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
        step = saver.last_step()
        if step is not None and not isinstance(error, CheckpointError):
            error.add_note(f"resume after step {step}: {command}")
        raise


def _is_finished(config: Config, checkpoint: Checkpoint, num_steps: int, run_dir: Path) -> bool:
    """Tell whether the checkpoint is of the last step and the model was exported; if so, print that."""
    if checkpoint.step > num_steps:
        raise UserError(
            f"{checkpoint.path} is of step {checkpoint.step}, and this run would end after {num_steps}: set"
            f" {'train.num_episodes' if config.task == 'rl' else 'train.max_epochs'} higher, or use the model of that"
            " checkpoint"
        )
    model = model_folder(config, run_dir)
    exported = model / "config.json"
    # `export_path` may hold the model of an earlier run.
    is_ours = exported.is_file() and exported.stat().st_mtime >= checkpoint.path.stat().st_mtime
    if checkpoint.step != num_steps or not is_ours:
        return False
    print(f"nothing to do: all {checkpoint.step} steps are done, the model is {model}")
    return True


def _cluster(make: type[Cluster], config: Config, dry: Plan, template: Template | None) -> Cluster:
    """Make a cluster with room for the plan: an existing one, or our own with a logical device per planned device."""
    num_devices: int | None = 1 + max((device for role in dry.roles for device in role.devices), default=0)
    if is_cluster_there(config):
        num_devices = None  # an existing cluster has devices of its own
    timeout_s = config.cluster.call_timeout_s
    return make(config.cluster.runtime, num_devices=num_devices, timeout_s=timeout_s, template=template)


def _journal(
    config: Config,
    run_dir: Path,
    inputs: Inputs,
    columns: Mapping[str, str],
    view: LiveView,
    checkpoint: Checkpoint | None,
) -> Journal:
    """Make the journal of a run, and record in it the notes of its inputs."""
    from hotseat.observe import Journal

    num_steps = inputs.algebra.num_steps or 0
    view.expect(num_steps, columns)
    journal = Journal(
        run_dir,
        view,
        num_steps=num_steps,
        log_every=config.log.every,
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
    """Describe the stage in which a cluster is started or connected to."""
    if config.cluster.runtime == "local":
        return "preparing to run in this process"
    return f"attaching to Ray at {os.environ['RAY_ADDRESS']}" if os.environ.get("RAY_ADDRESS") else "starting Ray"


@contextmanager
def stoppable() -> Iterator[list[Saver]]:
    """Make SIGTERM end a run as Ctrl-C does, with the clean-up of everything that was started.

    With a saver in the list that this yields, the first SIGTERM lets the current step finish and be saved.
    """
    savers: list[Saver] = []
    if threading.current_thread() is not threading.main_thread():
        yield savers
        return

    def stop(number: int, frame: object) -> None:
        waiting = [saver for saver in savers if saver.can_save and saver.has_begun and not saver.is_stopping]
        if not waiting:
            raise KeyboardInterrupt
        for saver in waiting:
            saver.is_stopping = True
        # Straight to the file descriptor: the interrupted code may hold the locks of every other way to print.
        os.write(2, b"hotseat: SIGTERM: this step is finished and saved, then the run ends; a second one ends it now\n")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield savers
    finally:
        signal.signal(signal.SIGTERM, before)
