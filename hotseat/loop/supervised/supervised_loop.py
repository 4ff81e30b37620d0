"""The supervised loop: SFT, reward models, and whatever else learns from a fixed set of examples.

`train_supervised` is the whole of it, for ranks on a cluster and for ranks that a launcher started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from hotseat.cluster import WorkerGroup
from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra, token_budget, tokens_per_micro_batch
from hotseat.loop.inputs import SupervisedData, SupervisedInputs
from hotseat.loop.opening import ClusterContext, Exported, ExportingRanks
from hotseat.loop.settings.training_settings import reference_settings, train_batches, train_options
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.state.saving import BACKEND, CheckpointSource, Saver, for_ranks
from hotseat.loop.state.watchdog import Readiness
from hotseat.loop.supervised.led_ranks import LedSaver
from hotseat.loop.supervised.supervised_worker import StepResult, SupervisedTask, SupervisedWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.observe import Journal
from hotseat.planning.budgets import Use, least_tokens, lowered_note, lowered_until, with_budget
from hotseat.planning.config_plan import is_offloaded

P = ParamSpec("P")
R = TypeVar("R")


class CallsRanks(Protocol):
    """Calls a method of all ranks, and returns the results of those that this process knows."""

    def __call__(
        self, method: Callable[Concatenate[SupervisedWorker, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...


@dataclass(frozen=True)
class TrainingRanks:
    """Ranks that train: a worker group that this process drives, or ranks that a launcher started.

    each: for calls that every launched rank makes by itself. call: for calls that the first rank makes for all.
    on_first: calls the first rank alone, from its process or the driver's. has_snapshots: a checkpoint can be written
    while the ranks continue.
    """

    each: CallsRanks
    call: CallsRanks
    on_first: CallsRanks
    num_ranks: int
    has_snapshots: bool = False

    @classmethod
    def of_group(cls, actor: WorkerGroup[SupervisedWorker]) -> TrainingRanks:
        return cls(actor.call, actor.call, actor.on(0).call, actor.size, has_snapshots=True)

    def resume(self, checkpoint: Checkpoint) -> None:
        self.call(SupervisedWorker.resume, for_ranks(checkpoint.path / BACKEND), dict(checkpoint.state))

    def evaluate(self) -> dict[str, float]:
        return self.each(SupervisedWorker.evaluate)[0]

    def checkpoint_source(self, evaluation: dict[str, float]) -> CheckpointSource:
        def snapshot(path: Path) -> Callable[[], bool]:
            self.call(SupervisedWorker.snapshot, for_ranks(path / BACKEND))
            return lambda: all(self.call(SupervisedWorker.is_written))

        def state() -> dict[str, Any]:
            return {**self.on_first(SupervisedWorker.state)[0], "evaluation": evaluation, "num_ranks": self.num_ranks}

        return CheckpointSource(
            num_bytes=lambda: sum(self.call(SupervisedWorker.saved_bytes)),
            write=lambda path: self.call(SupervisedWorker.save, for_ranks(path / BACKEND)),
            snapshot=snapshot if self.has_snapshots else None,
            num_ranks={BACKEND: self.num_ranks},
            export=lambda path: self.call(SupervisedWorker.export, for_ranks(path)),
            state=state,
        )

    def exporting(self, what: Exported) -> ExportingRanks:
        return ExportingRanks(
            on_first=lambda method, *args: self.on_first(method, *args)[0],
            write=lambda folder: self.call(SupervisedWorker.export, folder, what == "moving average"),
        )


@dataclass(frozen=True)
class SupervisedRun:
    """Objects that the loop drives."""

    num_steps: int
    eval_every: int | None
    data: SupervisedData
    ranks: TrainingRanks
    budget: TokenBudget

    def is_evaluated(self, step: int) -> bool:
        """Tell whether the model is evaluated after this step."""
        is_due = step == self.num_steps or (self.eval_every is not None and step % self.eval_every == 0)
        return is_due and bool(self.data.held_out)


def train_supervised(
    run: SupervisedRun, journal: Journal, saver: Saver | LedSaver, checkpoint: Checkpoint | None
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
        results = run.ranks.each(SupervisedWorker.measured_step)
        run.budget.keep_lowered(results[0].lowered)
        metrics = step_metrics(run.data, results, time.monotonic() - started_s) | saver.metrics()
        if run.is_evaluated(step):
            journal.phase("evaluate")
            evaluation = run.ranks.evaluate()
            metrics |= evaluation
        journal.step(step, metrics)
        saver.after_step(
            step, run.ranks.checkpoint_source(evaluation), evaluation if run.is_evaluated(step) else {}, journal
        )
    return evaluation


def prepare(run: SupervisedRun, journal: Journal) -> None:
    """Have the reference, if there is one, score all that it scores before the first step."""
    if not run.data.objective.needs_reference:
        return
    journal.phase("reference")
    while not (preparation := run.ranks.each(SupervisedWorker.prepare)[0]).is_done:
        pass
    for note in preparation.notes:
        journal.say(note)


def first_evaluation(run: SupervisedRun, journal: Journal) -> dict[str, float]:
    """Evaluate the model that the run starts from."""
    if not run.data.held_out:
        return {}
    journal.phase("evaluate")
    evaluation = run.ranks.evaluate()
    journal.step(0, evaluation)
    return evaluation


def step_metrics(data: SupervisedData, results: Sequence[StepResult], seconds: float) -> dict[str, float]:
    """Return the metrics of an optimizer step that took `seconds`: a report is all ranks', memory the fullest known."""
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
    return config.actor.model, options, task


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
