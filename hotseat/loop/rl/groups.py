"""The worker groups of a reinforcement run, by role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotseat.cluster import WorkerGroup
from hotseat.loop.rl.hosts import RolloutHosts
from hotseat.loop.rl.replay_stream import NoWorkers
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.model_workers import ActorWorker, InferenceWorker, ModelWorker
from hotseat.loop.workers.value_models import CriticWorker, RewardWorker
from hotseat.placement import Part, Plan
from hotseat.registry.roles import role_entry

if TYPE_CHECKING:
    from hotseat.loop.rl.role_records import RoleRecord

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

    def on_devices(self, plan: Plan) -> dict[str, WorkerGroup[Any]]:
        """Return the roles to which the plan assigns devices, by name, in the order of their launch."""
        planned = {role.name for role in plan.roles}
        return {role: group for role, group in self.by_role.items() if role in planned}
