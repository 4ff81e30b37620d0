"""The state of a reinforcement run in a checkpoint, and the models that it exports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.cluster import WorkerGroup, reports_death
from hotseat.errors import RunError
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.opening import Exported
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.state import PhaseSettings, RlState
from hotseat.loop.rl.stream import Stream
from hotseat.loop.state.checkpoints import BACKENDS, Checkpoint, critic_folder
from hotseat.loop.state.saving import CheckpointSource, for_ranks
from hotseat.loop.workers.model_workers import ModelWorker


@dataclass(frozen=True)
class RlCheckpoints:
    """Saves and restores weights, optimizers, ledger and the driver's state."""

    groups: Groups
    scheduler: DeviceScheduler
    state: RlState
    guard: CanaryGuard
    ledger: Ledger
    stream: Stream
    phase_settings: PhaseSettings

    @property
    def _trained(self) -> dict[str, WorkerGroup[ModelWorker]]:
        models = self.groups.models
        return {role: models[role] for role in ("critic", "actor") if role in models}

    def source(self, evaluation: dict[str, float]) -> CheckpointSource:
        """Return the calls that write a checkpoint and an export."""

        def write(path: Path, method: Callable[[ModelWorker, str], None] = ModelWorker.save) -> None:
            # The ledger first: the ranks may still be writing when this returns.
            self.ledger.copy_to(path)
            self.stream.save(path)
            for role, group in self._trained.items():
                with self.scheduler.lease("update", role):
                    group.call(method, for_ranks(path / BACKENDS[role]))

        def snapshot(path: Path) -> Callable[[], bool]:
            write(path, ModelWorker.snapshot)
            return lambda: all(all(group.call(ModelWorker.is_written)) for group in self._trained.values())

        def export(path: Path) -> None:
            self.export("model", path)
            if self.phase_settings.config.checkpoint.export_critic:
                self.export("critic", critic_folder(path))

        return CheckpointSource(
            num_bytes=lambda: sum(sum(group.call(ModelWorker.saved_bytes)) for group in self._trained.values()),
            write=write,
            snapshot=snapshot,
            num_ranks={BACKENDS[role]: group.size for role, group in self._trained.items()},
            export=export,
            state=lambda: {
                **self.state.save(),
                "stream": self.stream.state(),
                "evaluation": evaluation,
                "canary": self.guard.state(),
                "num_ranks": self.groups.actor.size,
            },
        )

    def settle(self, roles: Sequence[str]) -> None:
        """Wait until no rank of these roles writes a part of a checkpoint, which will never be complete."""
        for role, group in self._trained.items():
            until_s = time.monotonic() + group.timeout_s
            while role in roles and time.monotonic() < until_s and not _is_idle(group):
                time.sleep(0.05)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Return to where a checkpoint was made."""
        self.state.restore(checkpoint.state, self.phase_settings.config)
        self.guard.restore(checkpoint.state.get("canary"))
        self.ledger.restore(checkpoint.path)
        self.stream.restore(checkpoint.state.get("stream"), checkpoint.path, checkpoint.step)
        for role, group in self._trained.items():
            with self.scheduler.lease("update", role):
                group.call(ModelWorker.load, for_ranks(checkpoint.path / BACKENDS[role]))

    def export(self, what: Exported, path: str | Path) -> None:
        """Write a model as a Hugging Face checkpoint."""
        role = "critic" if what == "critic" else "actor"
        with self.scheduler.lease("update", role):
            self.groups.models[role].call(ModelWorker.export, for_ranks(Path(path)), what == "moving average")


def _is_idle(group: WorkerGroup[ModelWorker]) -> bool:
    """Tell whether no rank is writing. One that could not write its part, since the folder is gone, is not."""
    try:
        return all(group.call(ModelWorker.is_written))
    except RunError as error:
        if reports_death(error):
            raise
        return False  # a rank says so once
