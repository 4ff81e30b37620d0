"""Rollout phase: engines sample answers to prompts, and rewards score them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import TypeVar

from hotseat import faults
from hotseat.checks.reward_columns import label_hint
from hotseat.config import Config
from hotseat.config.presence import has_accuracy, needs_siblings
from hotseat.errors import RunError
from hotseat.loop import settings
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.collect import Collected, Collector, GroupFilter, evaluation_metrics
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.hosts import in_order_of
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.sample_log import SampleLog
from hotseat.loop.rl.state import RlState
from hotseat.loop.rl.sync import Pusher
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.group_facts import EVALUATION, GroupFacts, Job
from hotseat.loop.workers.value_models import RewardWorker
from hotseat.types import Prompt, Sampling

T = TypeVar("T")


class RolloutRunner:
    """Has prompts answered by the engines and the answers scored, in leases of their own.

    carries_over: requests stay open between two leases. components: the user's own; None: there are none.
    """

    def __init__(
        self,
        groups: Groups,
        phase_settings: PhaseSettings,
        meter: PhaseMeter,
        guard: CanaryGuard,
        pusher: Pusher,
        recovery: Recovery,
        *,
        carries_over: bool = False,
        components: Components | None = None,
    ):
        self._engines = groups.engines
        self._carries_over = carries_over
        self._hosts = groups.hosts
        self._reward = groups.reward
        self._judge = groups.judge
        self._settings = phase_settings
        self._meter = meter
        self._guard = guard
        self._pusher = pusher
        self._recovery = recovery
        self._components = components

    def answer(self, jobs: Sequence[Job], sampling: Sampling) -> list[GroupFacts]:
        """Have prompts answered and the answers scored: by the hosts, or by a model in its own lease.

        Components of the user's own see what is to be learned, and evaluations if they ask for them.
        """
        with self.sampling():
            facts = self._hosts.collect(jobs, sampling)
        if (self._reward is not None or self._judge is not None) and not facts:  # else `eval.reward` has scored them
            facts = in_order_of(jobs, self.score())
        if self._components is None:
            return facts
        is_evaluation = jobs[0].epoch == EVALUATION
        return self._components.change_evaluated(facts) if is_evaluation else self._components.change(facts)

    def evaluation_metrics(self) -> dict[str, float]:
        """Return what components report about the evaluation that ends now."""
        return {} if self._components is None else self._components.evaluation_metrics()

    def score(self) -> list[GroupFacts]:
        """Have the reward model or the judge score what hosts hold for it; return the groups that are complete then."""
        if self._judge is not None:
            with self._meter.lease("prepare", "judge"):
                return self._hosts.judge()
        assert self._reward is not None
        num_model_parallel = self._settings.config.train.num_model_parallel
        with self._meter.lease("prepare", "reward"):
            num_ranks = self._reward.size // num_model_parallel
            waiting = [self._hosts.to_score(rank, num_ranks) for rank in range(num_ranks)]
            scored = self._reward.scatter(
                RewardWorker.rewards, repeated(waiting, num_model_parallel), settings=self._settings.reward
            )
        rewards = {name: reward for rank in scored for name, reward in rank.items()}
        return self._hosts.take_rewards(rewards)

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Lease the devices to the engines. A save or an export since the last push may have dropped their weights.

        Engines that were replaced get requests from here on, where hosts may have some that wait for an engine. Where
        requests stay open between two leases, engines go on with them at the beginning and pause at the end.
        """
        self._pusher.restore_dropped_weights()
        self._guard.ask()
        with self._meter.lease("rollout", "rollout"):
            self._recovery.use_new_engines()
            if self._carries_over:
                self._engines.call(EngineWorker.resume)
            yield
            if self._carries_over:
                self._engines.call(EngineWorker.pause)


class RolloutPhase:
    """Samples the groups of a step or an evaluation, and samples groups again that were lost with their host."""

    def __init__(
        self,
        answering: RolloutRunner,
        groups: Groups,
        phase_settings: PhaseSettings,
        state: RlState,
        recovery: Recovery,
        samples: SampleLog,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
    ):
        self._answering = answering
        self._samples = samples
        self._prompts = prompts
        self._hint_on_evaluation = partial(label_hint, phase_settings.config, eval_prompts)
        self._settings = phase_settings
        self._state = state
        self._recovery = recovery
        self._collector = Collector(answering.answer, groups.hosts, prompts)
        self._evaluator = Collector(answering.answer, groups.hosts, eval_prompts) if eval_prompts else None
        # Of the batch that was sampled last: order of prompts before it, restarts of hosts by its end, and its step.
        self._order_before = state.order.state()
        self._num_host_restarts = 0
        self._step = 0

    def run(self, step: int) -> Collected:
        """Sample and score the groups of a step. If that stops the run, record what became of its samples."""
        faults.reach("generation.before")
        self._order_before, self._step = self._state.order.state(), step
        return self._sample_until_done()

    def with_groups(self, batch: Collected, use: Callable[[Collected], T]) -> tuple[Collected, T]:
        """Run `use` on the batch that was sampled last; if hosts lost it, sample it again first."""

        def work() -> tuple[Collected, T]:
            nonlocal batch
            if self._recovery.num_host_restarts > self._num_host_restarts:
                batch = self._sample_until_done()
            return batch, use(batch)

        return self._recovery.during(work)

    def release(self, batch: Collected) -> None:
        """Let the hosts drop the groups of a batch; the order of prompts gets their scores."""
        groups = [*batch.groups, *(facts for facts, _ in batch.dropped)]
        self._state.order.record({facts.prompt: fmean(facts.scores) for facts in groups if facts.scores})
        self._recovery.during(lambda: self._collector.forget(groups))
        self._recovery.start_counting()

    def evaluate(self) -> dict[str, float]:
        """Sample the answers to the evaluation prompts, and return their metrics; none without such prompts."""
        if self._evaluator is None:
            return {}
        evaluator, config = self._evaluator, self._settings.config
        num_samples = config.eval.samples_per_prompt

        def sample() -> list[GroupFacts]:
            sampling, max_failed = settings.eval_sampling(config), config.reward.max_failed_fraction
            return evaluator.evaluate(num_samples, sampling, max_failed, self._hint_on_evaluation)

        groups = self._recovery.during(sample)
        kept = [facts for facts in groups if facts.dropped_because is None]
        if not kept:
            raise RunError(
                f"components dropped all {len(groups)} groups of the evaluation, so there is nothing to measure: have"
                " them drop fewer, or set their evaluates to false"
            )
        metrics = evaluation_metrics(kept, num_samples, has_full_reward=has_accuracy(config))
        return metrics | self._answering.evaluation_metrics()

    def _sample_until_done(self) -> Collected:
        try:
            batch = self._recovery.during(self._sample)
        except RunError:
            self._samples.record_unfinished(self._step, self._collector.unfinished)
            raise
        self._num_host_restarts = self._recovery.num_host_restarts
        return batch

    def _sample(self) -> Collected:
        # Sampling again gives the same samples: a request's seed is made from its key.
        self._state.order = self._state.order.at(self._order_before)
        config = self._settings.config
        return self._collector.collect(
            self._state.order,
            config.rollout.batch_size,
            config.rollout.samples_per_prompt,
            settings.sampling(config),
            group_filter(config, self._prompts),
        )


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
