"""The worker groups of a reinforcement run, by role; which rollout host works on which group of prompts."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hotseat.cluster import Pending, WorkerGroup, as_arguments
from hotseat.cluster.local import LocalGroup
from hotseat.cluster.runtime import Launch
from hotseat.errors import RunError
from hotseat.loop.workers.engine_client import TakesRequests
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.folder_proof import FolderProof
from hotseat.loop.workers.group_facts import Fetched, GivenUp, GroupFacts, GroupKey, Job
from hotseat.loop.workers.model_workers import ActorWorker, InferenceWorker, ModelWorker
from hotseat.loop.workers.records import SampleRecord
from hotseat.loop.workers.rollout_host import HostShare, RolloutHost
from hotseat.loop.workers.value_models import CriticWorker, RewardWorker
from hotseat.placement import Part, Plan
from hotseat.registry.roles import role_entry
from hotseat.types import SampleKey, Sampling

if TYPE_CHECKING:
    from hotseat.loop.rl.role_records import RoleRecord


@dataclass(frozen=True)
class ShareOfRank:
    """Groups that one rank learns from, and the optimizer step of each sample of each of them."""

    keys: Sequence[GroupKey]
    steps: Sequence[Sequence[int]]


T = TypeVar("T")
R = TypeVar("R")
_NO_ENGINES = LocalGroup(Launch("rollout", EngineWorker, (), lambda node: {}, 1, 1, 1.0, 1.0), lambda rank: {})


class RolloutHosts:
    """Deals groups to hosts, and puts together what they answer. `workers`: their processes."""

    def __init__(self, workers: WorkerGroup[RolloutHost]):
        self.workers = workers
        self._host_of: dict[GroupKey, int] = {}
        self._num_connections = 0
        self._clients: dict[int, str] = {}  # by host: the name under which it sends requests to engines
        self._judge_clients: dict[int, str] = {}  # the same for the judge's engines

    def connect(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int] | None = None) -> list[str]:
        """Connect hosts of these ranks, or all, to the engines; return the names under which hosts send requests."""
        new = self._named(self._clients, "host", ranks)
        connecting = [
            self.workers.on(rank).start(RolloutHost.connect, name, engines, self.workers.size, rank)
            for rank, name in new.items()
        ]
        for each in connecting:
            each.result()
        return list(self._clients.values())

    def connect_judge(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int] | None = None) -> list[str]:
        """Connect hosts of these ranks, or all, to the judge's engines, as `connect` does to the policy's."""
        new = self._named(self._judge_clients, "judge-of-host", ranks)
        self.workers.on(*new).scatter(RolloutHost.connect_judge, list(new.values()), engines, self.workers.size)
        return list(self._judge_clients.values())

    def _named(self, clients: dict[int, str], prefix: str, ranks: Sequence[int] | None) -> dict[int, str]:
        """Give hosts of these ranks, or all, new names for their requests, and return these in order of rank."""
        first = self._num_connections + 1
        chosen = sorted(self.workers.ranks if ranks is None else ranks)
        new = {rank: f"{prefix}-{rank}-{number}" for number, rank in enumerate(chosen, start=first)}
        self._num_connections += len(new)
        clients |= new
        return new

    def rejoin(self, engines: WorkerGroup[TakesRequests], ranks: Sequence[int]) -> None:
        """Have all hosts send requests to the engines of these ranks, which were replaced."""
        self.workers.call(RolloutHost.rejoin, engines, ranks)

    # --- sampling -----------------------------------------------------------------------------------------------------

    def collect(self, jobs: Sequence[Job], sampling: Sampling, num_needed: int | None = None) -> list[GroupFacts]:
        """Have jobs answered and scored; return facts in the order of the jobs, or none if a model scores.

        num_needed: how many of them are enough. Each host waits for its part of them, those that are complete first.
        """
        dealt = self._dealt(jobs, [job.key for job in jobs])
        if len(dealt) == 1:
            [(rank, mine)] = dealt.items()
            answers = self.workers.on(rank).call(RolloutHost.collect, mine, sampling, num_needed)
        elif num_needed is None:
            answers = self.workers.on(*dealt).scatter(RolloutHost.collect, list(dealt.values()), sampling)
        else:
            parts = shares_of(num_needed, [len(mine) for mine in dealt.values()])
            started = {
                rank: self.workers.on(rank).start(RolloutHost.collect, mine, sampling, part)
                for (rank, mine), part in zip(dealt.items(), parts, strict=True)
            }
            answers = [answer for _, answer in _answers(started)]
        return in_order_of(jobs, [facts for answer in answers for facts in answer])

    def given_up(self) -> list[GivenUp]:
        """Return the groups that the last `collect` did not wait for."""
        return [each for mine in self.workers.call(RolloutHost.given_up) for each in mine]

    def begin(self, jobs: Sequence[Job], sampling: Sampling) -> Iterator[tuple[list[GroupKey], list[GroupKey]]]:
        """Begin jobs; yield for each host the keys of its jobs, and of those among them that it has begun to sample.

        Raises the failure of a host, after the answers of the others.
        """
        dealt = self._dealt(jobs, [job.key for job in jobs])
        started = {rank: self.workers.on(rank).start(RolloutHost.begin, mine, sampling) for rank, mine in dealt.items()}
        for rank, sampled in _answers(started):
            yield [job.key for job in dealt[rank]], sampled

    def fetch(self, wait_s: float, at_least: int, *, reports_deaths: bool) -> Iterator[Fetched]:
        """Yield what each host has finished, waiting for `at_least` groups of all hosts, at most `wait_s`.

        Raises the failure of a host, after the answers of the others.
        """
        # Of so many groups one host has at least its part.
        part = -(-at_least // self.workers.size)
        started = {
            rank: self.workers.on(rank).start(RolloutHost.fetch, wait_s, part, reports_deaths=reports_deaths)
            for rank in self.workers.ranks
        }
        if len(started) > 1:
            futures = [future for pending in started.values() for future in pending.futures.values()]
            concurrent.futures.wait(futures, wait_s, concurrent.futures.FIRST_COMPLETED)
            for rank, pending in started.items():
                if not pending.done():
                    self.workers.on(rank).start(RolloutHost.hurry)
        for _, fetched in _answers(started):
            yield fetched

    # --- finished groups ----------------------------------------------------------------------------------------------

    def shares(self, wanted: Sequence[ShareOfRank]) -> list[list[Any]]:
        """Return for each rank references to its shares, one for each host that has some of its groups.

        Every host is called once, however many ranks there are.
        """
        keys = [key for share in wanted for key in share.keys]
        self._dealt(keys, keys)
        asked: dict[int, list[HostShare]] = {}
        ranks: dict[int, list[int]] = {}  # by host: whose shares these are
        for rank, share in enumerate(wanted):
            members: dict[int, list[int]] = {}
            for at, key in enumerate(share.keys):
                members.setdefault(self._host_of[key], []).append(at)
            for host, mine in sorted((members or {0: []}).items()):
                positions = tuple(mine) if len(members) > 1 else ()
                part = [share.keys[at] for at in mine], [share.steps[at] for at in mine], positions
                asked.setdefault(host, []).append(part)
                ranks.setdefault(host, []).append(rank)
        started = {
            host: self.workers.on(host).start_and_keep_each(RolloutHost.shares, len(mine), mine)
            for host, mine in sorted(asked.items())
        }
        refs: list[list[Any]] = [[] for _ in wanted]
        for host, kept in _answers(started):
            for rank, ref in zip(ranks[host], kept, strict=True):
                refs[rank].append(ref.as_argument())
        return refs

    def to_score(self, rank: int, num_ranks: int) -> list[Any]:
        """Return references to what one rank of a reward model has to score, one for each host."""
        return as_arguments(self.workers.call_and_keep(RolloutHost.to_score, rank, num_ranks))

    def take_rewards(self, rewards: Mapping[str, float]) -> list[GroupFacts]:
        """Complete groups with a reward model's rewards, by sample id."""
        return [facts for answer in self.workers.call(RolloutHost.take_rewards, rewards) for facts in answer]

    def change_rewards(self, rewards: Mapping[GroupKey, Sequence[float]]) -> None:
        """Replace the rewards of samples, by group, in the order of its samples."""
        for rank, keys in self._dealt(rewards, list(rewards)).items():
            self.workers.on(rank).call(RolloutHost.change_rewards, {key: rewards[key] for key in keys})

    def judge(self) -> list[GroupFacts]:
        """Have the judge's engines judge the groups that wait, and complete them with its verdicts."""
        return [facts for answer in self.workers.call(RolloutHost.judge) for facts in answer]

    def sample_records(self, samples: Sequence[SampleKey]) -> list[SampleRecord]:
        """Return records of some samples, in their order."""
        dealt = self._dealt(samples, [(key.epoch, key.prompt) for key in samples])
        if not dealt:
            return []
        answers = self.workers.on(*dealt).scatter(RolloutHost.sample_records, list(dealt.values()))
        records = {
            key: record
            for mine, answer in zip(dealt.values(), answers, strict=True)
            for key, record in zip(mine, answer, strict=True)
        }
        return [records[key] for key in samples]

    def forget(self, keys: Sequence[GroupKey]) -> None:
        """Drop groups. Every host is called, also one that has none of them: a batch ends with this."""
        dealt = self._dealt(keys, keys)
        self.workers.scatter(RolloutHost.forget, [dealt.get(rank, []) for rank in self.workers.ranks])
        for key in keys:
            self._host_of.pop(key, None)

    def forget_all(self) -> None:
        """Drop all groups that hosts hold. What they do was ended before, by `connect`."""
        self.workers.call(RolloutHost.forget_all)
        self._host_of.clear()

    # --- dealing ------------------------------------------------------------------------------------------------------

    def _dealt(self, items: Iterable[T], keys: Sequence[GroupKey]) -> dict[int, list[T]]:
        """Sort items, which belong to the groups of these keys, by host, in ascending order of hosts.

        A group without a host goes to the one that has the fewest.
        """
        load = Counter(dict.fromkeys(self.workers.ranks, 0))
        load.update(self._host_of.values())
        dealt: dict[int, list[T]] = {}
        for item, key in zip(items, keys, strict=True):
            if key not in self._host_of:
                rank = min(self.workers.ranks, key=lambda rank: load[rank])
                self._host_of[key] = rank
                load[rank] += 1
            dealt.setdefault(self._host_of[key], []).append(item)
        return dict(sorted(dealt.items()))


def _answers(started: Mapping[int, Pending[R]]) -> Iterator[tuple[int, R]]:
    failure: RunError | None = None
    for rank, pending in started.items():
        try:
            [answer] = pending.result()
        except RunError as error:
            failure = failure or error
        else:
            yield rank, answer
    if failure is not None:
        raise failure


def in_order_of(jobs: Sequence[Job], facts: Sequence[GroupFacts]) -> list[GroupFacts]:
    """Sort the facts of some of these jobs in their order."""
    by_key = {each.key: each for each in facts}
    return [by_key[job.key] for job in jobs if job.key in by_key]


def shares_of(num: int, sizes: Sequence[int]) -> list[int]:
    """Share out a number by sizes, as evenly as whole numbers allow."""
    ends = [num * end // sum(sizes) for end in itertools.accumulate(sizes)]
    return [end - begin for begin, end in itertools.pairwise([0, *ends])]


@dataclass(frozen=True)
class Groups:
    """Worker groups of a run. `by_role`: each under the name of its role, in the order of their launch."""

    by_role: Mapping[str, WorkerGroup[Any]]
    hosts: RolloutHosts
    have_gpus: bool  # the actor trains on GPUs
    measures_its_device: bool  # a starting engine takes a share of the free memory that it measures on its device
    offloaded: Mapping[str, Sequence[Part]] = field(default_factory=dict)  # by role: parts off its devices now
    adapters_alone: bool = False  # engines get adapters apart from the weights below them
    records: tuple[RoleRecord, ...] = ()  # of these roles
    folder_proof: FolderProof | None = None  # what ranks prove before they load a model that is saved

    @property
    def engines(self) -> WorkerGroup[EngineWorker]:
        """Return the policy's engines: without processes in a replay."""
        return self.by_role.get("rollout", _NO_ENGINES)

    @property
    def judge(self) -> WorkerGroup[EngineWorker] | None:
        return self.by_role.get("judge")

    @property
    def actor(self) -> WorkerGroup[ActorWorker]:
        return self.by_role["actor"]

    @property
    def critic(self) -> WorkerGroup[CriticWorker] | None:
        return self.by_role.get("critic")

    @property
    def reference(self) -> WorkerGroup[ModelWorker] | None:
        return self.by_role.get("reference")

    @property
    def reward(self) -> WorkerGroup[RewardWorker] | None:
        return self.by_role.get("reward")

    @property
    def inference(self) -> WorkerGroup[InferenceWorker] | None:
        return self.by_role.get("inference")

    @property
    def models(self) -> dict[str, WorkerGroup[ModelWorker]]:
        """Return the roles that hold a model behind a training backend, by name, in the order of their launch."""
        return {role: group for role, group in self.by_role.items() if role_entry(role).kind == "model"}

    def reconnect(self, ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the current engines; drop requests of earlier connections."""
        # Hosts first: an episode that is still waited for would fail when its request is dropped.
        connected = self.hosts.connect(self.engines, ranks)
        self.engines.call(EngineWorker.drop_requests, connected)
        if self.judge is not None and ranks is not None:  # all: engines changed, not hosts or the judge
            self.reconnect_judge(ranks)

    def reconnect_judge(self, ranks: Sequence[int] | None = None) -> None:
        """Connect hosts of these ranks, or all, to the judge's engines; drop requests of earlier connections."""
        assert self.judge is not None
        self.judge.call(EngineWorker.drop_requests, self.hosts.connect_judge(self.judge, ranks))

    def on_devices(self, plan: Plan) -> dict[str, WorkerGroup[Any]]:
        """Return the roles to which the plan assigns devices, by name, in the order of their launch."""
        planned = {role.name for role in plan.roles}
        return {role: group for role, group in self.by_role.items() if role in planned}
