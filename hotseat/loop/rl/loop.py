"""The reinforcement loop.

    Prompt --agent x engine--> Episode --reward--> scored Episode --grouped--> PromptGroup
           --algorithms--> Experience --packing--> MicroBatch --update--> WeightVersion --push--> engines

`train_rl` is the whole loop. A `Stream` supplies the groups of each step. The phases lease devices and call methods of
workers (`loop/workers`) in other processes. The driver sees small facts; tensors travel between the worker groups.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotseat.errors import RunError
from hotseat.loop.rl.group_restarts import GroupRestarts
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phases import PreparePhase, SyncPhase, UpdatePhase
from hotseat.loop.rl.rl_checkpoints import RlCheckpoints
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import MicroBatches
from hotseat.loop.rl.step_metrics import StepMetrics
from hotseat.loop.rl.stream import Stream
from hotseat.loop.state.checkpoints import Checkpoint
from hotseat.loop.state.saving import Saver
from hotseat.observe import Journal


@dataclass(frozen=True)
class RlRun:
    """Objects that the loop drives: the source of batches, the phases, and what measures and records them."""

    num_steps: int
    has_evaluation: bool
    eval_every: int | None
    stream: Stream
    evaluate: Callable[[], dict[str, float]]
    prepare: PreparePhase
    update: UpdatePhase
    sync: SyncPhase
    meter: PhaseMeter
    metrics: StepMetrics
    micro_batches: MicroBatches
    samples: SampleLog
    checkpoints: RlCheckpoints
    restarts: GroupRestarts

    def is_evaluated(self, step: int) -> bool:
        """Tell whether the policy is evaluated after this step."""
        is_due = step == self.num_steps or (self.eval_every is not None and step % self.eval_every == 0)
        return is_due and self.has_evaluation


def train_rl(run: RlRun, journal: Journal, saver: Saver, checkpoint: Checkpoint | None) -> dict[str, float]:
    """Train to the last step, from the beginning or from a checkpoint, and return the last evaluation.

    When a model's process is lost, its group is restarted, and the run resumes from its newest checkpoint.
    """
    while True:
        try:
            first_step, evaluation = begin(run, journal) if checkpoint is None else resume(run, journal, checkpoint)
            return make_steps(run, journal, saver, first_step, evaluation)
        except RunError as error:
            checkpoint = run.restarts.recover(error, saver, journal)


def make_steps(
    run: RlRun, journal: Journal, saver: Saver, first_step: int, evaluation: dict[str, float]
) -> dict[str, float]:
    """Make all steps from `first_step` on; return the last evaluation.

    evaluation: the one before these steps, which is returned if they make none.
    """
    with sparing_collector():
        for step in range(first_step, run.num_steps + 1):
            run.meter.begin_step()
            journal.phase("rollout")
            batch = run.stream.take(step)
            journal.phase("prepare")
            prepared = run.prepare.run(batch, step)
            journal.phase("update")
            updates = run.update.run(prepared, step)
            run.micro_batches.keep_lowered(saver.keep)
            journal.phase("sync")
            with run.stream.weight_update():
                pushed = run.sync.run()
            metrics = run.metrics.of_step(prepared.batch, updates, pushed) | run.stream.metrics() | saver.metrics()
            if run.is_evaluated(step):
                journal.phase("evaluate")
                evaluation = run.evaluate()
                metrics |= evaluation
            journal.step(step, metrics)
            run.samples.record(step, prepared.batch, metrics)
            measured = evaluation if run.is_evaluated(step) else {}
            saver.after_step(step, run.checkpoints.source(evaluation), measured, journal)
            if saver.is_ending:
                break
    return evaluation


@contextmanager
def sparing_collector() -> Iterator[None]:
    """Exempt all objects that exist by now from garbage collection, unless this process has exempted some itself.

    Every full collection would traverse them: those of libraries, and the records of thousands of processes.
    """
    if gc.get_freeze_count() > 0:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def begin(run: RlRun, journal: Journal) -> tuple[int, dict[str, float]]:
    """Push the weights that the run starts from and evaluate them; return the first step and that evaluation."""
    journal.phase("sync")
    run.sync.run()
    evaluation = {}
    if run.has_evaluation:
        journal.phase("evaluate")
        evaluation = run.evaluate()
    journal.step(0, evaluation)
    return 1, evaluation


def resume(run: RlRun, journal: Journal, checkpoint: Checkpoint) -> tuple[int, dict[str, float]]:
    """Restore a checkpoint and push its weights; return the next step and the checkpoint's evaluation."""
    run.checkpoints.restore(checkpoint)
    journal.phase("sync")
    run.sync.run()
    return checkpoint.step + 1, dict(checkpoint.state["evaluation"])
