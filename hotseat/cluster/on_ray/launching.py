"""Starts the actors of a group: one process per rank, with its environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hotseat.cluster.environment import rank_env
from hotseat.cluster.group import Pending
from hotseat.cluster.on_ray.ray_group import RankProcess, RayGroup
from hotseat.cluster.on_ray.reservation import Reservation
from hotseat.cluster.runtime import Launch
from hotseat.cluster.worker_process import AsyncObjectHost, ObjectHost, ProcessIdentity, is_async
from hotseat.config.urls import is_loopback
from hotseat.errors import PlacementError
from hotseat.openmp import thread_env
from hotseat.placement.locate import Process
from hotseat.processes import supervisor


class ActorStarter:
    """Starts the actors of one group, at its launch and when a rank is restarted.

    meeting: returns an address and a free port at which the ranks can meet. number: of this launch in its session, in
    which names are used again.
    """

    def __init__(
        self,
        ray: Any,
        launch: Launch[Any],
        reservation: Reservation,
        session_name: str,
        meeting: Callable[[], tuple[str, int]],
        number: int,
    ):
        self._ray = ray
        self.launch = launch  # of which constructors take their arguments, and processes everything else
        self._reservation = reservation
        self._mark = f"{session_name}:{re.sub('[:/]', '_', launch.name)}"
        self._meeting = meeting
        self._master = meeting()
        self._number = number

    def prepare(self, processes: Sequence[RankProcess]) -> None:
        """Start all processes, and load the module of the class in each, for constructors to come."""
        for rank, process in enumerate(processes):
            self._start_actor(process, rank)
            process.is_prepared = True
            process.actor.prepare.remote(self.launch.cls)

    def start(self, group: RayGroup[Any], ranks: Sequence[int], within_s: float) -> Pending[ProcessIdentity]:
        """Start the processes of these ranks, and in each the constructor of its object."""
        launch, futures = self.launch, {}
        if any(group.processes[rank].incarnation for rank in ranks) and len(ranks) == group.size:
            self._master = self._meeting()  # at the old address ranks that ended may still be known
        for rank in ranks:
            if group.processes[rank].is_prepared:
                group.processes[rank].is_prepared = False
            else:
                self._start_actor(group.processes[rank], rank)
        for rank in ranks:
            process, kwargs = group.processes[rank], {**launch.kwargs, **launch.per_rank[rank]}
            futures[rank] = process.actor.construct.remote(launch.cls, launch.args, kwargs, within_s).future()
            futures[rank].called = rank, process.incarnation
        return Pending(group, "__init__", futures)

    def _start_actor(self, process: RankProcess, rank: int) -> None:
        launch = self.launch
        host_class, concurrency = ObjectHost, launch.max_concurrency
        if is_async(launch.cls):
            host_class, concurrency = AsyncObjectHost, 1000 if concurrency == 1 else concurrency
        options = self.actor_options(process, rank) | {"max_concurrency": concurrency}
        process.actor = self._ray.remote(host_class).options(**options).remote()

    def actor_options(self, process: RankProcess, rank: int) -> dict[str, Any]:
        """Mark a process that is about to start, and return the options of its actor: its node and its environment."""
        launch = self.launch
        process.mark = f"{self._mark}:{rank}:{self._number}.{process.incarnation}"
        process.identity = None
        env = {
            **rank_env(launch.processes, rank, *self._master),
            **_interface_env(self._master[0]),
            **thread_env(launch.num_threads),
            **launch.env_on(process.place.node),
            **self._device_env(process.place),
            supervisor.WORKER: process.mark,
        }
        return {**self._reservation.options(process.place.node, env), "max_restarts": 0, "max_task_retries": 0}

    def _device_env(self, place: Process) -> dict[str, str]:
        names = [self._reservation.device_name(device) or "" for device in place.devices]
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(names),
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as the management library counts
        }


def refuse_unreserved(launch: Launch[Any], reservation: Reservation) -> None:
    """Raise if a process of the group is placed on devices, or on a node, that were not reserved."""
    for process in launch.processes:
        if missing := reservation.missing(process.node, process.devices):
            raise PlacementError(
                f"{launch.name} rank {process.rank} is placed on node {process.node}, devices {list(process.devices)},"
                f" of which {missing} was not reserved; reserve the processes of all groups before the first launch"
            )


def _interface_env(address: str) -> dict[str, str]:
    """Return the variables that keep collectives on loopback, where ranks meet there.

    Otherwise they would listen on whatever address the host name stands for.
    """
    if not is_loopback(address):
        return {}
    interface = "lo" if sys.platform.startswith("linux") else "lo0"
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
