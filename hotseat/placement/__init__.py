"""The planner: which devices each role gets, and which parts are on a device when. It needs no device and no cluster.

inventory = Inventory.parse("1x8xA100-80G")
roles = [RoleSpec("actor", "all", ...), RoleSpec("rollout", "@actor", share=0.5, ...)]
plan(inventory, roles, default_flow("rl", ["actor", "rollout"]))
"""

from hotseat.placement.flow import (
    Flow,
    Overlap,
    PhaseStep,
    check_runs,
    default_flow,
    parse_flow,
)
from hotseat.placement.inventory import (
    UNKNOWN_KIND,
    DeviceKind,
    Inventory,
    Node,
    NodePool,
    format_ranges,
    format_ranks,
    parse_node_ranks,
)
from hotseat.placement.locate import Located, RoleRequest, locate
from hotseat.placement.memory import (
    GIB,
    ComponentMemory,
    EngineMemory,
    ForwardMemory,
    Layout,
    SimulatorMemory,
    TrainMemory,
    estimate,
    token_activation_bytes,
    useful_cache_gib,
)
from hotseat.placement.plan import label_of, plan, shares_devices
from hotseat.placement.plan_types import DeviceGroup, GroupStep, Plan, PlannedRole, RoleSpec, Route
from hotseat.placement.residency import HandOver, Holding, Move
from hotseat.placement.role_names import Part
from hotseat.placement.selection import (
    parse_placement,
    parse_selection,
)
from hotseat.placement.shapes import ModelShape, VisionShape, from_hf_config, known_shape

__all__ = [
    "GIB",
    "UNKNOWN_KIND",
    "ComponentMemory",
    "DeviceGroup",
    "DeviceKind",
    "EngineMemory",
    "Flow",
    "ForwardMemory",
    "GroupStep",
    "HandOver",
    "Holding",
    "Inventory",
    "Layout",
    "Located",
    "ModelShape",
    "Move",
    "Node",
    "NodePool",
    "Overlap",
    "Part",
    "PhaseStep",
    "Plan",
    "PlannedRole",
    "RoleRequest",
    "RoleSpec",
    "Route",
    "SimulatorMemory",
    "TrainMemory",
    "VisionShape",
    "check_runs",
    "default_flow",
    "estimate",
    "format_ranges",
    "format_ranks",
    "from_hf_config",
    "known_shape",
    "label_of",
    "locate",
    "parse_flow",
    "parse_node_ranks",
    "parse_placement",
    "parse_selection",
    "plan",
    "shares_devices",
    "token_activation_bytes",
    "useful_cache_gib",
]
