"""Phases of a step after the rollout: experience of its groups, updates from it, and a push of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from hotseat import faults
from hotseat.cluster import Pending, Ref, WorkerGroup, as_arguments
from hotseat.config.batches import token_budget
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.groups import Groups, ShareOfRank
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.rollout import repeated
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import PhaseSettings, RlState
from hotseat.loop.rl.stream import Stream
from hotseat.loop.rl.sync import Pusher, PushReport
from hotseat.loop.workers.by_sample import BySample
from hotseat.loop.workers.experience import Share, assign
from hotseat.loop.workers.model_workers import ActorWorker, ModelWorker
from hotseat.loop.workers.value_models import CriticWorker
from hotseat.train.backend import UpdateReport

Shares = list[list[Share]]  # by data-parallel rank; in fact references, which arrive in a worker as `Share`s


@dataclass(frozen=True)
class PreparedBatch:
    """A batch whose experience lies in the actor's ranks."""

    batch: Collected
    num_optimizer_steps: int  # in one pass over the batch


@dataclass(frozen=True)
class PreparePhase:
    """Makes the experience of a batch: scores of all roles, then advantages, both on the ranks that need them.

    The reference computes log-probs, the critic values, and actor or inference old log-probs. Roles that the plan puts
    into one step compute at the same time.
    """

    groups: Groups
    stream: Stream
    settings: PhaseSettings
    meter: PhaseMeter
    samples: SampleLog

    def run(self, batch: Collected, step: int) -> PreparedBatch:
        """Make experience of a batch. Groups that were lost with their host are sampled again."""
        faults.reach("prepare.before")

        def hand_out(batch: Collected) -> tuple[dict[int, Shares], int]:
            """Return shares by the number of data-parallel ranks, and the number of optimizer steps."""
            self.samples.choose(step, batch)
            groups = (self.groups.actor, self.groups.critic, self.groups.reference, self.groups.inference)
            sizes = {group.size // self.num_model_parallel for group in groups if group is not None}
            shares = {num_ranks: self._shares(batch, num_ranks) for num_ranks in sizes}
            return {num_ranks: each for num_ranks, (each, _) in shares.items()}, next(iter(shares.values()))[1]

        batch, (shares, num_optimizer_steps) = self.stream.with_groups(batch, hand_out)
        self._make_experience(shares, num_optimizer_steps)
        self.stream.release(batch)
        return PreparedBatch(batch, num_optimizer_steps)

    @property
    def num_model_parallel(self) -> int:
        return self.settings.config.train.num_model_parallel

    def _shares(self, batch: Collected, num_ranks: int) -> tuple[Shares, int]:
        """Return a share for each of `num_ranks` ranks, and the number of optimizer steps, which they do not change."""
        sizes = [len(facts.rewards) for facts in batch.groups]
        has_budget = token_budget(self.settings.config.train) is not None
        tokens = [sum(facts.num_tokens) for facts in batch.groups] if has_budget else None
        ranks, steps = assign(sizes, self.settings.algebra.samples_per_optimizer_step, num_ranks, tokens)
        by_rank = [
            ShareOfRank([batch.groups[index].key for index in members], [steps[index] for index in members])
            for members in ranks
        ]
        return self.groups.hosts.shares(by_rank), 1 + max(step for group in steps for step in group)

    def _make_experience(self, shares: Mapping[int, Shares], num_optimizer_steps: int) -> None:
        scores: dict[str, list[BySample]] = {}
        *earlier, last = self._turns()
        for roles in earlier:
            with self.meter.lease("prepare", *roles):
                scores |= self._score(roles, shares)
        with self.meter.lease("prepare", *last) if last else nullcontext():
            # An actor that works alone scores in `ActorWorker.prepare`: that saves a call.
            scores |= self._score(last if len(last) > 1 else (), shares)
            self.groups.actor.scatter(
                ActorWorker.prepare,
                self._for_ranks(self.groups.actor, shares),
                num_steps=num_optimizer_steps,
                settings=self.settings.policy,
                reference=scores.get("reference", []),
                record=self.samples.ids_in_training,
                critic=scores.get("critic", []),
                old=scores.get("inference") or scores.get("actor", []),
            )

    def _turns(self) -> list[tuple[str, ...]]:
        """Return the roles that score at the same time, turn by turn; the actor's turn is the last.

        An inference role computes old log-probs in the actor's place, and the last turn is then empty.
        """
        groups = self.groups
        present = [role for role in ("reference", "critic", "inference") if role in groups.models]
        if groups.inference is not None:
            return [*self.meter.turns("prepare", present), ()]
        turns = self.meter.turns("prepare", [*present, "actor"])
        if "actor" in turns[-1]:
            return turns
        others = (tuple(role for role in roles if role != "actor") for roles in turns)
        return [*(roles for roles in others if roles), ("actor",)]

    def _score(self, roles: Sequence[str], shares: Mapping[int, Shares]) -> dict[str, list[BySample]]:
        groups, policy = self.groups, self.settings.policy
        started: dict[str, Pending[Ref[BySample]]] = {}
        for role in roles:
            if role == "critic":
                assert groups.critic is not None
                started[role] = groups.critic.start_scatter_and_keep(
                    CriticWorker.values, self._for_ranks(groups.critic, shares), self.settings.critic
                )
            elif role != "actor" or policy.needs_old_log_probs:
                group = groups.models[role]
                arguments = self._for_ranks(group, shares), policy.score, policy.temperature
                how = policy.objective.divergence if role == "reference" else None
                started[role] = (
                    group.start_scatter_and_keep(ModelWorker.score, *arguments)
                    if how is None
                    else group.start_scatter_and_keep(ModelWorker.teach, *arguments, how)
                )
        return {role: as_arguments(pending.result()[:: self.num_model_parallel]) for role, pending in started.items()}

    def _for_ranks(self, group: WorkerGroup[ModelWorker], shares: Mapping[int, Shares]) -> Shares:
        return repeated(shares[group.size // self.num_model_parallel], self.num_model_parallel)


@dataclass(frozen=True)
class Updates:
    """Reports of the optimizer steps of a rollout, equal on every rank; empty for a role that did not learn."""

    actor: list[UpdateReport]
    critic: list[UpdateReport]


@dataclass(frozen=True)
class UpdatePhase:
    """Makes every optimizer step of a rollout, on batches that `ActorWorker.prepare` has left on the actor's ranks."""

    groups: Groups
    settings: PhaseSettings
    state: RlState
    meter: PhaseMeter

    def run(self, prepared: PreparedBatch, step: int) -> Updates:
        """Update the critic first, then the actor, unless the critic is still warming up; adapt the KL coefficient."""
        faults.reach("update.before")
        critic = self._update_critic(prepared) if self.groups.critic is not None else []
        is_warm = self.groups.critic is None or step > self.settings.config.critic.warmup_steps
        actor: list[UpdateReport] = []
        if is_warm:
            with self.meter.lease("update", "actor"):
                actor = self.groups.actor.call(ActorWorker.update, self.settings.policy)[0]
        kl = mean(actor, "kl")
        if kl is not None:
            self.state.kl = self.state.kl.updated(kl, self.settings.algebra.samples_per_step)
        return Updates(actor, critic)

    def _update_critic(self, prepared: PreparedBatch) -> list[UpdateReport]:
        assert self.groups.critic is not None
        num_model_parallel = self.settings.config.train.num_model_parallel
        returns = as_arguments(self.groups.actor.call_and_keep(ActorWorker.returns)[::num_model_parallel])
        with self.meter.lease("update", "critic"):
            arguments = returns, prepared.num_optimizer_steps, self.settings.critic
            return self.groups.critic.call(CriticWorker.update, *arguments)[0]


@dataclass(frozen=True)
class SyncPhase:
    """Pushes weights to the engines under a new version, and has the canary judge their log-probs."""

    pusher: Pusher
    state: RlState
    guard: CanaryGuard
    recovery: Recovery

    def run(self) -> PushReport:
        """Push the actor's weights as the next version, and serve it from now on."""
        faults.reach("push.before")
        version = self.state.version + 1
        report = self.recovery.during(lambda: self.pusher.push(version), is_push=True)
        self.state.version = version
        if not self.guard.is_started:
            self.recovery.during(lambda: self.guard.start(version))
        faults.reach("push.after")
        return report


def mean(reports: Sequence[UpdateReport], name: str) -> float | None:
    """Return a metric's mean per learned token, over all optimizer steps of a rollout; None if it was not measured."""
    if not reports or any(name not in report.metrics for report in reports):
        return None
    total: float = sum(report.metrics[name] for report in reports)
    return total / max(1, sum(report.num_sampled for report in reports))
