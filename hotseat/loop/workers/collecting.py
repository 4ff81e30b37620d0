"""Episodes in progress on a rollout host: each group is scored as soon as its last episode ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, NamedTuple

from hotseat.agents import AgentHost
from hotseat.agents.episode_jobs import EpisodeFuture
from hotseat.errors import RunError
from hotseat.loop.workers.group_facts import GivenUp, GroupKey, Job
from hotseat.loop.workers.spool import Finished
from hotseat.rewards import Score, Scorer
from hotseat.rewards.scorer import NamedArguments
from hotseat.types import Episode, Failed, Prompt, PromptGroup, SampleKey, Sampling, ScoredEpisode


@dataclass
class OpenGroup:
    """The episodes of one job: an outcome per sample, None until it is there, and the seconds that each took."""

    job: Job
    outcomes: list[Any] = field(default_factory=list)
    num_open: int = 0
    episode_s: list[float] = field(default_factory=list)
    scoring_s: float = 0.0
    scores: list[Score | Failed] | None = None  # of its episodes, where a model adds to them later

    @property
    def episodes(self) -> list[Episode]:
        """Return the episodes that their agent did not score."""
        return [outcome for outcome in self.outcomes if isinstance(outcome, Episode)]

    @property
    def given_up(self) -> GivenUp:
        """Return the facts of a group that nobody waits for any more."""
        made = (outcome.episode if isinstance(outcome, ScoredEpisode) else outcome for outcome in self.outcomes)
        lengths = tuple(episode.num_sampled for episode in made if isinstance(episode, Episode))
        return GivenUp(*self.job.key, self.job.num_samples, lengths)

    def scored(self, scores: Sequence[Score | Failed]) -> list[ScoredEpisode | Failed]:
        """Return the outcome of each sample, with scores for those that the agent did not score."""
        scored: list[ScoredEpisode | Failed] = []
        remaining = iter(scores)
        for outcome in self.outcomes:
            score = next(remaining) if isinstance(outcome, Episode) else outcome
            if isinstance(score, Score):
                score = ScoredEpisode(outcome, score.reward, score.score, score.extra)
            scored.append(score)
        return scored

    def finished(self, scores: Sequence[Score | Failed]) -> Finished:
        """Return the complete group with these scores for the episodes that the agent did not score."""
        outcomes = self.scored(scores)
        samples = tuple(outcome for outcome in outcomes if isinstance(outcome, ScoredEpisode))
        failures = tuple((at, outcome.reason) for at, outcome in enumerate(outcomes) if isinstance(outcome, Failed))
        prompt = replace(self.job.prompt, columns=None)  # of no use once the group is scored
        group = PromptGroup(prompt, samples, len(failures))
        return Finished(self.job.epoch, group, failures, tuple(self.episode_s), self.scoring_s)


@dataclass(frozen=True)
class Scoring:
    """Way in which groups get their rewards.

    tokenizer: decodes answers for reward functions that are called with named arguments. waits_for_model: a reward
    model scores groups later, or a judge adds to the scores of `scorer`. ignores_agents: those of agents do not count.
    """

    scorer: Scorer | None
    tokenizer: Any
    waits_for_model: bool = False
    ignores_agents: bool = False


class Collecting:
    """Has agents answer jobs, and scores each group when it is complete, while others are still generated.

    Takes jobs from `add`, in any thread, and gives complete groups to `next`, in one thread, in the order in which they
    complete. Every episode and every reward ends: agents and rewards have deadlines of their own.

    reach: called with the name of a point at which a test may inject a fault.
    """

    def __init__(self, agents: AgentHost, scoring: Scoring, reach: Callable[[str], object]):
        self._agents = agents
        self._scoring = scoring
        self._reach = reach
        self._done: SimpleQueue[_Done | RunError] = SimpleQueue()
        self.open: dict[GroupKey, OpenGroup] = {}  # those that `next` has not returned

    def add(self, jobs: Sequence[Job], sampling: Sampling) -> None:
        """Start the episodes of jobs. Returns at once."""
        groups = [OpenGroup(job, [None] * job.num_samples, job.num_samples, [0.0] * job.num_samples) for job in jobs]
        self.open |= {group.job.key: group for group in groups}
        samples = [(group, sample) for group in groups for sample in range(group.job.num_samples)]
        requests = [
            (group.job.prompt, SampleKey(group.job.epoch, group.job.prompt.index, sample)) for group, sample in samples
        ]
        for (group, sample), episode in zip(samples, self._agents.submit_many(requests, sampling), strict=True):
            self._report(group, sample, episode, episode)

    def next(self) -> tuple[OpenGroup, list[Score | Failed] | None]:
        """Wait for the next complete group: return it and the scores of its episodes, None if a model scores them.

        Raises what an engine or a scorer raised, and what `interrupt` was called with.
        """
        group, scores = self._next()
        del self.open[group.job.key]
        return group, scores

    def _next(self) -> tuple[OpenGroup, list[Score | Failed] | None]:
        while True:
            item = self._done.get()
            if isinstance(item, RunError):
                raise item
            group, sample = item.group, item.sample
            if sample is None:
                group.scoring_s = item.ended_s - item.started_s
                scores = item.future.result()
                if not self._scoring.waits_for_model:
                    return group, scores
                group.scores = scores
                return group, None
            outcome = item.future.result()
            if self._scoring.ignores_agents and isinstance(outcome, ScoredEpisode):
                outcome = outcome.episode
            group.outcomes[sample] = outcome
            group.episode_s[sample] = item.ended_s - item.started_s
            group.num_open -= 1
            if group.num_open == 0 and self._scoring.waits_for_model and self._scoring.scorer is None:
                return group, None
            if group.num_open == 0:
                self._report(group, None, _score(group, self._scoring))
                self._reach("scoring.during")

    def interrupt(self, reason: RunError) -> None:
        """Have `next` raise this once, after it has returned what is complete already."""
        self._done.put(reason)

    def _report(
        self, group: OpenGroup, sample: int | None, future: Future[Any], episode: EpisodeFuture | None = None
    ) -> None:
        asked_s = time.monotonic()

        def report(future: Future[Any]) -> None:
            ended_s = time.monotonic()
            started_s = asked_s if episode is None else episode.started_s
            self._done.put(_Done(group, sample, future, ended_s if started_s is None else started_s, ended_s))

        future.add_done_callback(report)


class _Done(NamedTuple):
    """The end of an episode, or of the scoring of a group, whose `sample` is None."""

    group: OpenGroup
    sample: int | None
    future: Future[Any]
    started_s: float
    ended_s: float


def _score(group: OpenGroup, scoring: Scoring) -> Future[Any]:
    if group.episodes and scoring.scorer is not None:
        return submit_group(scoring.scorer, group, scoring.tokenizer)
    unscored: Future[Any] = Future()
    unscored.set_result([Failed("the agent gave no reward, and the run has no reward function")] * len(group.episodes))
    return unscored


def submit_group(scorer: Scorer, group: OpenGroup, tokenizer: Any) -> Future[list[Score | Failed]]:
    """Submit the episodes of a complete group that their agent did not score."""
    prompt, episodes = group.job.prompt, group.episodes
    return scorer.submit(
        [episode.query for episode in episodes],
        [prompt.text] * len(episodes),
        [prompt.label] * len(episodes),
        [str(episode.key) for episode in episodes],
        None if prompt.columns is None else _named(prompt.columns, prompt, episodes, tokenizer),
    )


def _named(columns: Mapping[str, Any], prompt: Prompt, episodes: Sequence[Episode], tokenizer: Any) -> NamedArguments:
    """Return what a reward function that is called by names gets: answers are what follows the prompt's tokens.

    Where an agent begins its context otherwise, an answer begins with the first token that was sampled.
    """
    ids = []
    for episode in episodes:
        segment = episode.played_segments[-1]
        tokens, begin = segment.token_ids.tolist(), len(prompt.token_ids)
        if tuple(tokens[:begin]) != prompt.token_ids:
            begin = int(segment.mask.int().argmax())
        ids.append(tokens[begin:])
    return NamedArguments(columns, [tokenizer.decode(each, skip_special_tokens=True) for each in ids], ids)
