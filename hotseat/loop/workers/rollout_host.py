"""The process between driver and engines: it runs agents, scores groups as they complete, and keeps their tensors.

The driver gets facts. Groups stay here until the actor's ranks fetch their share. Where a reward model or a judge with
engines of its own scores, they wait for its turn (`waiting_groups.py`).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hotseat import faults
from hotseat.agents import AgentHost, OpenRequests
from hotseat.cluster import WorkerGroup
from hotseat.errors import RunError
from hotseat.loop.devices.held_memory import DeviceWorker, Held
from hotseat.loop.workers.collecting import Collecting, OpenGroup, Scoring
from hotseat.loop.workers.engine_client import EngineClient, TakesRequests, engines_of_host
from hotseat.loop.workers.experience import Share
from hotseat.loop.workers.group_facts import EVALUATION, Fetched, GivenUp, GroupFacts, GroupKey, Job
from hotseat.loop.workers.group_store import GroupStore
from hotseat.loop.workers.host_settings import HostSettings, make_agent, make_eval_scorer, make_scorer
from hotseat.loop.workers.hosted_code import HostedCode
from hotseat.loop.workers.records import SampleRecord, record_of
from hotseat.loop.workers.simulation import Player
from hotseat.loop.workers.spool import Finished, Spool
from hotseat.loop.workers.waiting_groups import WaitingGroups
from hotseat.rewards import Score
from hotseat.types import Failed, MicroBatch, Moved, SampleKey, Sampling

# What a host adds to the share of one rank: groups, the optimizer step of each of their samples, and the positions of
# these groups among all of the rank's; empty: it has no others.
HostShare = tuple[Sequence[GroupKey], Sequence[Sequence[int]], Sequence[int]]


class RolloutHost(DeviceWorker):
    """Runs agents and rewards in a process of their own: user code may block, crash or keep globals."""

    max_concurrency = 4  # a fetch waits; groups are shared and forgotten meanwhile
    garbage_threshold = 20_000  # it makes some 100 objects for each of thousands of samples, hardly any in cycles

    def __init__(self, settings: HostSettings):
        tokenizer = settings.tokenizer.tokenizer()
        self._player: Player | None = None
        if settings.simulation is not None:
            self._player = Player(settings.simulation, tokenizer, settings.max_length)
        self._agent = self._player or make_agent(settings, tokenizer)
        self._settings = settings
        self._agents: AgentHost | None = None
        self._code = HostedCode(settings)
        self._reward = make_scorer(settings.scorers)
        self._eval_reward = make_eval_scorer(settings.scorers)
        self._tokenizer = tokenizer
        self._waiting = WaitingGroups(tokenizer, settings.reward_tokenizer, settings.scorers.judge)
        kept = None if settings.kept_rollouts is None else Path(settings.kept_rollouts)
        self._store = GroupStore(None if settings.spool is None else Spool(Path(settings.spool), kept))
        self._changed = threading.Condition()  # the lock of what follows
        self._finished: list[GroupFacts] = []  # to be fetched
        self._to_be_scored: list[OpenGroup] = []  # by a reward model, after those in `_waiting`
        self._current: _Serving | None = None
        self._collection: _Collection | None = None
        self._deaths: list[RunError] = []  # of engines
        self._lost: RunError | None = None  # the last of them, until its engine is replaced
        self._has_engines = True
        self._is_hurried = False
        self._given_up: list[GivenUp] = []
        self._client: EngineClient | None = None

    def sees(self, path: str) -> bool:
        return Path(path).is_file()

    def connect(self, client: str, engines: WorkerGroup[TakesRequests], num_hosts: int = 1, rank: int = 0) -> None:
        """Connect to the engines, at the start of a run. Called again, everything in progress ends.

        client: the name under which requests are sent, another one for every connection. num_hosts: those that share
        the places for episodes. rank: of this one.
        """
        settings = self._settings
        with self._changed:
            if self._current is not None:
                self._current.collecting.interrupt(RunError("the rollout host is closed"))
            self._current = self._collection = None  # what was in progress ends with the agents
            self._lost, self._has_engines = None, True
        if self._agents is not None:
            self._agents.close()
        if self._player is not None:
            self._player.begin_anew()
        self._client = EngineClient(
            engines,
            client,
            timeout_s=settings.episode_timeout_s,
            when_lost=self._lose,
            preferred=() if settings.simulation is None else engines_of_host(rank, num_hosts, engines.size),
        )
        crashes = self._code.crashes(f"host-{rank}") if self._agent.runs_here else None
        self._agents = AgentHost(
            self._agent,
            self._client.generate,
            run_seed=settings.run_seed,
            max_concurrent=(
                -(-settings.max_concurrent * engines.size // num_hosts)
                if settings.simulation is None
                else settings.simulation.env.num_envs
            ),
            timeout_s=settings.episode_timeout_s,
            requests=OpenRequests(self._client.abort, self._client.listen),
            deadlines=settings.deadlines,
            crashes=crashes,
            output=self._code.output(f"agents-{rank}.log"),
            when_broken=self._code.end_process,
        )

    @property
    def has_to_be_replaced(self) -> bool:
        """Whether an agent has made this host useless, which is the end of its process where that is its own."""
        return self._agents is not None and self._agents.is_broken

    def connect_judge(self, client: str, engines: WorkerGroup[TakesRequests], num_hosts: int = 1) -> None:
        """Connect to the engines of the judge, as `connect` does to those of the policy."""
        self._waiting.connect_judge(client, engines, num_hosts)

    def rejoin(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int]) -> None:
        """Send requests to the engines of these ranks, which were replaced and have the weights that are served."""
        assert self._client is not None, "not connected to the engines"
        with self._changed:
            self._lost, self._has_engines = None, True
        self._client.rejoin(engines, ranks)

    def _lose(self, error: Exception, is_any_left: bool) -> None:
        """Report the death of an engine to whom it concerns. Called in the event loop of the agents."""
        lost = error if isinstance(error, RunError) else RunError(str(error))
        with self._changed:
            self._lost, self._has_engines = lost, is_any_left
            self._deaths.append(lost)
            self._changed.notify_all()
            if self._collection is not None and not is_any_left:
                self._collection.collecting.interrupt(lost)

    def collect(self, jobs: Sequence[Job], sampling: Sampling, num_needed: int | None = None) -> list[GroupFacts]:
        """Have every job answered and scored, and return the facts of the groups in the order of the jobs.

        A group is scored as soon as it is complete, while others are still generated. Where a reward model or a judge
        on engines of its own scores, this returns nothing, and `take_rewards` or `judge` returns the facts later.

        num_needed: how many groups are enough, those that are complete first. The others go on until the host is
        connected anew; `given_up` has them. Raises if no engine is left. A repeated call continues what is in progress,
        and samples nothing again that was answered since the last `forget`.
        """
        scoring = self._scoring(is_evaluation=jobs[0].epoch == EVALUATION)
        collection = self._collect(jobs, sampling, scoring)
        groups, facts = collection.groups, collection.facts
        keys, num_needed = {job.key for job in jobs}, len(jobs) if num_needed is None else num_needed
        while self._take_next(collection, keys, num_needed):
            pass
        first = set([key for key in groups if key in keys][:num_needed])  # `groups` is in the order of completion
        self._given_up = [group.given_up for key, group in collection.collecting.open.items() if key in keys]
        jobs = [job for job in jobs if job.key in first]
        if scoring.waits_for_model:
            with self._changed:
                # Groups of training are scored after this evaluation; an evaluation that is repeated replaces its own.
                ahead = [group for group in self._waiting.groups if group.job.epoch != EVALUATION]
                self._to_be_scored = ahead + self._to_be_scored
                self._waiting.groups = [groups[job.key] for job in jobs]
            return []
        return [facts[job.key] for job in jobs]

    def given_up(self) -> list[GivenUp]:
        """Return the groups that the last `collect` did not wait for."""
        return self._given_up

    def _check_engines(self) -> None:
        with self._changed:
            if not self._has_engines and self._lost is not None:
                raise self._lost

    def _collect(self, jobs: Sequence[Job], sampling: Sampling, scoring: Scoring) -> _Collection:
        assert self._agents is not None, "not connected to the engines"
        self._check_engines()
        with self._changed:
            if self._collection is None or self._collection.scoring != scoring:
                self._collection = _Collection(Collecting(self._agents, scoring, faults.reach), scoring)
            collection = self._collection
        new = [job for job in jobs if job.key not in collection.begun]
        if new:
            self._seed_agents(new)
            collection.begun |= {job.key for job in new}
            collection.collecting.add(new, sampling)
        return collection

    def _take_next(self, collection: _Collection, keys: set[GroupKey], num_needed: int) -> bool:
        """Wait for one more group, and return True; or return False if enough of these are answered already.

        The lock is there for an earlier call that still waits for the same groups, though its caller has gone on: it
        repeats its work when another host has died.
        """
        groups, facts = collection.groups, collection.facts
        with collection.lock:
            if len(groups.keys() & keys) >= num_needed:
                return False
            if collection.error is not None:  # which an earlier call got
                raise collection.error
            group, scores = self._next_of(collection)
            groups[group.job.key] = group
            if scores is not None:
                facts[group.job.key] = self._store.add(group.finished(scores))
                if len(facts) == 1:
                    faults.reach("evaluation.during" if group.job.epoch == EVALUATION else "group.first")
            return True

    def _next_of(self, collection: _Collection) -> tuple[OpenGroup, list[Score | Failed] | None]:
        while True:
            self._check_engines()
            try:
                return collection.collecting.next()
            except Exception as error:
                if error is self._lost:
                    raise
                if not any(error is death for death in self._deaths):  # of an engine that is replaced by now
                    collection.error = error
                    self._collection = None
                    raise

    # --- rollout beside training --------------------------------------------------------------------------------------

    def begin(self, jobs: Sequence[Job], sampling: Sampling) -> list[GroupKey]:
        """Start jobs and return at once; `fetch` has their facts. Return the keys of those that are sampled now.

        What has finished already is not sampled again, nor what is in progress.
        """
        assert self._store.has_spool, "a host without a spool"
        new = []
        with self._changed:
            serving = self._serving()
            known = {facts.key for facts in self._finished} | serving.open
            known |= {group.job.key for group in (*self._waiting.groups, *self._to_be_scored)}
            for job in jobs:
                if job.key in known:
                    continue
                finished = self._store.spooled(job.key)
                if finished is None:
                    new.append(job)
                else:
                    self._keep(finished)
            serving.open |= {job.key for job in new}
        serving.collecting.add(new, sampling)
        return [job.key for job in new]

    def fetch(self, wait_s: float, at_least: int = 1, *, reports_deaths: bool = True) -> Fetched:
        """Report groups that have finished.

        Waits until there are `at_least` so many, for at most `wait_s`, or until `hurry` is called. Once all that have
        finished are reported, raises the error that ended the work on the others, or the death of an engine whose
        replacement has not rejoined yet; without `reports_deaths` only if no engine is left.
        """
        assert self._client is not None, "not connected to the engines"
        with self._changed:
            serving = self._serving()

            def error() -> Exception | None:
                return serving.error or (self._lost if reports_deaths or not self._has_engines else None)

            def is_done() -> bool:
                num_finished = len(self._finished) + len(self._to_be_scored)
                return num_finished >= at_least or self._is_hurried or error() is not None

            self._changed.wait_for(is_done, timeout=wait_s)
            self._is_hurried = False
            facts, self._finished = self._finished, []
            self._waiting.groups += self._to_be_scored
            self._to_be_scored = []
            if not facts and not self._waiting.groups and (raised := error()) is not None:
                raise raised
            return Fetched(facts, len(self._waiting.groups), self._client.num_sent_again)

    def hurry(self) -> None:
        """Have the current or the next `fetch` return at once."""
        with self._changed:
            self._is_hurried = True
            self._changed.notify_all()

    def _serving(self) -> _Serving:
        """Return the work in progress beside training, begun when it is first asked for after `connect`."""
        with self._changed:
            if self._current is None:
                assert self._agents is not None, "not connected to the engines"
                collecting = Collecting(self._agents, self._scoring(is_evaluation=False), faults.reach)
                self._current = _Serving(collecting)
                threading.Thread(target=self._serve, args=(self._current,), name="collecting", daemon=True).start()
            return self._current

    def _serve(self, serving: _Serving) -> None:
        """Finish groups as they complete, until one raises or the host is connected anew. A thread of its own."""
        try:
            while True:
                group, scores = serving.collecting.next()
                with self._changed:
                    if self._current is not serving:
                        return  # the same jobs were begun again
                    serving.open.discard(group.job.key)
                    if scores is None:
                        self._to_be_scored.append(group)
                        self._changed.notify_all()
                    else:
                        self._keep(group.finished(scores))
                faults.reach("group.first")
        except Exception as error:
            with self._changed:
                serving.error = error
                self._changed.notify_all()

    def _keep(self, finished: Finished) -> None:
        """Store a group, and then report it. Called under the lock."""
        self._finished.append(self._store.add(finished))
        self._changed.notify_all()

    def _scoring(self, *, is_evaluation: bool) -> Scoring:
        uses_eval_reward = is_evaluation and self._eval_reward is not None
        judge = self._settings.scorers.judge
        is_model = self._settings.has_reward_model or (judge is not None and judge.engine is not None)
        return Scoring(
            self._eval_reward if uses_eval_reward else self._reward,
            self._tokenizer,
            waits_for_model=is_model and not uses_eval_reward,
            ignores_agents=uses_eval_reward,
        )

    # --- reward models, and what becomes of groups --------------------------------------------------------------------

    def to_score(self, rank: int, num_ranks: int) -> MicroBatch:
        """Return the tokens that one rank of the reward model scores."""
        return self._waiting.to_score(rank, num_ranks)

    def take_rewards(self, rewards: Mapping[str, float]) -> list[GroupFacts]:
        """Complete the groups that waited with the reward model's rewards, by sample id."""
        return [self._store.add(group.finished(scores)) for group, scores in self._waiting.take_scored(rewards)]

    def judge(self) -> list[GroupFacts]:
        """Have the judge's engines judge the groups that wait; return their facts. Raises the death of an engine."""
        return [self._store.add(group.finished(scores)) for group, scores in self._waiting.take_judged()]

    def change_rewards(self, rewards: Mapping[GroupKey, Sequence[float]]) -> None:
        """Replace the rewards of samples, by group, in the order of its samples."""
        self._store.change_rewards(rewards)

    def shares(self, wanted: Sequence[HostShare]) -> list[Share]:
        """Return groups for ranks, with the optimizer step of each sample."""
        return [
            Share(tuple(map(self._store.group, keys)), tuple(map(tuple, steps)), tuple(positions))
            for keys, steps, positions in wanted
        ]

    def forget(self, keys: Sequence[GroupKey]) -> None:
        self._collection = None
        self._store.forget(keys)

    def forget_all(self) -> None:
        """Drop every group, finished or not: the run goes back to a checkpoint. The driver restores the spool."""
        with self._changed:
            self._store.clear()
            self._finished, self._to_be_scored, self._given_up = [], [], []
            self._waiting.groups = []

    def sample_records(self, samples: Sequence[SampleKey]) -> list[SampleRecord]:
        """Return records of some samples that this host holds, for people to read."""
        records = []
        for key in samples:
            group = self._store.group((key.epoch, key.prompt))
            [sample] = [sample for sample in group.samples if sample.episode.key == key]
            records.append(record_of(sample, group.prompt, self._tokenizer))
            if self._player is not None and len(records) <= self._player.num_films:
                assert isinstance(group.prompt.label, str)
                if (film := self._player.film(group.prompt.label, sample.episode)) is not None:
                    records[-1]["film"] = film
        return records

    def close(self) -> None:
        with self._changed:
            if self._current is not None:
                self._current.collecting.interrupt(RunError("the rollout host is closed"))
        if self._agents is not None:
            self._agents.close()
        for scorer in (self._reward, self._eval_reward, self._waiting):
            if scorer is not None:
                scorer.close()
        if self._player is not None:
            self._player.end()
        self._code.close()

    # --- a role with devices: env -------------------------------------------------------------------------------------

    def offload(self, parts: Sequence[Any], keep_weights: bool = True) -> Moved:
        """Take simulators off the device. Their episodes end within a rollout, so none is open then."""
        return super().offload(parts) if self._player is None else self._player.offload()

    def onload(self, parts: Sequence[Any]) -> Moved:
        return super().onload(parts) if self._player is None else self._player.onload()

    def release_cache(self) -> None:
        """Return unused allocator cache to the device: this process allocates nothing there."""

    def held(self) -> Held:
        """Return the device memory of this process, in which simulators do not run."""
        return Held(0, 0)

    def _seed_agents(self, jobs: Sequence[Job]) -> None:
        """Seed the global generators, so that agents that use them in the same order draw the same after a resume."""
        seed = SampleKey(*jobs[0].key, 0).seed(self._settings.run_seed, -1)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # not torch's: in process mode the trainer uses it too


@dataclass
class _Serving:
    """Sampling and scoring that go on beside training, for `begin` and `fetch`."""

    collecting: Collecting
    open: set[GroupKey] = field(default_factory=set)  # groups that are not finished
    error: Exception | None = None  # that ended it


@dataclass
class _Collection:
    """Jobs of `collect` since the last `forget`, and their results so far."""

    collecting: Collecting
    scoring: Scoring
    begun: set[GroupKey] = field(default_factory=set)
    groups: dict[GroupKey, OpenGroup] = field(default_factory=dict)
    facts: dict[GroupKey, GroupFacts] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)  # held while waiting for the next group
    error: Exception | None = None  # of an episode, whose group will never be complete
