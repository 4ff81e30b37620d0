"""Second part of a run, after heavy imports: reads inputs, starts processes, and runs the loop of the task."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat import clock, faults
from hotseat.checks.model_configs import eos_token_ids
from hotseat.checks.pipeline import check_prerequisites
from hotseat.cluster import Template
from hotseat.config import Config
from hotseat.config.presence import has_evaluation
from hotseat.config.resolved import resolved_notes
from hotseat.loop import opening
from hotseat.loop.inputs import rl_inputs, supervised_inputs
from hotseat.loop.start import make_view, without_collector
from hotseat.loop.state.run_dir import remove_unneeded_images
from hotseat.observe import LiveView
from hotseat.placement import Plan
from hotseat.planning.budgets import smaller_budget_kept
from hotseat.registry.engines import engine_entry
from hotseat.registry.roles import ROLES

if TYPE_CHECKING:
    from hotseat.loop.rl.stream import Recording
    from hotseat.loop.steering import Steering


def start(
    config: Config,
    launched: bool = False,
    view: LiveView | None = None,
    notes: Sequence[str] = (),
    template: Template | None = None,
    recording: Recording | None = None,
    steering: Steering | None = None,
) -> dict[str, float]:
    """Run a config to its end, and return the last evaluation.

    launched: this process is one rank of several that a launcher started. view: the live view, if it is open already.
    notes: earlier findings, to record in the run. template: process that has loaded libraries, from which workers are
    forked. recording: groups of the run that is replayed, which has engines only if it evaluates; None: groups are
    sampled. steering: of a script.
    """
    with clock.of_one_run(), view or make_view(config, launched) as view:
        check_prerequisites(config)
        _quieten_transformers()
        view.stage("reading tokenizer and data")
        faults.reach("inputs")
        if config.has_rollouts:
            return _start_rl(config, view, notes, template, recording, steering)
        if launched:
            from hotseat.loop.supervised.launched import run_launched

            return run_launched(config, view)
        return _start_supervised(config, view, template, steering)


def _start_rl(
    config: Config,
    view: LiveView,
    notes: Sequence[str],
    template: Template | None,
    recording: Recording | None,
    steering: Steering | None,
) -> dict[str, float]:
    with without_collector():
        inputs = rl_inputs(config)
        inputs.notes.extend(notes)
        from hotseat.loop.rl.assemble import assemble, columns
        from hotseat.loop.rl.auto_placement import record_prediction
        from hotseat.loop.rl.launch import launch_groups
        from hotseat.loop.rl.loop import train_rl
        from hotseat.loop.state.watchdog import doing_in

    with opening.open_run(config, inputs, columns(config), view, steering=steering) as run:
        if run.evaluation is not None:
            _remove_images(run)
            return run.evaluation
        journal, saver = run.journal, run.saver
        has_engines = recording is None or has_evaluation(config)
        pinged = [role.name for role in ROLES.values() if role.answers_pings and has_engines]
        with opening.cluster_context(run, inputs.plan, pinged, template) as context:
            opening.record_plan(journal, context, resolved_notes(context.config))
            record_prediction(context.config, context.plan, run.run_dir, journal.say)
            journal.stage(_loading(context.config, context.plan), lambda: doing_in(context.cluster))
            eos = eos_token_ids(context.config, inputs.tokenizer)
            groups = launch_groups(context, inputs.algebra, eos, run.run_dir, journal, recording)
            with assemble(context, inputs, groups, run.run_dir, journal, recording) as rl_run:
                with saver.settled(journal), smaller_budget_kept(lambda: rl_run.micro_batches.config, saver.keep):
                    if context.has_new_budgets and opening.are_budgets_tried(groups.have_gpus):
                        journal.phase("update")
                        rl_run.micro_batches.try_out(saver.keep)
                    saver.keep(rl_run.micro_batches.config)
                    evaluation = train_rl(rl_run, journal, saver, run.checkpoint)
                num_made = saver.last_made or rl_run.num_steps
                if recording is None and not saver.is_ending:
                    rl_run.samples.record_left_over(
                        num_made, config.train.num_episodes, config.rollout.samples_per_prompt
                    )
                with saver.exporting():
                    ranks = {"critic": groups.critic, "model": groups.actor, "moving average": groups.actor}
                    opening.export_models(run, ranks, rl_run.checkpoints.export, inputs.tokenizer, num_made)
        _remove_images(run)
        opening.push_model(run)
    return evaluation


def _remove_images(run: opening.OpenRun) -> None:
    """Delete images that nothing needs after the run, which is complete without that, too."""
    try:
        remove_unneeded_images(run.run_dir, run.saver.folder)
    except OSError as error:
        run.journal.say(f"images of episodes that nothing needs any more are left: {error}", kind="warning")


def _start_supervised(
    config: Config, view: LiveView, template: Template | None, steering: Steering | None
) -> dict[str, float]:
    inputs = supervised_inputs(config)
    assert inputs.plan is not None
    from hotseat.loop.state.watchdog import doing_in
    from hotseat.loop.supervised.supervised_loop import columns, launch_ranks, train_and_export
    from hotseat.loop.supervised.supervised_worker import SupervisedWorker

    with opening.open_run(config, inputs, columns(inputs.data), view, steering=steering) as run:
        if run.evaluation is not None:
            return run.evaluation
        journal = run.journal
        with opening.cluster_context(run, inputs.plan, template=template) as context:
            opening.record_plan(journal, context)
            journal.stage(_loading(context.config, context.plan), lambda: doing_in(context.cluster))
            with opening.folder_witness(context.config, run.run_dir, context.cluster.is_in_process) as proof:
                actor = launch_ranks(context, inputs, journal, proof)
            is_tried = opening.are_budgets_tried(actor.call(SupervisedWorker.device_type)[0] == "cuda")
            evaluation = train_and_export(run, inputs, actor, context.config, context.has_new_budgets and is_tried)
        opening.push_model(run)
    return evaluation


def _loading(config: Config, plan: Plan) -> str:
    counts = {role.name: len(role.processes) for role in plan.roles}
    named = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())
    entry = engine_entry(config.rollout.engine)
    engine = f", {entry.title} compiles" if config.has_rollouts and entry.compiles else ""
    return f"starting processes, which load {Path(config.actor.model or '').name}{engine}: {named}"


def _quieten_transformers() -> None:
    """Hide progress bars for reading and writing local files between the lines of a run. Downloads show theirs."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.disable_progress_bar()  # the hub's too
    if not os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS"):
        enable_progress_bars()
