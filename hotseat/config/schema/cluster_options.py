"""Machines and placement, the flow of a step, and how far phases run ahead."""

from __future__ import annotations

from typing import Annotated, Literal

from hotseat.config import conditions as when
from hotseat.config.annotations import RL, RoleName, RuntimeName
from hotseat.config.schema.section import NotNegative, Positive, Seconds, Section
from hotseat.registry.runtimes import DEFAULT_RUNTIME, runtime_entry


class PoolEnvConfig(Section):
    node_ranks: str | int = "all"
    """Nodes these variables are for, counted within the cluster: `0-3`, `all`."""
    env_vars: list[dict[str, str]] = []
    """Environment variables of processes on these nodes, one mapping each."""


class NodePoolConfig(Section):
    label: str
    """Name of the pool, used as `label/SELECTION` in a placement."""
    node_ranks: str | int = "all"
    """Nodes in the pool: `0-7`, `8`, `all`."""
    ignore_hardware: bool = False
    """Treat the pool's nodes as CPU nodes: its ranks are then node ranks."""
    env_configs: list[PoolEnvConfig] = []
    """Environment variables of the pool's processes."""


class PoolPlacementConfig(Section):
    node_group: str | list[str]
    """Pool, or list of pools whose ranks are numbered through."""
    placement: str | int
    """Selection within the pool."""


class ClusterConfig(Section):
    runtime: RuntimeName = DEFAULT_RUNTIME
    """`ray` runs each role in processes of its own; `local` runs one rank of each in this one, without Ray."""
    num_nodes: Positive | None = None
    """Nodes to use; unset takes as many as the placement needs."""
    inventory: str | None = None
    """Machines to plan for, such as `4x8xA100-80G`; unset asks the running cluster."""
    component_placement: dict[str, str | int | PoolPlacementConfig] = {}
    """Role, or comma-joined roles, to selection: `0-7`, `all`, `2x8`, `@actor`, `cpu*4`, `none`, `pool/0-3`."""
    component_names: dict[str, RoleName] = {}
    """Custom names for roles, such as `simulator: env`, to use in `component_placement` and in `flow`."""
    node_groups: list[NodePoolConfig] = []
    """Named pools of nodes with environment variables of their own."""
    profile: Annotated[str | None, RL] = None
    """File of `hotseat profile`, by which the seconds of a step are predicted, for the report."""
    threads_per_process: Positive = 1
    """CPU threads of each worker process; never inherited, because sums depend on their number."""
    ray_dashboard: Annotated[bool, when.RAY] = False
    """Start Ray's dashboard on loopback, with a Ray that is started here; it asks for the token in RAY_AUTH_TOKEN."""
    call_timeout_s: Seconds = 1800.0
    """Longest that one call to a worker may take, or its start, which has at least 300 s, before it is an error."""
    silence_timeout_s: Seconds = 30.0
    """Longest that a process may be stopped, or an engine not answer a ping, before it is ended or replaced."""

    @property
    def is_in_process(self) -> bool:
        """Tell whether everything runs in the driver's process."""
        return runtime_entry(self.runtime).is_in_process


class PhaseConfig(Section):
    name: str
    """Name of the phase."""
    run: list[str] | dict[str, list[str]] = []
    """Roles that work; a mapping also lists the parts of each role that must be on its devices."""
    train: list[str] = []
    """Roles whose weights are updated."""
    push: list[str] = []
    """Roles that get the actor's weights."""
    order: Literal["together", "in_turn"] = "together"
    """Whether roles that share a device work at the same time or one after another."""


class OverlapConfig(Section):
    staleness: NotNegative = 0
    """Weight versions by which a sample may lag behind the policy that learns from it; 0: rollout, then training."""
    queue: Annotated[NotNegative | None, when.AHEAD] = None
    """Batches that rollout may be ahead, besides the one in progress; unset is as many as `staleness`."""
    order: Annotated[Literal["prompt", "arrival"], when.AHEAD] = "prompt"
    """A batch is made of the next prompts, whoever is slow, or of the groups that are finished first."""
    in_flight: Annotated[Literal["wait", "keep", "recompute", "restart"], when.AHEAD] = "wait"
    """Open requests at a push: finish first, continue with the old or a recomputed KV cache, or start over."""
