"""The worker groups of a reinforcement run, by role, and the connections of rollout hosts to engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hotseat.cluster import Holder, Pending, WorkerGroup
from hotseat.cluster.group import Arguments
from hotseat.errors import RunError
from hotseat.loop.rl.hosts import RolloutHosts
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.model_workers import ActorWorker, InferenceWorker, ModelWorker
from hotseat.loop.workers.value_models import CriticWorker, RewardWorker
from hotseat.placement import Part, Plan
from hotseat.registry.roles import role_entry

if TYPE_CHECKING:
    from hotseat.loop.rl.role_records import RoleRecord

W_co = TypeVar("W_co", covariant=True)


class NoWorkers(WorkerGroup[W_co]):
    """A role without processes: every call returns at once, with no results."""

    timeout_s = 1.0

    def __init__(self, name: str):
        self.name = name

    @property
    def ranks(self) -> range:
        return range(0)

    def states(self) -> list[str]:
        return []

    def holders(self) -> tuple[Holder, ...]:
        return ()

    def restart(self, rank: int) -> NoReturn:
        raise RunError(f"{self.name} has no rank {rank}")

    def close(self, *, grace_s: float = 5.0, idle_grace_s: float = 0.0) -> None:
        self.is_closed = True

    def _start(self, method: str, arguments: Arguments, timeout_s: float, keep: bool = False) -> Pending[Any]:
        return Pending(self, method, {}, timeout_s)

    def open(self, rank: int, method: str, future: Future[Any]) -> Any:
        return future.result()

    def describe(self, rank: int) -> str:
        return "does not exist"


_NO_ENGINES: WorkerGroup[EngineWorker] = NoWorkers("rollout")


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
