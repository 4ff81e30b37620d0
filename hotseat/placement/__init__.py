"""Where roles go and what is on which device when: a pure planner that needs no device and no cluster.

inventory = Inventory.parse("1x8xA100-80G")
roles = [RoleSpec("actor", "all", ...), RoleSpec("rollout", "@actor", share=0.5, ...)]
plan(inventory, roles, default_flow("rl", ["actor", "rollout"]))
"""

from hotseat.placement.advice import Change
from hotseat.placement.flow import (
    Flow,
    Overlap,
    Phase,
    Step,
    Work,
    check_flow,
    default_flow,
    make_steps,
    parse_flow,
)
from hotseat.placement.inventory import (
    DeviceKind,
    Inventory,
    Node,
    NodePool,
    format_ranges,
    format_ranks,
    parse_node_ranks,
)
from hotseat.placement.locate import Located, Process, Request, locate
from hotseat.placement.memory import (
    EngineMemory,
    ForwardMemory,
    Layout,
    Memory,
    RoleMemory,
    SimulatorMemory,
    Term,
    TrainMemory,
    estimate,
)
from hotseat.placement.plan import DeviceGroup, GroupStep, HostGroup, Plan, PlannedRole, RoleSpec, Route, plan
from hotseat.placement.residency import HandOver, Holding, Move
from hotseat.placement.roles import PARTS_OF_ROLE, ROLES, Part, check_role
from hotseat.placement.selection import (
    Blocks,
    CpuProcesses,
    Elsewhere,
    InPools,
    Ranks,
    SameAs,
    Segment,
    Selection,
    Span,
    parse_placement,
    parse_selection,
)
from hotseat.placement.shapes import KNOWN_SHAPES, AssumedShape, ModelShape, from_hf_config, known_shape

__all__ = [
    "KNOWN_SHAPES",
    "PARTS_OF_ROLE",
    "ROLES",
    "AssumedShape",
    "Blocks",
    "Change",
    "CpuProcesses",
    "DeviceGroup",
    "DeviceKind",
    "Elsewhere",
    "EngineMemory",
    "Flow",
    "ForwardMemory",
    "GroupStep",
    "HandOver",
    "Holding",
    "HostGroup",
    "InPools",
    "Inventory",
    "Layout",
    "Located",
    "Memory",
    "ModelShape",
    "Move",
    "Node",
    "NodePool",
    "Overlap",
    "Part",
    "Phase",
    "Plan",
    "PlannedRole",
    "Process",
    "Ranks",
    "Request",
    "RoleMemory",
    "RoleSpec",
    "Route",
    "SameAs",
    "Segment",
    "Selection",
    "SimulatorMemory",
    "Span",
    "Step",
    "Term",
    "TrainMemory",
    "Work",
    "check_flow",
    "check_role",
    "default_flow",
    "estimate",
    "format_ranges",
    "format_ranks",
    "from_hf_config",
    "known_shape",
    "locate",
    "make_steps",
    "parse_flow",
    "parse_node_ranks",
    "parse_placement",
    "parse_selection",
    "plan",
]
