"""Roles and expectations that several placement tests use."""

from __future__ import annotations

import re
from contextlib import contextmanager

import pytest

from hotseat.errors import PlacementError
from hotseat.placement import Inventory, Part, Plan
from hotseat.placement.flow import default_flow
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, TrainMemory
from hotseat.placement.plan import plan
from hotseat.placement.plan_types import RoleSpec
from hotseat.placement.shapes import ModelShape, known_shape

TRAINER_CAN = frozenset({Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER})
ENGINE_CAN = frozenset({Part.WEIGHTS, Part.KV_CACHE})


@contextmanager
def refused(*texts: str):
    """The error must contain each of these texts."""
    with pytest.raises(PlacementError) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} not in {caught.value}"
    assert not re.search(r"<|\bobject at\b", str(caught.value)), str(caught.value)


def shape(name: str) -> ModelShape:
    found = known_shape(name)
    assert found is not None
    return found[0]


def make_plan(inventory: str, roles: list[RoleSpec], task: str = "rl", **kwargs) -> Plan:
    return plan(Inventory.parse(inventory), roles, default_flow(task, [role.name for role in roles], **kwargs))


def bare(**placement: str | int | dict) -> list[RoleSpec]:
    """Roles without memory settings."""
    return [RoleSpec(name, on) for name, on in placement.items()]


def actor(on="all", model="Llama-3-8B", **kwargs) -> RoleSpec:
    memory = kwargs.pop("memory", TrainMemory(max_tokens=2048, micro_batch=4))
    kwargs.setdefault("can_offload", TRAINER_CAN)
    return RoleSpec("actor", on, memory=memory, model=shape(model), **kwargs)


def rollout(on="@actor", model="Llama-3-8B", **kwargs) -> RoleSpec:
    slots = 64 if kwargs.get("share") is None else 1024  # with a share, so many that they can use all of it
    memory = kwargs.pop("memory", EngineMemory(max_tokens=2048, slots=slots))
    kwargs.setdefault("can_offload", ENGINE_CAN)
    return RoleSpec("rollout", on, memory=memory, model=shape(model), **kwargs)


def scorer(name: str, on="@actor", model="Llama-3-8B", **kwargs) -> RoleSpec:
    memory = kwargs.pop("memory", ForwardMemory(max_tokens=2048, is_sharded=True))
    kwargs.setdefault("can_offload", frozenset({Part.WEIGHTS}))
    return RoleSpec(name, on, memory=memory, model=shape(model), **kwargs)


def states(plan_: Plan, device: int, step: str) -> dict[str, str]:
    """`{"actor": "W(o)[g]"}`: capital needed, small kept, (offloaded), [dropped]."""
    group = plan_.group_of(device)
    assert group is not None
    found = next(s for s in group.steps if s.step == step)
    texts = {}
    for role in group.roles:
        of = dict.fromkeys(("needed", "kept", "offloaded", "dropped"), "")
        for holding in found.holdings:
            if holding.role == role:
                of[holding.state] += holding.part.value[0]
        texts[role] = (
            of["needed"].upper()
            + of["kept"]
            + (f"({of['offloaded']})" if of["offloaded"] else "")
            + (f"[{of['dropped']}]" if of["dropped"] else "")
        )
    return texts


def devices_of(plan_: Plan) -> dict[str, list[tuple[int, ...]]]:
    """Devices of every process of every role."""
    return {role.name: [process.devices for process in role.processes] for role in plan_.roles}
