"""A reinforcement run without processes, models and devices: fakes of all worker groups, and one log of what happens.

    case = Case("algorithm: {estimator: gae}", critic=1)
    case.log  # ["lease update/critic", "critic.update", "end update/critic", ...]

Every call to a group, every lease and every question to the canary is an entry, in the order in which they happen. A
host holds the groups that it sampled until it is told to forget them, and a host that is replaced holds nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

from hotseat.cluster import Ref, WorkerGroup
from hotseat.cluster.group import Pending
from hotseat.cluster.lease import Holder
from hotseat.cluster.refs import resolve
from hotseat.config import loads
from hotseat.config.batches import batch_algebra
from hotseat.errors import WorkerError
from hotseat.loop.devices.held_memory import DeviceWatch
from hotseat.loop.rl.groups import Groups, RolloutHosts
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phases import PreparePhase, SyncPhase, UpdatePhase
from hotseat.loop.rl.recovery import ENGINE, HOST, Recovery, Replaceable
from hotseat.loop.rl.rollout import RolloutRunner, evaluate
from hotseat.loop.rl.state import PhaseSettings, RlState
from hotseat.loop.rl.stream import SynchronousStream
from hotseat.loop.rl.sync import Pusher, Routes
from hotseat.loop.workers.group_facts import EVALUATION, GroupFacts, GroupKey, Job
from hotseat.loop.workers.records import SampleRecord, TokenRecord
from hotseat.loop.workers.rollout_host import HostShare
from hotseat.loop.workers.weight_check import WeightCheck
from hotseat.placement import PhaseStep
from hotseat.placement.flow import make_steps
from hotseat.planning.config_plan import make_flow, make_plan
from hotseat.train.backend import UpdateReport
from hotseat.types import Prompt, SampleKey
from hotseat.weights.transports import TransportPlan

Rewards = Callable[[GroupKey], Sequence[float | None]]  # of the samples of a group; None: it failed


class FakeRef(Ref[Any]):
    """A value that stayed where it was made, with the name of the rank that made it."""

    def __init__(self, maker: str, value: Any):
        self.maker, self.value = maker, value

    def get(self, *, timeout_s: float = 600.0) -> Any:
        return self.value


@dataclass(frozen=True)
class Call:
    """A call to some ranks of a group: what each was given, references unresolved."""

    method: str
    args: dict[int, tuple[Any, ...]]
    kwargs: dict[int, dict[str, Any]]


class FakeGroup(WorkerGroup[Any]):
    """Worker objects in this process, called at once, in rank order."""

    timeout_s = 1.0

    def __init__(self, name: str, make: Callable[[int], object], size: int, log: list[str]):
        self.name = name
        self.calls: list[Call] = []
        self.deaths: list[tuple[str, int]] = []  # (method, rank): whose process dies when it is called, once each
        self._make = make
        self._log = log
        self.workers = [make(rank) for rank in range(size)]
        self._is_alive = [True] * size

    @property
    def ranks(self) -> range:
        return range(len(self.workers))

    def named(self, method: str) -> list[Call]:
        return [call for call in self.calls if call.method == method]

    def states(self) -> list[str]:
        return ["running" if is_alive else "gone" for is_alive in self._is_alive]

    def kill(self, rank: int = 0) -> None:
        self._is_alive[rank] = False

    def restart(self, rank: int) -> None:
        self._log.append(f"restart {self.name} {rank}")
        self.workers[rank] = self._make(rank)
        self._is_alive[rank] = True

    def restart_all(self) -> None:
        for rank in self.ranks:
            self.restart(rank)

    def holders(self) -> tuple[Holder, ...]:
        return tuple(Holder(self.name, rank, None) for rank in self.ranks)

    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        self.is_closed = True

    def describe(self, rank: int) -> str:
        return "is a fake"

    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        return future.result()

    def _start(self, method: str, arguments: Any, timeout_s: float, keep: int | None = None) -> Pending[Any]:
        self._log.append(f"{self.name}.{method}")
        args = {rank: positional for rank, (positional, _) in arguments.items()}
        self.calls.append(Call(method, args, {rank: named for rank, (_, named) in arguments.items()}))
        futures: dict[int, Future[Any]] = {}
        for rank, (positional, named) in arguments.items():
            futures[rank] = future = Future()
            if (method, rank) in self.deaths:
                self.deaths.remove((method, rank))
                self.kill(rank)
            if not self._is_alive[rank]:
                error = WorkerError(f"{self.name} rank {rank} died")
                error.is_death = True
                future.set_exception(error)
                continue
            try:
                value = getattr(self.workers[rank], method)(*resolve(positional, 1.0), **resolve(named, 1.0))
            except WorkerError as error:
                future.set_exception(error)
            else:
                maker = f"{self.name}[{rank}]"
                kept = [FakeRef(maker, part) for part in value] if keep else FakeRef(maker, value)
                future.set_result(value if keep is None else kept)
        return Pending(self, method, futures, timeout_s)


# --- workers ----------------------------------------------------------------------------------------------------------


class FakeHost:
    """Samples groups, and scores them, except where a reward model has to: in training, in evaluation or in both."""

    def __init__(self, rewards: Rewards, is_scored: bool, is_evaluation_scored: bool):
        self._rewards = rewards
        self._is_scored = {False: is_scored, True: is_evaluation_scored}
        self.held: dict[GroupKey, GroupFacts] = {}
        self._unscored: list[Job] = []

    def connect(self, client: str, engines: object, num_hosts: int = 1, rank: int = 0) -> None:
        """Nothing to remember: it samples by itself."""

    def collect(self, jobs: Sequence[Job], sampling: object, num_needed: int | None = None) -> list[GroupFacts]:
        if not self._is_scored[jobs[0].epoch == EVALUATION]:
            self._unscored = list(jobs)
            return []
        return [self._hold(job, self._rewards(job.key)) for job in jobs]

    def to_score(self, rank: int, num_ranks: int) -> list[GroupKey]:
        return [job.key for job in self._unscored[rank::num_ranks]]

    def take_rewards(self, rewards: dict[str, float]) -> list[GroupFacts]:
        def of(job: Job) -> list[float]:
            return [rewards[str(SampleKey(*job.key, sample))] for sample in range(job.num_samples)]

        return [self._hold(job, of(job)) for job in self._unscored]

    def shares(self, wanted: Sequence[HostShare]) -> list[tuple[GroupKey, ...]]:
        for keys, _, _ in wanted:
            for key in keys:
                assert key in self.held, f"the host holds no group {key}"
        return [tuple(keys) for keys, _, _ in wanted]

    def forget(self, keys: Sequence[GroupKey]) -> None:
        for key in keys:
            self.held.pop(key, None)

    def sample_records(self, samples: Sequence[SampleKey]) -> list[SampleRecord]:
        return [record_of(key, self.held[key.epoch, key.prompt]) for key in samples]

    def _hold(self, job: Job, rewards: Sequence[float | None]) -> GroupFacts:
        self.held[job.key] = facts_of(job.key, rewards[: job.num_samples], job.prompt.source)
        return self.held[job.key]


def facts_of(key: GroupKey, rewards: Sequence[float | None], source: str = "", num_tokens: int = 5) -> GroupFacts:
    """Facts of a group; a sample without a reward has failed."""
    good = tuple((sample, reward) for sample, reward in enumerate(rewards) if reward is not None)
    values = tuple(reward for _, reward in good)
    return GroupFacts(
        epoch=key[0],
        prompt=key[1],
        source=source,
        samples=tuple(sample for sample, _ in good),
        rewards=values,
        scores=values,
        num_sampled=(2,) * len(good),
        num_tokens=(num_tokens,) * len(good),
        truncated=(False,) * len(good),
        failures=tuple((sample, "no server") for sample, reward in enumerate(rewards) if reward is None),
    )


def record_of(key: SampleKey, facts: GroupFacts) -> SampleRecord:
    """A sample of one prompt token and one sampled token."""
    reward = dict(zip(facts.samples, facts.rewards, strict=True))[key.sample]
    segment = {"text": ["q", "a"], "sampled": [False, True], "engine_log_probs": [0.0, -1.0], "versions": [-1, 0]}
    return {"source": facts.source, "reward": reward, "label": str(key), "segments": [segment]}


class FakeModel:
    """One rank of a model: what it is handed comes back as what it computed."""

    def __init__(self, rank: int):
        self.rank = rank
        self.reports = [report()]  # of its next update
        self.tokens: dict[str, list[TokenRecord]] = {}
        self.lowered_budgets: dict[str, int] = {}
        self.digest = 7

    def score(self, shares: Sequence[Any], *settings: object) -> str:
        return f"scores of {shares[0]}"

    def values(self, shares: Sequence[Any], settings: object) -> str:
        return f"values of {shares[0]}"

    def rewards(self, batches: Sequence[Sequence[GroupKey]], settings: object) -> dict[str, float]:
        keys = [key for batch in batches for key in batch]
        return {f"{epoch}/{prompt}/{sample}": float(sample) for epoch, prompt in keys for sample in range(4)}

    def prepare(self, shares: Sequence[Any], **settings: Any) -> None:
        """Nothing: what it was called with is in the group's calls."""

    def returns(self) -> str:
        return f"returns of rank {self.rank}"

    def update(self, *args: object) -> list[UpdateReport]:
        return self.reports

    def recorded(self) -> dict[str, list[TokenRecord]]:
        return self.tokens

    def lowered(self) -> dict[str, int]:
        return self.lowered_budgets

    def save(self, path: str) -> None: ...

    def load(self, path: str) -> None: ...

    def saved_bytes(self) -> int:
        return 100

    # Weights of one bucket.
    def begin_push(self, version: int, receivers: object = None, form: str = "merged") -> int | None:
        return 8

    def pack_next(self) -> int | None:
        return None

    def packed(self, transport: str) -> str:
        return "bucket"

    def broadcast(self) -> None: ...

    def finish_push(self, canary: object) -> WeightCheck:
        return WeightCheck({"w": self.digest}, None)

    def begin_load(self, version: int) -> None: ...

    def take_bucket(self, bucket: object) -> None: ...

    def finish_load(self, version: int, canary: object) -> WeightCheck:
        return WeightCheck({"w": self.digest}, None)

    def drop_requests(self) -> None: ...


def report(num_sampled: int = 10, **metrics: float) -> UpdateReport:
    """Report of an optimizer step; metrics are sums over its tokens."""
    return UpdateReport(1, 0.5, 2.0, 0.1, False, 0, 20, num_sampled, metrics)


# --- what the phases use beside the groups ---------------------------------------------------------------------------


class FakeScheduler:
    """Grants every lease at once, and knows whether engines have weights."""

    def __init__(self, log: list[str]):
        self._log = log
        self.are_weights_there = True
        self.spent_s = 0.0
        self.open: list[str] = []

    @contextmanager
    def lease(self, phase: str, role: str) -> Iterator[None]:
        assert not self.open, f"{phase}/{role} was leased while {self.open} was held"
        self._log.append(f"lease {phase}/{role}")
        self.open.append(f"{phase}/{role}")
        self.spent_s += 1.0
        try:
            yield
        finally:
            self.open.pop()
            self._log.append(f"end {phase}/{role}")

    def spent(self) -> dict[str, float]:
        seconds, self.spent_s = self.spent_s, 0.0
        return {"time/offload": seconds} if seconds else {}

    def has_weights(self, role: str) -> bool:
        return self.are_weights_there

    def mark_weights_loaded(self, role: str) -> None:
        self._log.append(f"mark_weights_loaded {role}")
        self.are_weights_there = True

    def replaced(self, role: str, rank: int) -> None:
        self._log.append(f"replaced {role} {rank}")


class FakeGuard:
    """A canary that finds nothing wrong."""

    def __init__(self, log: list[str]):
        self._log = log
        self.canary: Any = None
        self.is_started = False
        self.checked: list[tuple[Any, ...]] = []

    def ask(self) -> None:
        self._log.append("guard.ask")

    def start(self, version: int) -> None:
        self._log.append(f"guard.start {version}")
        self.is_started = True

    def check(self, *reports: Any) -> None:
        self._log.append("guard.check")
        self.checked.append(reports)

    def state(self) -> dict[str, Any] | None:
        return {"canary": "state"}

    def restore(self, state: Any) -> None:
        self._log.append(f"guard.restore {state}")


class FakeSamples:
    """Records which batches it was shown."""

    ids_in_training = ("0/0/0",)

    def __init__(self, log: list[str]):
        self._log = log
        self.unfinished: list[tuple[int, Any]] = []
        self.chosen_from: list[Any] = []

    def choose(self, step: int, batch: Any) -> None:
        self._log.append(f"samples.choose {step}")
        self.chosen_from.append(batch)

    def record_unfinished(self, step: int, batch: Any) -> None:
        self._log.append(f"samples.record_unfinished {step}")
        self.unfinished.append((step, batch))


class FakeArrivals:
    """Keeps which batches were taken."""

    def __init__(self) -> None:
        self.batches: dict[int, Any] = {}

    def taken(self, step: int, batch: Any) -> None:
        self.batches[step] = batch

    def begun(self, version: int, keys: Sequence[GroupKey]) -> None: ...

    def arrived(self, groups: object) -> None: ...

    def trained(self, version: int) -> None: ...

    def restored(self, step: int, state: Any) -> None:
        self.batches = {taken: batch for taken, batch in self.batches.items() if taken <= step}


def make_prompts(num: int, first: int = 0) -> list[Prompt]:
    return [Prompt(index, "q", (index, 2, 3)) for index in range(first, first + num)]


def varied(key: GroupKey) -> list[float]:
    """Rewards of four samples that differ, from prompt to prompt too."""
    return [float(sample + key[1]) for sample in range(4)]


CONFIG = """
actor: {model: none}
reward: {function: none.py}
data: {max_length: 16}
eval: {path: none.jsonl}
rollout: {batch_size: 4, samples_per_prompt: 4, max_new_tokens: 4}
train: {dtype: fp32, batch_size: 8, micro_batch_size: 4}
seed: 3
"""


class Case:
    """The phases of a run, connected as `assemble` connects them, with fakes where processes would be.

    overrides: of the config above. rewards: of each group, where a function scores. The other numbers: ranks of roles.
    """

    def __init__(
        self,
        *overrides: str,
        rewards: Rewards = varied,
        num_prompts: int = 16,
        num_eval_prompts: int = 0,
        actor: int = 1,
        engines: int = 1,
        critic: int = 0,
        reference: int = 0,
        reward: int = 0,
        inference: int = 0,
        transport: TransportPlan | None = None,
        adapters_alone: bool = False,
    ):
        self.log: list[str] = []
        self.said: list[str] = []
        self.config = loads(CONFIG, overrides)

        def group(name: str, size: int) -> FakeGroup | None:
            return FakeGroup(name, FakeModel, size, self.log) if size else None

        is_evaluation_scored = not reward or self.config.eval.reward is not None

        def make_host(rank: int) -> FakeHost:
            return FakeHost(rewards, not reward, is_evaluation_scored)

        self.hosts = FakeGroup("agents", make_host, 1, self.log)
        self.engines, self.actor = group("rollout", engines), group("actor", actor)
        self.critic, self.reference = group("critic", critic), group("reference", reference)
        self.reward, self.inference = group("reward", reward), group("inference", inference)
        models = (self.engines, self.actor, self.critic, self.reference, self.reward, self.inference)
        self.groups = Groups(
            {found.name: found for found in models if found is not None},
            RolloutHosts(self.hosts),
            have_gpus=False,
            measures_its_device=False,
            adapters_alone=adapters_alone,
        )
        self.prompts, eval_prompts = make_prompts(num_prompts), make_prompts(num_eval_prompts, first=100)
        self.state = RlState.initial(self.config, self.prompts)
        algebra = batch_algebra(self.config, actor // self.config.train.num_model_parallel, num_prompts)
        self.settings = PhaseSettings(self.config, algebra, self.state, self.said.append)
        self.scheduler, self.guard, self.samples = FakeScheduler(self.log), FakeGuard(self.log), FakeSamples(self.log)
        plan = make_plan(loads("cluster: {component_placement: {actor: 0, rollout: '@actor'}}"), "1x1")
        plan = replace(plan, steps=self._steps())
        self.meter = PhaseMeter(self.scheduler, {}, plan, DeviceWatch([], lambda device: None))
        to_engines = transport or TransportPlan(("host",) * engines, first_ranks=(0,) * engines)
        to_inference = TransportPlan(("host",) * inference, first_ranks=(0,) * inference) if inference else None
        routes = Routes(to_engines, to_inference, "127.0.0.1", 60.0)
        self.restarts: Counter[str] = Counter()
        self.pusher = Pusher(
            self.groups, routes, self.state, self.guard, self.meter, self.scheduler, self.restarts, self.said.append
        )
        hosts = Replaceable(self.hosts, HOST, lambda ranks: self.log.append(f"reconnect {ranks}"))
        self.recovery = Recovery(
            [Replaceable(self.engines, ENGINE, needs_weights=True), hosts],
            self.scheduler,
            push=self.pusher.push_again,
            rejoin=lambda ranks: self.log.append(f"rejoin {ranks}"),
            say=self.said.append,
            rejoins_in_lease=True,
            restarts=self.restarts,
        )
        self.sync = SyncPhase(self.pusher, self.state, self.guard, self.recovery)
        answering = RolloutRunner(self.groups, self.settings, self.meter, self.guard, self.pusher, self.recovery)
        self.record = FakeArrivals()
        self.evaluate = partial(evaluate, answering, eval_prompts)
        self.stream = SynchronousStream(answering, self.state, self.samples, self.prompts, self.record)
        self.prepare = PreparePhase(self.groups, self.stream, self.settings, self.meter, self.samples)
        self.update = UpdatePhase(self.groups, self.settings, self.state, self.meter)

    def _steps(self) -> tuple[PhaseStep, ...]:
        """Return the steps of a plan for the roles that are there, on device 0 or where the config has them."""
        roles = tuple(self.groups.by_role)
        devices = {role: [int(str(self.config.cluster.component_placement.get(role, 0)))] for role in roles}
        return make_steps(make_flow(self.config, roles), devices)

    @property
    def host(self) -> FakeHost:
        return self.hosts.workers[0]

    def taken(self) -> list[str]:
        """Return the log so far, and begin a new one."""
        entries, self.log[:] = list(self.log), []
        return entries

    def jobs(self) -> list[list[tuple[int, int]]]:
        """Return the keys of the groups that hosts were asked for, call by call."""
        return [[job.key for job in call.args[0][0]] for call in self.hosts.named("collect")]


class FakeJournal:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.by_step: dict[int, dict[str, list[float]]] = {}

    def samples(self, lines: Sequence[dict[str, Any]]) -> None:
        self.lines += lines

    def distributions(self, step: int, values: dict[str, list[float]]) -> None:
        self.by_step[step] = values


def silent_alarms() -> Any:
    """Alarms that see nothing out of the ordinary."""
    return SimpleNamespace(look=lambda step, metrics, batch: None)
