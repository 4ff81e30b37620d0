"""Update phase: the critic learns from the returns, then the actor from the advantages.

The batches of the actor are on its ranks already: `ActorWorker.prepare` made them in the phase before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hotseat import faults
from hotseat.cluster import as_arguments
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.prepare import Prepared
from hotseat.loop.rl.state import RlState
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.value_models import CriticWorker
from hotseat.train.backend import UpdateReport


@dataclass(frozen=True)
class Updates:
    """Reports of the optimizer steps of a rollout, equal on every rank; empty for a role that did not learn."""

    actor: list[UpdateReport]
    critic: list[UpdateReport]


@dataclass(frozen=True)
class UpdatePhase:
    """Makes every optimizer step of a rollout."""

    groups: Groups
    settings: PhaseSettings
    state: RlState
    meter: PhaseMeter

    def run(self, prepared: Prepared, step: int) -> Updates:
        """Update the critic first, then the actor, unless the critic is still warming up; adapt the KL coefficient."""
        faults.reach("update.before")
        critic = self._update_critic(prepared) if self.groups.critic is not None else []
        is_warm = self.groups.critic is None or step > self.settings.config.critic.warmup_steps
        actor = self._update_actor() if is_warm else []
        kl = mean(actor, "kl")
        if kl is not None:
            self.state.kl = self.state.kl.updated(kl, self.settings.algebra.samples_per_step)
        return Updates(actor, critic)

    def _update_critic(self, prepared: Prepared) -> list[UpdateReport]:
        assert self.groups.critic is not None
        num_model_parallel = self.settings.config.train.num_model_parallel
        returns = as_arguments(self.groups.actor.call_and_keep(ActorWorker.returns)[::num_model_parallel])
        with self.meter.lease("update", "critic"):
            arguments = returns, prepared.num_optimizer_steps, self.settings.critic
            return self.groups.critic.call(CriticWorker.update, *arguments)[0]

    def _update_actor(self) -> list[UpdateReport]:
        with self.meter.lease("update", "actor"):
            return self.groups.actor.call(ActorWorker.update, self.settings.policy)[0]


def mean(reports: Sequence[UpdateReport], name: str) -> float | None:
    """Return a metric's mean per learned token, over all optimizer steps of a rollout; None if it was not measured."""
    if not reports or any(name not in report.metrics for report in reports):
        return None
    total: float = sum(report.metrics[name] for report in reports)
    return total / max(1, sum(report.num_sampled for report in reports))
