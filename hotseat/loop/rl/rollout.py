"""Rollout phase: engines sample answers to prompts, and rewards score them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from hotseat.checks.reward_columns import label_hint
from hotseat.config import Config
from hotseat.config.presence import has_accuracy, needs_siblings
from hotseat.errors import RunError
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.collect import GroupFilter, add_rewards, metrics_of_sets
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.groups import Groups, in_order_of
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.state import PhaseSettings
from hotseat.loop.rl.sync import Pusher
from hotseat.loop.settings.rollout_settings import eval_sampling
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.group_facts import EVALUATION, GroupFacts, Job
from hotseat.loop.workers.value_models import RewardWorker
from hotseat.rewards import RewardTally
from hotseat.types import Prompt, Sampling

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutRunner:
    """Has prompts answered by the engines and the answers scored, in leases of their own.

    carries_over: requests stay open between two leases. components: custom ones; None: there are none.
    """

    groups: Groups
    settings: PhaseSettings
    meter: PhaseMeter
    guard: CanaryGuard
    pusher: Pusher
    recovery: Recovery
    carries_over: bool = False
    components: Components | None = None

    def answer(self, jobs: Sequence[Job], sampling: Sampling, num_needed: int | None = None) -> list[GroupFacts]:
        """Have prompts answered and the answers scored: by the hosts, or by a model in its own lease.

        num_needed: how many of the groups are enough. Those that are complete first are returned, the others end.
        Custom components see what is to be learned, and evaluations if they ask for them.
        """
        with self.sampling():
            facts = self.groups.hosts.collect(jobs, sampling, num_needed)
            if num_needed is not None and num_needed < len(jobs):
                self.groups.reconnect()  # ends what nobody waits for: no request is open in the next lease
        has_model = self.groups.reward is not None or self.groups.judge is not None
        if has_model and not facts:  # else `eval.reward` has scored them
            facts = in_order_of(jobs, self.score())
        if self.components is None:
            return facts
        is_evaluation = jobs[0].epoch == EVALUATION
        return self.components.change(facts, is_evaluation=is_evaluation)

    def score(self) -> list[GroupFacts]:
        """Have the reward model or the judge score what hosts hold for it; return the groups that are complete then."""
        if self.groups.judge is not None:
            with self.meter.lease("prepare", "judge"):
                return self.groups.hosts.judge()
        assert self.groups.reward is not None
        num_model_parallel = self.settings.config.train.num_model_parallel
        with self.meter.lease("prepare", "reward"):
            num_ranks = self.groups.reward.size // num_model_parallel
            waiting = [self.groups.hosts.to_score(rank, num_ranks) for rank in range(num_ranks)]
            scored = self.groups.reward.scatter(
                RewardWorker.rewards, repeated(waiting, num_model_parallel), settings=self.settings.reward
            )
        rewards = {name: reward for rank in scored for name, reward in rank.items()}
        return self.groups.hosts.take_rewards(rewards)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Lease the devices to the engines. A save or an export since the last push may have dropped their weights.

        Engines that were replaced get requests from here on, where hosts may have some that wait for an engine. Where
        requests stay open between two leases, engines resume them at the beginning and pause at the end.
        """
        self.pusher.restore_dropped_weights()
        self.guard.ask()
        with self.meter.lease("rollout", "rollout"):
            self.recovery.use_new_engines()
            if self.carries_over:
                self.groups.engines.call(EngineWorker.resume)
            yield
            if self.carries_over:
                self.groups.engines.call(EngineWorker.pause)


def evaluate(
    runner: RolloutRunner, prompts: Sequence[Prompt], sets: Mapping[str, range] | None = None
) -> dict[str, float]:
    """Sample answers to prompts, with the same seeds each time; return metrics. Raises if too many samples failed.

    sets: by name, the indices of prompts that are measured apart.
    """
    config = runner.settings.config
    num_samples = config.eval.samples_per_prompt
    jobs = [Job(prompt, EVALUATION, num_samples) for prompt in prompts]

    def sample() -> list[GroupFacts]:
        groups = runner.answer(jobs, eval_sampling(config))
        runner.groups.hosts.forget([facts.key for facts in groups])
        tally = RewardTally(config.reward.max_failed_fraction, partial(label_hint, config, prompts))
        for facts in groups:
            add_rewards(tally, facts)
        tally.check("evaluation: ")
        return groups

    groups = runner.recovery.during(sample)
    kept = [facts for facts in groups if facts.dropped_because is None]
    if not kept:
        raise RunError(
            f"components dropped all {len(groups)} groups of the evaluation, so there is nothing to measure: have"
            " them drop fewer, or set their evaluates to false"
        )
    metrics = metrics_of_sets(kept, num_samples, sets or {}, has_full_reward=has_accuracy(config))
    return metrics | (runner.components.metrics(is_evaluation=True) if runner.components is not None else {})


def group_filter(config: Config, prompts: Sequence[Prompt]) -> GroupFilter:
    """Return the conditions on the groups that a step may learn from."""
    filtering = config.algorithm.filtering
    return GroupFilter(
        min_samples=2 if needs_siblings(config) else 1,
        low=filtering.low if filtering.enabled else None,
        high=filtering.high if filtering.enabled else None,
        max_failed_fraction=config.reward.max_failed_fraction,
        hint=partial(label_hint, config, prompts),
    )


def repeated(shares: Sequence[T], num_model_parallel: int) -> list[T]:
    """Return a share for each rank: model-parallel ranks, which are next to each other, get the same."""
    return [share for share in shares for _ in range(num_model_parallel)]
