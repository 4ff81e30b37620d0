"""A cluster of many machines on this one: few processes carry the ranks of all models and engines.

The driver calls each rank through Ray as on a real cluster; only where its call arrives differs. Rollout hosts, and all
other processes without devices, are the product's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hotseat.cluster.environment import environment
from hotseat.cluster.group import Pending
from hotseat.cluster.node_facts import NodeFacts
from hotseat.cluster.on_ray.launching import ActorStarter
from hotseat.cluster.on_ray.node_processes import NodeHere
from hotseat.cluster.on_ray.ray_group import RankProcess, RayGroup
from hotseat.cluster.on_ray.ray_runtime import RayRuntime, connect
from hotseat.cluster.refs import resolve
from hotseat.cluster.runtime import Launch, RuntimeOptions
from hotseat.cluster.session import Session
from hotseat.cluster.worker_process import Failure, ProcessIdentity, apart, run
from hotseat.placement.locate import Process
from hotseat.processes import supervisor
from lib.simulated import register
from lib.simulated.costs import take_spent

T = TypeVar("T")
DEVICES_PER_NODE = 8
DEVICE_BYTES = 141 << 30
NUM_CARRIERS = 2  # for each role
NUM_THREADS = 20_000  # of a carrier at most: a fetch of each host waits in every engine


def open_runtime(session: Session, options: RuntimeOptions) -> SimulatedRuntime:
    """Start Ray here, with one device, behind which there are as many nodes as the plan needs."""
    assert options.num_devices is not None
    return SimulatedRuntime(session, replace(options, num_devices=1), options.num_devices)


class SimulatedRuntime(RayRuntime):
    """The runtime on Ray, whose nodes and devices are made up."""

    def __init__(self, session: Session, options: RuntimeOptions, num_devices: int):
        super().__init__(connect(session, options), session)
        real = self.nodes[0]
        count = -(-num_devices // DEVICES_PER_NODE)
        self.nodes = tuple(
            replace(real, rank=rank, num_devices=DEVICES_PER_NODE, hostname=f"node-{rank}", device_bytes=DEVICE_BYTES)
            for rank in range(count)
        )
        self._agent: Any = None

    def reserve(self, devices: Mapping[int, Sequence[int]], timeout_s: float) -> None:
        super().reserve({0: [0]}, timeout_s)

    def launch(self, launch: Launch[T]) -> RayGroup[T]:
        if not any(process.devices for process in launch.processes):
            launch = replace(launch, processes=[Process(each.rank) for each in launch.processes])
        return super().launch(launch)

    def make_starter(self, launch: Launch[Any]) -> ActorStarter:
        if not any(process.devices for process in launch.processes):
            return super().make_starter(launch)
        places = [Process(rank) for rank in range(min(NUM_CARRIERS, len(launch.processes)))]
        return CarriedStarter(super().make_starter(replace(launch, processes=places)), launch, self._connection.ray)

    def facts(self, nodes: Sequence[int], folder: str | None, paths: Sequence[str]) -> dict[int, NodeFacts]:
        return dict.fromkeys(nodes, super().facts([0], folder, paths)[0])

    def end_processes(self, processes: Iterable[RankProcess]) -> None:
        super().end_processes([each for each in processes if not isinstance(each.actor, CarriedRank)])

    def process_states(self, processes: Sequence[tuple[int, int, int | None]]) -> list[str]:
        """Ask a process once for each other node, as their agents would be asked."""
        ray = self._connection.ray
        if self._agent is None:
            self._agent = ray.remote(NodeHere).options(num_cpus=0).remote("", {})
        states: list[str] = []
        for node, of_node in itertools.groupby(processes, key=lambda process: process[0]):
            if node == 0:
                states += super().process_states(list(of_node))
            else:
                states += ray.get(self._agent.process_states.remote([each[1:] for each in of_node]))
        return states


class CarriedStarter(ActorStarter):
    """Makes the objects of all ranks of a role in a few processes."""

    def __init__(self, real: ActorStarter, launch: Launch[Any], ray: Any):
        self._real = real
        self._carriers = []
        for place in real.launch.processes:
            options = real.actor_options(RankProcess(place), place.rank) | {"max_concurrency": NUM_THREADS}
            self._carriers.append(ray.remote(Carrier).options(**options).remote(launch.max_concurrency))
        self.launch = launch

    def prepare(self, processes: Sequence[RankProcess]) -> None:
        """Do nothing: carriers are there."""

    def start(self, group: RayGroup[Any], ranks: Sequence[int], within_s: float) -> Pending[ProcessIdentity]:
        launch, futures = self.launch, {}
        envs = envs_of(launch)
        for rank in ranks:
            process = group.processes[rank]
            process.actor = CarriedRank(self._carriers[rank % len(self._carriers)], rank)
            kwargs = {**launch.kwargs, **launch.per_rank[rank]}
            made = process.actor.carrier.construct.remote(rank, envs[rank], launch.cls, launch.args, kwargs, within_s)
            futures[rank] = made.future()
            futures[rank].called = rank, process.incarnation
        return Pending(group, "__init__", futures)


def envs_of(launch: Launch[Any]) -> list[dict[str, str]]:
    """Return the environment of each rank, as far as workers look at it."""
    size = str(len(launch.processes))
    return [{"RANK": str(rank), "WORLD_SIZE": size} for rank in range(len(launch.processes))]


@dataclass(frozen=True)
class CarriedRank:
    """A rank in a carrier, called as the actor of a rank is."""

    carrier: Any
    rank: int

    @property
    def invoke(self) -> _Method:
        return _Method(self.carrier.invoke, self.rank)

    @property
    def invoke_and_keep(self) -> _Method:
        return _Method(self.carrier.invoke_and_keep, self.rank)


@dataclass(frozen=True)
class _Method:
    of_carrier: Any
    rank: int

    def options(self, **options: Any) -> _Method:
        return _Method(self.of_carrier.options(**options), self.rank)

    def remote(self, *args: Any) -> Any:
        return self.of_carrier.remote(self.rank, *args)


@dataclass
class _Carried:
    """The object of a rank. turns: one call at a time, in the order of arrival; None: several at once."""

    value: Any = None
    turns: asyncio.Lock | None = None


class Carrier:
    """A process that carries the objects of many ranks. Time that their work spends passes here, for all at once."""

    def __init__(self, max_concurrency: int):
        register()
        import torch

        torch.set_num_threads(1)
        self._is_one_at_a_time = max_concurrency == 1
        self._carried: dict[int, _Carried] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS)
        self._making = threading.Lock()

    async def construct(
        self,
        rank: int,
        env: Mapping[str, str],
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout_s: float,
    ) -> ProcessIdentity | Failure:
        carried = self._carried[rank] = _Carried(turns=asyncio.Lock() if self._is_one_at_a_time else None)

        def make() -> ProcessIdentity:
            with self._making, environment(env):
                carried.value = cls(*resolve(args, timeout_s), **resolve(kwargs, timeout_s))
            return ProcessIdentity(os.getpid(), supervisor.start_time(os.getpid()), "carrier")

        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: run(make))

    async def invoke(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        carried = self._carried[rank]
        if carried.turns is None:
            return await self._call(carried.value, method, args, kwargs, timeout_s)
        async with carried.turns:
            return await self._call(carried.value, method, args, kwargs, timeout_s)

    async def invoke_and_keep(
        self, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float, count: int
    ) -> tuple[Any, ...]:
        return apart(await self.invoke(rank, method, args, kwargs, timeout_s), method, count)

    async def _call(
        self, value: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> Any:
        def call() -> tuple[Any, float]:
            result = run(lambda: getattr(value, method)(*resolve(args, timeout_s), **resolve(kwargs, timeout_s)))
            return result, take_spent()

        result, spent_s = await asyncio.get_running_loop().run_in_executor(self._threads, call)
        if spent_s:
            await asyncio.sleep(spent_s)
        return result
