"""The supervised loop: SFT, reward models, and whatever else learns from a fixed set of examples.

`train_supervised` is the whole of it, for ranks on a cluster and for ranks that a launcher started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hotseat.cluster import WorkerGroup
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra, token_budget, tokens_per_micro_batch
from hotseat.config.resolved import source_of
from hotseat.loop.inputs import SupervisedData, SupervisedInputs
from hotseat.loop.opening import ClusterContext, Exported, ExportingRanks, OpenRun, export_models
from hotseat.loop.settings.training_settings import reference_settings, train_batches, train_options
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.state.saving import BACKEND, CheckpointSource, Saver, for_ranks
from hotseat.loop.state.watchdog import Readiness
from hotseat.loop.supervised.supervised_worker import StepResult, SupervisedTask, SupervisedWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.observe import Journal
from hotseat.planning.budgets import (
    Use,
    least_tokens,
    lowered_note,
    lowered_until,
    smaller_budget_kept,
    uses,
    with_budget,
)
from hotseat.planning.config_plan import is_offloaded


@dataclass(frozen=True)
class SupervisedRun:
    """Objects that the loop drives.

    is_told: tells whether a rank that a launcher started was told to stop. None: the ranks are a cluster's, which can
    also copy their state and write it while they continue.
    """

    num_steps: int
    eval_every: int | None
    data: SupervisedData
    ranks: WorkerGroup[SupervisedWorker]
    budget: TokenBudget
    is_told: Callable[[], bool] | None = None

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
            snapshot=snapshot if self.is_told is None else None,
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
    is_told: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Train and export with ranks that have loaded their models, and return the last evaluation.

    is_tried: the token budget is tried out first. led: runs a function in one process, and returns its result in all
    that call this; a worker group has only one.
    """
    journal, saver, num_steps = run.journal, run.saver, inputs.algebra.num_steps or 0
    budget = TokenBudget(config, journal, saver.keep)

    def train() -> dict[str, float]:
        if run.checkpoint is not None:
            ranks.call(SupervisedWorker.resume, for_ranks(run.checkpoint.path / BACKEND), dict(run.checkpoint.state))
        if is_tried:
            budget.try_out(lambda *trial: all(ranks.call(SupervisedWorker.fits, *trial)))
        if uses(config):
            ranks.call(SupervisedWorker.use_budget, budget.max_tokens)
        saver.keep(budget.config)
        supervised = SupervisedRun(num_steps, config.eval.every, inputs.data, ranks, budget, is_told)
        return train_supervised(supervised, journal, saver, run.checkpoint)

    def exporting(what: Exported) -> ExportingRanks:
        return ExportingRanks(
            on_first=lambda method, *args: ranks.on(0).call(method, *args)[0],
            write=lambda folder: ranks.call(SupervisedWorker.export, folder, what == "moving average"),
        )

    with saver.settled(journal), smaller_budget_kept(lambda: budget.config, saver.keep):
        evaluation: dict[str, float] = led(train)
    with saver.exporting():
        led(lambda: export_models(run, exporting, inputs.tokenizer, saver.last_made or num_steps))
    return evaluation


def train_supervised(
    run: SupervisedRun, journal: Journal, saver: Saver, checkpoint: Checkpoint | None
) -> dict[str, float]:
    """Train to the last step, from the beginning or from a checkpoint, and return the last evaluation."""
    prepare(run, journal)
    if checkpoint is None:
        first_step, evaluation = 1, first_evaluation(run, journal)
    else:  # which the ranks have loaded
        first_step, evaluation = checkpoint.step + 1, dict(checkpoint.state["evaluation"])
    for step in range(first_step, run.num_steps + 1):
        started_s = time.monotonic()
        journal.phase("update")
        results = run.ranks.call(SupervisedWorker.measured_step)
        run.budget.keep_lowered(results[0].lowered)
        metrics = step_metrics(run.data, results, time.monotonic() - started_s) | saver.metrics()
        if run.is_evaluated(step):
            journal.phase("evaluate")
            evaluation = run.ranks.call(SupervisedWorker.evaluate)[0]
            metrics |= evaluation
        journal.step(step, metrics)
        measured = evaluation if run.is_evaluated(step) else {}
        saver.after_step(step, run.checkpoint_source(evaluation), measured, journal, run.is_told or (lambda: False))
        if saver.is_ending:
            break
    return evaluation


def prepare(run: SupervisedRun, journal: Journal) -> None:
    """Have the reference, if there is one, score all that it scores before the first step."""
    if not run.data.objective.needs_reference:
        return
    journal.phase("reference")
    while not (preparation := run.ranks.call(SupervisedWorker.prepare)[0]).is_done:
        pass
    for note in preparation.notes:
        journal.say(note)


def first_evaluation(run: SupervisedRun, journal: Journal) -> dict[str, float]:
    """Evaluate the model that the run starts from."""
    if not run.data.held_out:
        return {}
    journal.phase("evaluate")
    evaluation = run.ranks.call(SupervisedWorker.evaluate)[0]
    journal.step(0, evaluation)
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
        train_batches(config),
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
                "num_ranks": inputs.algebra.num_ranks,
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


class TokenBudget:
    """Token budget of supervised training: tried out before the first step, and lowered when memory runs out."""

    def __init__(self, config: Config, journal: Journal, keep: Callable[[Config], object]):
        self.config = config
        self._journal = journal
        self._keep = keep

    @property
    def max_tokens(self) -> int:
        """Return the most tokens that a micro-batch may have."""
        budget = tokens_per_micro_batch(self.config, token_budget(self.config.train))
        assert budget is not None
        return budget

    def try_out(self, fits: Callable[[int, int, bool], bool]) -> None:
        """Halve the budget until a micro-batch of that size fits; for `fits`, see `BackendWorker`."""
        train, length = self.config.train, self.config.data.max_length

        def fit(tokens: int) -> bool:
            return fits(tokens * train.sequence_parallel_size, length, True)

        least = least_tokens(self.config)
        self._lower(lowered_until(fit, token_budget(train) or least, least), "tried out")

    def keep_lowered(self, lowered: Mapping[Use, int]) -> None:
        """Keep the budgets that ranks lowered in a step because memory ran out."""
        for tokens in lowered.values():
            self._lower(tokens, "the device ran out of memory, and the step was repeated")

    def _lower(self, tokens: int, why: str) -> None:
        before = token_budget(self.config.train)
        if before is None or tokens >= before:
            return
        self.config = with_budget(self.config, "train", tokens)
        self._journal.say(lowered_note(why, "train", tokens, before), kind="warning")
        self._keep(self.config)
