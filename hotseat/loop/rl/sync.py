"""Sync phase: the actor's weights go to every engine, and both sides prove that they hold the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hotseat import faults
from hotseat.algorithms.adapters import WeightForm
from hotseat.cluster import Cluster
from hotseat.loop.devices.scheduler import DeviceScheduler
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.push import PushReport, push_weights
from hotseat.loop.rl.recovery import ENGINE, Recovery
from hotseat.loop.rl.state import RlState
from hotseat.placement import Plan
from hotseat.registry.roles import role_entry
from hotseat.weights.broadcast import LOOPBACK, TIMEOUT_S, BroadcastGroup
from hotseat.weights.transports import TransportPlan


@dataclass(frozen=True)
class Routes:
    """Transports of weights from the actor to engines, and to the ranks of the inference role if there are any."""

    to_engines: TransportPlan
    to_inference: TransportPlan | None
    sender_host: str
    timeout_s: float

    def receivers(self, transport: TransportPlan, generation: int) -> BroadcastGroup | None:
        """Return the group that receives a broadcast. `generation`: replaced receivers have to connect anew."""
        return transport.broadcast_group(generation, self.sender_host, min(TIMEOUT_S, self.timeout_s))


class Pusher:
    """Pushes weights to the engines and the inference role, each after the other side has proved what it holds.

    restarts: how many processes were replaced, by their noun; replaced engines have to connect anew.
    """

    def __init__(
        self,
        groups: Groups,
        routes: Routes,
        state: RlState,
        guard: CanaryGuard,
        meter: PhaseMeter,
        scheduler: DeviceScheduler,
        restarts: Mapping[str, int],
        say: Callable[[str], object],
    ):
        self._groups = groups
        self._routes = routes
        self._state = state
        self._guard = guard
        self._meter = meter
        self._scheduler = scheduler
        self._restarts = restarts
        self._say = say
        self._bases_sent: int | None = None  # restarts of engines when all of them last got the weights below adapters

    def push_again(self, ranks: Sequence[int] | None = None) -> None:
        """Push the version that is served, to engines that lost it: all, or these ranks, if no broadcast is in use."""
        self.push(self._state.version, None if self._routes.to_engines.receivers else ranks)

    def restore_dropped_weights(self) -> None:
        """Push again if the engines' weights were dropped to make room since the last push."""
        if not self._scheduler.has_weights("rollout"):
            self.push_again()

    def push(self, version: int, ranks: Sequence[int] | None = None) -> PushReport:
        """Push the actor's weights as this version, to all engines or these ranks, and have the canary judge them."""
        groups, routes, canary = self._groups, self._routes, self._guard.canary
        receivers = routes.receivers(routes.to_engines, self._restarts[ENGINE])
        to_inference = None
        with self._meter.lease("sync", "actor"):
            form = self._form()
            pushed = PushReport(version, 0, 0, 0.0, 0.0, frozenset(), None, None)  # that of a replay, without engines
            if groups.engines.size:
                pushed = push_weights(
                    groups.actor, groups.engines, version, canary, routes.to_engines, receivers, form=form, ranks=ranks
                )
            if ranks is None and groups.inference is not None and routes.to_inference is not None:
                transport = routes.to_inference
                receivers = routes.receivers(transport, 0)
                to_inference = push_weights(
                    groups.actor, groups.inference, version, canary, transport, receivers, "inference rank"
                )
        self._bases_sent = self._restarts[ENGINE]
        self._scheduler.mark_weights_loaded("rollout")
        self._guard.check(pushed, to_inference)
        unseen = sorted(pushed.undigested)
        if unseen and version == 0:
            self._say(
                f"{len(unseen)} weights of the engines have no digest, such as {unseen[0]}: only the canary checks them"
            )
        return pushed

    def _form(self) -> WeightForm:
        """Return the form of the next push: adapters alone go to engines that have the weights below them."""
        if not self._groups.adapters_alone:
            return "merged"
        have_base = self._bases_sent == self._restarts[ENGINE] and self._scheduler.has_weights("rollout")
        return "adapters" if have_base else "apart"


class SyncPhase:
    """Pushes weights to the engines under a new version, and has the canary judge what they compute from them."""

    def __init__(self, pusher: Pusher, state: RlState, guard: CanaryGuard, recovery: Recovery):
        self._pusher = pusher
        self._state = state
        self._guard = guard
        self._recovery = recovery

    def run(self) -> PushReport:
        """Push the actor's weights as the next version, and serve it from now on."""
        faults.reach("push.before")
        version = self._state.version + 1
        report = self._recovery.during(lambda: self._pusher.push(version), is_push=True)
        self._state.version = version
        if not self._guard.is_started:
            self._recovery.during(lambda: self._guard.start(version))
        faults.reach("push.after")
        return report


def sender_host(plan: Plan, cluster: Cluster) -> str:
    """Return the address at which receivers on other devices meet the actor's first rank."""
    node = plan.role("actor").processes[0].node
    receivers = [role for role in plan.roles if role_entry(role.name).gets_weights]
    if all(process.node == node for role in receivers for process in role.processes):
        return LOOPBACK
    return cluster.nodes[node].address
