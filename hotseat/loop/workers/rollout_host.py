"""The process between driver and engines: it runs agents, scores groups as they complete, and keeps their tensors.

The driver gets facts. Groups stay here until the actor's ranks fetch their share. Where a reward model scores, groups
wait: its ranks fetch the tokens to score (`to_score`), and their rewards complete the groups (`take_rewards`).
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotseat import faults
from hotseat.agents import AgentHost, load_agent
from hotseat.cluster import WorkerGroup
from hotseat.loop.workers.engine_client import EngineClient, TakesRequests
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.facts import EVALUATION, GroupFacts, GroupKey, Job
from hotseat.loop.workers.records import SampleRecord, record_of
from hotseat.rewards import RewardFunction, Score
from hotseat.types import Episode, Failed, MicroBatch, PromptGroup, SampleKey, Sampling, ScoredEpisode


@dataclass(frozen=True)
class HostSettings:
    """Settings of a rollout host."""

    tokenizer: str
    run_seed: int
    max_length: int
    agent: str | None
    max_turns: int | None
    max_concurrent: int
    episode_timeout_s: float
    reward: str | None
    reward_timeout_s: float
    reward_retries: int
    reward_max_bytes: int | None
    eval_reward: str | None = None  # scores evaluations, instead of any other reward
    has_reward_model: bool = False
    reward_tokenizer: str | None = None  # of a reward model with another vocabulary; None: it reads the policy's tokens
    trust_remote_code: bool = False


@dataclass
class _Pending:
    job: Job
    outcomes: list[Any] = field(default_factory=list)
    num_open: int = 0


class RolloutHost:
    """Runs agents and rewards in a process of their own: user code may block, crash or keep globals."""

    max_concurrency = 2

    def __init__(self, settings: HostSettings):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer, trust_remote_code=settings.trust_remote_code)
        self._agent = load_agent(
            settings.agent, tokenizer, max_length=settings.max_length, max_steps=settings.max_turns
        )
        self._settings = settings
        self._agents: AgentHost | None = None
        self._reward = None if settings.reward is None else _reward_function(settings.reward, settings)
        self._eval_reward = None if settings.eval_reward is None else _reward_function(settings.eval_reward, settings)
        self._reward_tokenizer = None
        if settings.reward_tokenizer is not None:
            self._reward_tokenizer = AutoTokenizer.from_pretrained(
                settings.reward_tokenizer, trust_remote_code=settings.trust_remote_code
            )
        self._tokenizer = tokenizer
        self._unscored: list[_Pending] = []  # groups of the last `collect`, if they wait for a reward model
        self._groups: dict[GroupKey, PromptGroup] = {}

    def connect(self, engines: WorkerGroup[TakesRequests]) -> None:
        """Connect to the engines: at the start of a run, and retokenized when an engine was replaced."""
        settings = self._settings
        if self._agents is not None:
            self._agents.close()
        self._agents = AgentHost(
            self._agent,
            EngineClient(engines, timeout_s=settings.episode_timeout_s).generate,
            run_seed=settings.run_seed,
            max_concurrent=settings.max_concurrent * engines.size,
            timeout_s=settings.episode_timeout_s,
        )

    def collect(self, jobs: Sequence[Job], sampling: Sampling) -> list[GroupFacts]:
        """Answer and score every job. A group is scored as soon as it is complete, while others are still generated.

        Where a reward model scores, this returns nothing yet: `take_rewards` returns the facts.
        """
        assert self._agents is not None, "not connected to the engines"
        self._seed_agents(jobs)
        # Finished episodes and scores. Each arrives some time: agents and rewards have deadlines of their own.
        done: SimpleQueue[tuple[_Pending, int | None, Future[Any]]] = SimpleQueue()

        def report(pending: _Pending, sample: int | None, future: Future[Any]) -> None:
            future.add_done_callback(lambda future: done.put((pending, sample, future)))

        pendings = [_Pending(job, [None] * job.num_samples, job.num_samples) for job in jobs]
        samples = [(pending, sample) for pending in pendings for sample in range(pending.job.num_samples)]
        requests = [
            (pending.job.prompt, SampleKey(pending.job.epoch, pending.job.prompt.index, sample))
            for pending, sample in samples
        ]
        for (pending, sample), episode in zip(samples, self._agents.submit_many(requests, sampling), strict=True):
            report(pending, sample, episode)
        is_judged = jobs[0].epoch == EVALUATION and self._eval_reward is not None
        waits_for_model = self._settings.has_reward_model and not is_judged
        function = self._eval_reward if is_judged else self._reward
        facts: dict[GroupKey, GroupFacts] = {}
        num_complete = 0
        while max(num_complete, len(facts)) < len(jobs):
            pending, finished, future = done.get()
            if finished is None:
                facts[pending.job.key] = self._finish(pending, future.result())
                if len(facts) == 1:
                    faults.reach("evaluation.during" if pending.job.epoch == EVALUATION else "group.first")
                continue
            outcome = future.result()
            if is_judged and isinstance(outcome, ScoredEpisode):
                outcome = outcome.episode  # the agent's own reward does not count
            pending.outcomes[finished] = outcome
            pending.num_open -= 1
            if pending.num_open == 0 and waits_for_model:
                num_complete += 1
            elif pending.num_open == 0:
                report(pending, None, _score(pending, function))
                faults.reach("scoring.during")
        if waits_for_model:
            self._unscored = pendings
            return []
        return [facts[job.key] for job in jobs]

    def to_score(self, rank: int, num_ranks: int) -> MicroBatch:
        """Return the tokens that one rank of the reward model scores: every `num_ranks`-th of the waiting episodes."""
        episodes = [outcome for each in self._unscored for outcome in each.outcomes if isinstance(outcome, Episode)]
        mine = episodes[rank::num_ranks]
        sequences = [self._for_reward_model(episode) for episode in mine]
        return MicroBatch.from_segments(sequences, None, [str(episode.key) for episode in mine])

    def take_rewards(self, rewards: Mapping[str, float]) -> list[GroupFacts]:
        """Complete the groups of the last `collect` with the reward model's rewards, by sample id."""
        pendings, self._unscored = self._unscored, []

        def score(outcome: Episode) -> Score | Failed:
            reward = rewards[str(outcome.key)]
            return Score(reward, reward) if math.isfinite(reward) else Failed(f"the reward model gave {reward}")

        return [
            self._finish(pending, [score(each) for each in pending.outcomes if isinstance(each, Episode)])
            for pending in pendings
        ]

    def _for_reward_model(self, episode: Episode) -> Tensor:
        """Return the tokens of the last segment, which ends the episode: [num_tokens].

        Text is tokenised retokenized for a reward model with a tokenizer of its own.
        """
        token_ids = episode.segments[-1].token_ids
        if self._reward_tokenizer is None:
            return token_ids
        text = self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True)
        retokenized = list(self._reward_tokenizer(text)["input_ids"])
        end = self._reward_tokenizer.eos_token_id
        if end is not None and not episode.is_truncated and retokenized[-1:] != [end]:
            retokenized.append(end)  # reward models put the reward of an answer at its end token
        return torch.tensor(retokenized)

    def share(self, keys: Sequence[GroupKey], steps: Sequence[Sequence[int]]) -> Share:
        """Return groups for one rank, with the optimizer step of each sample."""
        return Share(tuple(self._groups[key] for key in keys), tuple(tuple(group) for group in steps))

    def forget(self, keys: Sequence[GroupKey]) -> None:
        for key in keys:
            self._groups.pop(key, None)

    def sample_records(self, samples: Sequence[SampleKey]) -> list[SampleRecord]:
        """Return records of some samples that this host holds, for people to read."""
        records = []
        for key in samples:
            group = self._groups[key.epoch, key.prompt]
            [sample] = [sample for sample in group.samples if sample.episode.key == key]
            records.append(record_of(sample, group.prompt, self._tokenizer))
        return records

    def close(self) -> None:
        if self._agents is not None:
            self._agents.close()
        for function in (self._reward, self._eval_reward):
            if function is not None:
                function.close()

    def _seed_agents(self, jobs: Sequence[Job]) -> None:
        """Seed the global generators, so that agents that use them in the same order draw the same after a resume."""
        seed = SampleKey(*jobs[0].key, 0).seed(self._settings.run_seed, -1)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # not torch's: in process mode the trainer uses it too

    def _finish(self, pending: _Pending, scores: Sequence[Score | Failed]) -> GroupFacts:
        answers = iter(scores)
        samples: list[ScoredEpisode] = []
        failures: list[tuple[int, str]] = []
        for position, outcome in enumerate(pending.outcomes):
            if isinstance(outcome, Episode):
                answer = next(answers)
                if isinstance(answer, Failed):
                    failures.append((position, answer.reason))
                else:
                    samples.append(ScoredEpisode(outcome, answer.reward, answer.score, answer.extra))
            elif isinstance(outcome, Failed):
                failures.append((position, outcome.reason))
            else:
                samples.append(outcome)
        job = pending.job
        self._groups[job.key] = PromptGroup(job.prompt, tuple(samples), len(failures))
        return GroupFacts(
            epoch=job.epoch,
            prompt=job.prompt.index,
            source=job.prompt.source,
            samples=tuple(sample.episode.key.sample for sample in samples),
            rewards=tuple(sample.reward for sample in samples),
            scores=tuple(sample.score for sample in samples),
            num_sampled=tuple(sum(int(s.mask.sum()) for s in sample.episode.segments) for sample in samples),
            num_tokens=tuple(sum(len(s.token_ids) for s in sample.episode.segments) for sample in samples),
            truncated=tuple(sample.episode.is_truncated for sample in samples),
            failures=tuple(failures),
            extra=tuple(dict(sample.extra) for sample in samples),
        )


def _reward_function(path: str, settings: HostSettings) -> RewardFunction:
    return RewardFunction(
        path,
        timeout_s=settings.reward_timeout_s,
        retries=settings.reward_retries,
        max_memory_bytes=settings.reward_max_bytes,
        seed=settings.run_seed,
    )


def _score(pending: _Pending, function: RewardFunction | None) -> Future[Any]:
    """Score the episodes of a group without a reward from their agent, in one call of the reward function."""
    episodes = [outcome for outcome in pending.outcomes if isinstance(outcome, Episode)]
    if not episodes:
        nothing: Future[Any] = Future()
        nothing.set_result([])
        return nothing
    if function is None:
        missing: Future[Any] = Future()
        missing.set_result([Failed("the agent gave no reward, and the run has no reward function")] * len(episodes))
        return missing
    prompt = pending.job.prompt
    return function.submit(
        [episode.query for episode in episodes],
        [prompt.text] * len(episodes),
        [prompt.label] * len(episodes),
        [str(episode.key) for episode in episodes],
    )
