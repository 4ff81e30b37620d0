"""The supervised loop: SFT, reward models, and whatever else learns from a fixed set of examples.

`train_supervised` is the whole of it, for ranks on a cluster and for ranks that a launcher started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hotseat.cluster import WorkerGroup
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra
from hotseat.config.resolved import source_of
from hotseat.loop.inputs import SupervisedData, SupervisedInputs
from hotseat.loop.opening import ClusterContext, Exported, OpenRun, export_models
from hotseat.loop.settings.token_budgets import TokenBudgets
from hotseat.loop.settings.training_settings import batch_settings, reference_settings, train_options
from hotseat.loop.state.checkpoints import BACKEND, Checkpoint
from hotseat.loop.state.saving import CheckpointSource, Saver, for_ranks
from hotseat.loop.state.watchdog import Readiness
from hotseat.loop.supervised.supervised_worker import StepResult, SupervisedTask, SupervisedWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.observe import Journal
from hotseat.planning.budgets import smaller_budget_kept, uses
from hotseat.planning.config_plan import is_offloaded, num_data_parallel


@dataclass(frozen=True)
class SupervisedRun:
    """Objects that the loop drives.

    must_stop: whether a rank that a launcher started got a signal to stop. None: the ranks are a cluster's, which can
    also copy their state and write it while they continue.
    """

    num_steps: int
    eval_every: int | None
    data: SupervisedData
    ranks: WorkerGroup[SupervisedWorker]
    budgets: TokenBudgets
    must_stop: Callable[[], bool] | None = None

    def is_evaluated(self, step: int) -> bool:
        """Tell whether the model is evaluated after this step."""
        is_due = step == self.num_steps or (self.eval_every is not None and step % self.eval_every == 0)
        return is_due and bool(self.data.held_out)

    def checkpoint_source(self, evaluation: dict[str, float]) -> CheckpointSource:
        ranks = self.ranks

        def snapshot(path: Path) -> Callable[[], bool]:
            ranks.call(SupervisedWorker.snapshot, for_ranks(path / BACKEND))
            return lambda: all(ranks.call(SupervisedWorker.is_written))

        return CheckpointSource(
            num_bytes=lambda: sum(ranks.call(SupervisedWorker.saved_bytes)),
            write=lambda path: ranks.call(SupervisedWorker.save, for_ranks(path / BACKEND)),
            snapshot=snapshot if self.must_stop is None else None,
            num_ranks={BACKEND: ranks.size},
            export=lambda path: ranks.call(SupervisedWorker.export, for_ranks(path)),
            state=lambda: {
                **ranks.on(0).call(SupervisedWorker.state)[0],
                "evaluation": evaluation,
                "num_ranks": ranks.size,
            },
        )


def train_and_export(
    run: OpenRun,
    inputs: SupervisedInputs,
    ranks: WorkerGroup[SupervisedWorker],
    config: Config,
    is_tried: bool,
    led: Callable[[Callable[[], Any]], Any] = lambda do: do(),
    must_stop: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Train and export with ranks that have loaded their models, and return the last evaluation.

    is_tried: the token budget is tried out first. led: runs a function in one process, and returns its result in all
    that call this; a worker group has only one.
    """
    journal, saver, num_steps = run.journal, run.saver, inputs.algebra.num_steps or 0
    budgets = TokenBudgets(config, partial(journal.say, kind="warning"))

    def train() -> dict[str, float]:
        if run.checkpoint is not None:
            ranks.call(SupervisedWorker.resume, for_ranks(run.checkpoint.path / BACKEND), dict(run.checkpoint.state))
        if is_tried:
            length = config.data.max_length
            budgets.try_out("train", lambda n: all(ranks.call(SupervisedWorker.fits, n, length, True)), "tried out")
        if uses(config):
            ranks.call(SupervisedWorker.use_budget, batch_settings(budgets.config, budgets.config.train).max_tokens)
        saver.keep(budgets.config)
        supervised = SupervisedRun(num_steps, config.eval.every, inputs.data, ranks, budgets, must_stop)
        return train_supervised(supervised, journal, saver, run.checkpoint)

    def write(what: Exported, folder: str) -> None:
        ranks.call(SupervisedWorker.export, folder, what == "moving average")

    with saver.settled(journal), smaller_budget_kept(lambda: budgets.config, saver.keep):
        evaluation: dict[str, float] = led(train)
    with saver.exporting():
        made, exported = saver.last_made or num_steps, {"model": ranks, "moving average": ranks}
        led(lambda: export_models(run, exported, write, inputs.tokenizer, made))
    return evaluation


def train_supervised(
    run: SupervisedRun, journal: Journal, saver: Saver, checkpoint: Checkpoint | None
) -> dict[str, float]:
    """Train to the last step, from the beginning or from a checkpoint, and return the last evaluation."""
    if run.data.objective.needs_reference:
        journal.phase("reference")
        while (notes := run.ranks.call(SupervisedWorker.prepare)[0]) is None:
            pass
        for note in notes:
            journal.say(note)
    first_step, evaluation = 1, {}
    if checkpoint is not None:  # which the ranks have loaded
        first_step, evaluation = checkpoint.step + 1, dict(checkpoint.state["evaluation"])
    elif run.data.held_out:
        journal.phase("evaluate")
        evaluation = run.ranks.call(SupervisedWorker.evaluate)[0]
        journal.step(0, evaluation)
    for step in range(first_step, run.num_steps + 1):
        started_s = time.monotonic()
        journal.phase("update")
        results = run.ranks.call(SupervisedWorker.measured_step)
        for use, tokens in results[0].lowered.items():
            if run.budgets.lower(use, tokens, "the device ran out of memory, and the step was repeated"):
                saver.keep(run.budgets.config)
        metrics = step_metrics(run.data, results, time.monotonic() - started_s) | saver.metrics()
        if run.is_evaluated(step):
            journal.phase("evaluate")
            evaluation = run.ranks.call(SupervisedWorker.evaluate)[0]
            metrics |= evaluation
        journal.step(step, metrics)
        measured = evaluation if run.is_evaluated(step) else {}
        saver.after_step(step, run.checkpoint_source(evaluation), measured, journal, run.must_stop or (lambda: False))
        if saver.is_ending:
            break
    return evaluation


def step_metrics(data: SupervisedData, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
    """Return the metrics of an optimizer step that took `seconds`: a report is all ranks', memory the fullest."""
    report = results[0].report
    metrics = {
        "loss": report.loss,
        **data.objective.metrics(report),
        "grad_norm": report.grad_norm,
        "learning_rate": report.learning_rate,
        "skipped_updates": float(report.num_skipped),
        "tokens_per_s": report.num_tokens / seconds,
        "step_s": seconds,
    }
    fullest = max((result.held for result in results), key=lambda held: held.peak)
    if fullest.peak > 0:  # on a GPU
        metrics |= {"memory/update/actor": fullest.peak / 2**30, "memory/update/unused": fullest.unused / 2**30}
    if "aux_loss" in report.metrics:
        metrics["aux_loss"] = report.metrics["aux_loss"]
    return metrics


def columns(data: SupervisedData) -> dict[str, str]:
    """Return formats of the metrics to print at each step, by name."""
    return {
        "loss": "loss {:.4f}",
        "eval/loss": "held out {:.4f}",
        **data.objective.columns,
        "grad_norm": "gradient {:.2f}",
        "tokens_per_s": "{:,.0f} tokens/s",
        "step_s": "{:.2f} s",
    }


def worker_arguments(
    config: Config, algebra: BatchAlgebra, data: SupervisedData, is_reference_offloaded: bool = False
) -> tuple[Any, ...]:
    """Return the arguments of `SupervisedWorker`, except for those about its rank."""
    assert algebra.schedule_length is not None
    options = replace(
        train_options(config, algebra.schedule_length),
        head=data.objective.head,
        value_head_prefix=config.algorithm.reward_modelling.value_head_prefix,
    )
    task = SupervisedTask(
        data.objective,
        data.items,
        data.held_out,
        config.train.batch_size,
        batch_settings(config, config.train),
        config.seed,
        reference_settings(config, is_reference_offloaded),
    )
    return source_of(config, config.actor.model), options, task


def launch_ranks(
    context: ClusterContext, inputs: SupervisedInputs, journal: Journal, folder_proof: FolderProof | None = None
) -> WorkerGroup[SupervisedWorker]:
    """Start the ranks that train, on the devices of the plan. folder_proof: what they prove before they load."""
    config, processes = context.config, context.plan.role("actor").processes
    started_s = time.monotonic()
    actor = context.cluster.launch(
        "actor",
        SupervisedWorker,
        args=worker_arguments(config, inputs.algebra, inputs.data, is_offloaded(context.plan, "reference")),
        per_rank=[
            {
                "rank": rank // config.train.num_model_parallel,
                "num_ranks": num_data_parallel(config, context.plan),
                "folder_proof": folder_proof,
            }
            for rank in range(len(processes))
        ],
        processes=processes,
        num_threads=config.cluster.threads_per_process,
        timeout_s=config.cluster.call_timeout_s,
    )
    Readiness(journal.progress).watch(actor, started_s)
    return actor
