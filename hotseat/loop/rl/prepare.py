"""Prepare phase: reference, critic and actor turn the groups of a step into experience."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from hotseat import faults
from hotseat.cluster import WorkerGroup, as_arguments
from hotseat.config.batches import token_budget
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.launch import Groups
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.rollout import repeated
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.stream import Stream
from hotseat.loop.workers.experience import Share, assign
from hotseat.loop.workers.models import ActorWorker, ModelWorker
from hotseat.loop.workers.rollout_host import RolloutHost
from hotseat.loop.workers.value_models import CriticWorker

Shares = list[list[Share]]  # for each data-parallel rank, references to its groups, typed as what they arrive as

R = TypeVar("R")
M = TypeVar("M", bound=ModelWorker)
P = ParamSpec("P")


@dataclass(frozen=True)
class Prepared:
    """A batch whose experience lies in the actor's ranks."""

    batch: Collected
    num_optimizer_steps: int  # in one pass over the batch


class PreparePhase:
    """Has log-probs of the reference, values of the critic and old log-probs computed, then advantages."""

    def __init__(
        self, groups: Groups, stream: Stream, phase_settings: PhaseSettings, meter: PhaseMeter, samples: SampleLog
    ):
        self._groups = groups
        self._stream = stream
        self._settings = phase_settings
        self._meter = meter
        self._samples = samples
        self._num_model_parallel = phase_settings.config.train.num_model_parallel

    def run(self, batch: Collected, step: int) -> Prepared:
        """Make experience of a batch. Groups that were lost with their host are sampled again."""
        faults.reach("prepare.before")

        def hand_out(batch: Collected) -> tuple[dict[int, Shares], int]:
            self._samples.choose(step, batch)
            shares = {num_ranks: self._shares(batch, num_ranks) for num_ranks in self._numbers_of_ranks()}
            return {num_ranks: each for num_ranks, (each, _) in shares.items()}, next(iter(shares.values()))[1]

        batch, (shares, num_optimizer_steps) = self._stream.with_groups(batch, hand_out)
        self._make_experience(shares, num_optimizer_steps)
        self._stream.release(batch)
        return Prepared(batch, num_optimizer_steps)

    def _numbers_of_ranks(self) -> set[int]:
        groups = (self._groups.actor, self._groups.critic, self._groups.reference, self._groups.inference)
        return {group.size // self._num_model_parallel for group in groups if group is not None}

    def _shares(self, batch: Collected, num_ranks: int) -> tuple[Shares, int]:
        """Return a share for each of `num_ranks` ranks, and the number of optimizer steps, the same for any."""
        sizes = [len(facts.rewards) for facts in batch.groups]
        has_budget = token_budget(self._settings.config.train) is not None
        tokens = [sum(facts.num_tokens) for facts in batch.groups] if has_budget else None
        ranks, steps = assign(sizes, self._settings.algebra.samples_per_optimizer_step, num_ranks, tokens)
        shares = []
        for members in ranks:
            keys = [batch.groups[index].key for index in members]
            [share] = self._groups.hosts.call_and_keep(RolloutHost.share, keys, [steps[index] for index in members])
            shares.append([share.as_argument()])
        return shares, 1 + max(step for group in steps for step in group)

    def _make_experience(self, shares: Mapping[int, Shares], num_optimizer_steps: int) -> None:
        def for_ranks(group: WorkerGroup[ModelWorker]) -> Shares:
            return repeated(shares[group.size // self._num_model_parallel], self._num_model_parallel)

        def compute(
            role: str,
            group: WorkerGroup[M] | None,
            method: Callable[Concatenate[M, list[Share], P], R],
            *args: P.args,
            **kwargs: P.kwargs,
        ) -> list[R]:
            """Have a role compute its values of every sample in a lease of its own; empty without such a role."""
            if group is None:
                return []
            with self._meter.lease("prepare", role):
                values = group.scatter_and_keep(method, for_ranks(group), *args, **kwargs)
            return as_arguments(values[:: self._num_model_parallel])

        groups, policy = self._groups, self._settings.policy
        scoring = policy.score, policy.temperature
        reference = compute("reference", groups.reference, ModelWorker.score, *scoring)
        values = compute("critic", groups.critic, CriticWorker.values, self._settings.critic)
        old = compute("inference", groups.inference, ModelWorker.score, *scoring)
        # With old log-probs at hand the actor computes nothing here.
        with self._meter.lease("prepare", "actor") if groups.inference is None else nullcontext():
            groups.actor.scatter(
                ActorWorker.prepare,
                for_ranks(groups.actor),
                num_steps=num_optimizer_steps,
                settings=policy,
                reference=reference,
                record=self._samples.ids_in_training,
                critic=values,
                inference=old,
            )
