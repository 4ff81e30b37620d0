"""The choice of a transport for each engine that gets weights, by this table:

| trainer on | engine | auto | nccl | gloo |
| --- | --- | --- | --- | --- |
| CPU | on the actor's devices | host | refused | host |
| CPU | elsewhere | host | refused | broadcast, gloo |
| CUDA | all its devices hold a trainer rank | ipc | ipc | ipc |
| CUDA | other devices | broadcast, nccl | broadcast, nccl | broadcast, gloo |
| CUDA | no device | host | host | broadcast, gloo |

One broadcast group has one backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hotseat.errors import UserError
from hotseat.weights.broadcast import LOOPBACK, TIMEOUT_S, BroadcastGroup, CollectiveBackend

Transport = Literal["host", "ipc", "broadcast"]


@dataclass(frozen=True)
class TransportPlan:
    """The transport of each engine, and what the transports need."""

    engines: tuple[Transport, ...]
    sources: tuple[int, ...] = ()  # ranks of the actor whose device memory engines read
    first_ranks: tuple[int, ...] = ()  # of each engine in the broadcast group; 0, the sender's own: not in it
    receivers: tuple[str, ...] = ()  # of the broadcast
    backend: CollectiveBackend = "gloo"

    def only(self, ranks: Sequence[int]) -> TransportPlan:
        """Return the plan of some engines. A broadcast is to all of its receivers, so none of them may have it."""
        assert not self.receivers
        first_ranks = tuple(self.first_ranks[rank] for rank in ranks)
        return replace(self, engines=tuple(self.engines[rank] for rank in ranks), first_ranks=first_ranks)

    def broadcast_group(
        self, generation: int = 0, host: str = LOOPBACK, timeout_s: float = TIMEOUT_S
    ) -> BroadcastGroup | None:
        """Return the receivers of the broadcast; None if no engine has that transport."""
        if not self.receivers:
            return None
        return BroadcastGroup(self.receivers, self.backend, host, generation, timeout_s)


def check_transport(transport: str, is_cuda: bool) -> None:
    """Raise if weights cannot travel by this transport from an actor on these devices."""
    if transport == "nccl" and not is_cuda:
        raise UserError(
            "rollout.weight_transport is nccl, which sends between CUDA devices, and the actor is on the CPU: set it"
            " to auto, or to gloo"
        )


def choose_transports(
    actor: Sequence[Sequence[int]],
    engines: Sequence[Sequence[int]],
    is_cuda: bool,
    transport: Literal["auto", "nccl", "gloo"] = "auto",
) -> TransportPlan:
    """Choose a transport for each engine, by the table above.

    actor, engines: the devices of each rank and of each engine, by their numbers in the cluster. An engine receives in
    a process per device, or in one if it has no device. transport: as set in the config.
    """
    check_transport(transport, is_cuda)
    rank_on: dict[int, int] = {}
    for rank, devices in enumerate(actor):
        for device in devices:
            rank_on.setdefault(device, rank)
    kinds: list[Transport] = []
    sources: set[int] = set()
    first_ranks: list[int] = []
    receivers: list[str] = []
    for index, devices in enumerate(engines):
        is_shared = bool(devices) and all(device in rank_on for device in devices)
        kind = _choose(is_shared, bool(devices), is_cuda, transport)
        kinds.append(kind)
        first_ranks.append(0)
        if kind == "ipc":
            sources |= {rank_on[device] for device in devices}
        elif kind == "broadcast":
            first_ranks[-1] = 1 + len(receivers)
            many = len(devices) > 1
            receivers += [f"engine {index}" + (f" worker {w}" if many else "") for w in range(max(1, len(devices)))]
    backend: CollectiveBackend = "nccl" if is_cuda and transport != "gloo" else "gloo"
    return TransportPlan(tuple(kinds), tuple(sorted(sources)), tuple(first_ranks), tuple(receivers), backend)


def _choose(is_shared: bool, has_devices: bool, is_cuda: bool, transport: str) -> Transport:
    if is_shared:
        return "ipc" if is_cuda else "host"
    if transport == "gloo":
        return "broadcast"
    return "broadcast" if is_cuda and has_devices else "host"
