"""The planner: which devices each role gets, and which parts are on a device when. It needs no device and no cluster.

inventory = Inventory.parse("1x8xA100-80G")
roles = [RoleSpec("actor", "all", ...), RoleSpec("rollout", "@actor", share=0.5, ...)]
plan(inventory, roles, default_flow("rl", ["actor", "rollout"]))

Names that runs use, too, can be imported from here.
"""

from hotseat.placement.flow import PhaseStep
from hotseat.placement.inventory import DeviceKind, Inventory, Node
from hotseat.placement.memory_terms import GIB
from hotseat.placement.plan import shares_devices
from hotseat.placement.plan_types import Plan
from hotseat.placement.residency import Holding
from hotseat.placement.role_names import Part

__all__ = ["GIB", "DeviceKind", "Holding", "Inventory", "Node", "Part", "PhaseStep", "Plan", "shares_devices"]
