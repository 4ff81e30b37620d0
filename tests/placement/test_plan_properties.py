"""Whatever is placed where: a plan keeps its promises, or the placement is refused."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement_cases import ENGINE_CAN, TRAINER_CAN, shape

from hotseat.errors import PlacementError
from hotseat.placement import Inventory, Part, Plan
from hotseat.placement.flow import Overlap, default_flow
from hotseat.placement.memory_settings import EngineMemory, ForwardMemory, SimulatorMemory, TrainMemory
from hotseat.placement.memory_terms import FITS_BELOW
from hotseat.placement.plan import plan
from hotseat.placement.plan_types import RoleSpec

MODELS = ("Qwen2.5-0.5B", "Qwen2.5-3B", "Llama-3-8B", "Llama-2-13B")
CAN = {"actor": TRAINER_CAN, "critic": TRAINER_CAN, "rollout": ENGINE_CAN, "env": frozenset({Part.SIMULATOR})}


@st.composite
def spans(draw, low, high):
    """Ranks within low to high, one process each or two per device."""
    first = draw(st.integers(low, high))
    last = draw(st.integers(first, high))
    count = last - first + 1
    procs = draw(st.sampled_from([None, None, count, 2 * count]))
    return f"{first}-{last}" + ("" if procs is None else f":0-{procs - 1}")


@st.composite
def selections(draw, role, low, high):
    forms = [spans(low, high), st.just(f"{low}-{high}")]
    if role not in ("actor", "rollout", "env"):
        forms += [st.just("@actor"), st.just("@actor"), st.just("cpu*2")]
    return draw(st.one_of(forms))


@st.composite
def roles(draw, name, low, high):
    """A role on some of the devices from low to high."""
    model = shape(draw(st.sampled_from(MODELS)))
    tokens = draw(st.sampled_from([512, 2048, 8192]))
    on = draw(selections(name, low, high))
    kwargs = {}
    if name in ("actor", "critic"):
        memory = TrainMemory(
            tokens,
            micro_batch=draw(st.integers(1, 4)),
            zero_stage=draw(st.integers(0, 3)),
            backend=draw(st.sampled_from(["fsdp", "deepspeed"])),
            optimizer_offload=draw(st.integers(0, 3)) == 0,
        )
    elif name == "rollout":
        memory = EngineMemory(tokens, slots=draw(st.integers(1, 64)))
        share = draw(st.sampled_from([None, 0.3, 0.6, 0.9]))
        kwargs["share"] = share / 2 if share and ":" in on else share
        if on == f"{low}-{high}" and (high - low) % 2 and low % 2 == 0:
            kwargs["tensor_parallel"] = 2
    elif name == "env":
        memory, model = SimulatorMemory(draw(st.floats(0.5, 40.0))), None
    else:
        memory = ForwardMemory(tokens, is_sharded=draw(st.booleans()))
    if draw(st.integers(0, 29)) == 0:
        memory = None
    can = draw(st.sampled_from([CAN.get(name, frozenset({Part.WEIGHTS}))] * 5 + [frozenset()]))
    offload = draw(st.sampled_from([None, None, None, None, "always", "never"]))
    offload = offload if can or offload != "always" else None
    return RoleSpec(name, on, can_offload=can, offload=offload, memory=memory, model=model, **kwargs)


@st.composite
def arguments(draw):
    nodes, size = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    kind = draw(st.sampled_from(["", "x24G", "xA100-80G", "xA100-80G", "xH200", "xH200"]))
    task = "rl"
    names = ["actor", "rollout", *draw(st.sampled_from([[], ["env"]]))]
    names += [name for name in ("critic", "reference", "reward", "inference") if draw(st.integers(0, 2)) == 0]
    overlap = draw(st.sampled_from([Overlap(), Overlap(), Overlap(1, 1)]))
    half = nodes * size // 2
    specs = []
    for name in draw(st.permutations(names)):
        low, high = 0, 2 * half - 1
        if overlap.is_on:  # rollout and training on separate devices
            low, high = (half, high) if name in ("rollout", "env") else (0, half - 1)
        specs.append(draw(roles(name, low, high)))
    return Inventory.parse(f"{nodes}x{size}{kind}"), specs, default_flow(task, names, overlap)


def planned(args) -> Plan | None:
    """None: refused. The refusals have tests of their own."""
    try:
        return plan(*args)
    except PlacementError:
        return None


def check_residency(found: Plan, specs: dict[str, RoleSpec]) -> None:
    for group in found.groups:
        for step, here in zip(found.steps, group.steps, strict=True):
            held = {(h.role, h.part): h for h in here.holdings}
            for work in (*step.works, *step.beside):
                if work.role in group.roles:
                    for part in work.parts:
                        assert held[work.role, part].state == "needed"
            for holding in here.holdings:
                spec = specs[holding.role]
                if not holding.is_resident:
                    assert spec.offload != "never"
                    assert holding.part in spec.can_offload
                elif holding.state == "kept":
                    assert not (spec.offload == "always" and holding.part in spec.can_offload)


def check_memory(found: Plan) -> None:
    for group in found.groups:
        for here in group.steps:
            if group.memory_gib is not None and here.verdict in ("fits", "tight"):
                assert here.used_gib <= group.memory_gib + 1e-6
            if here.verdict == "fits":
                assert here.used_gib <= FITS_BELOW * group.memory_gib + 1e-6


def check_nothing_leaves_for_nothing(found: Plan, specs: dict[str, RoleSpec]) -> None:
    """In the step in which a part leaves because memory is needed, it would not have had room."""
    for group in found.groups:
        for index, here in enumerate(group.steps):
            for row, holding in enumerate(here.holdings):
                before = group.steps[index - 1].holdings[row]
                if holding.is_resident or not before.is_resident or specs[holding.role].offload == "always":
                    continue
                assert group.memory_gib is not None
                assert holding.gib is not None
                assert here.used_gib + holding.gib > FITS_BELOW * group.memory_gib - 1e-6


def check_hand_overs(found: Plan) -> None:
    """Following the hand-overs gives the residency of each step that uses the device."""
    names = [step.name for step in found.steps]
    for group in found.groups:
        resident = [{(h.role, h.part) for h in here.holdings if h.is_resident} for here in group.steps]
        for hand_over in group.hand_overs:
            first, last = resident[names.index(hand_over.from_step)], resident[names.index(hand_over.to_step)]
            leaves = {(move.role, move.part) for move in hand_over.leaves}
            comes = {(move.role, move.part) for move in hand_over.comes}
            assert leaves <= first
            assert (first - leaves) | comes == last
            for move in hand_over.comes:
                if move.how == "pushed":
                    assert move.role in found.steps[names.index(hand_over.to_step)].pushes


def check_dropped(found: Plan) -> None:
    """Weights are dropped only where the next use overwrites them."""
    count = len(found.steps)
    for group in found.groups:
        for index, here in enumerate(group.steps):
            for row, holding in enumerate(here.holdings):
                if holding.state == "dropped" and holding.part not in (Part.KV_CACHE, Part.GRADIENTS):
                    after = next(
                        (index + d) % count
                        for d in range(1, count + 1)
                        if group.steps[(index + d) % count].holdings[row].is_resident
                    )
                    assert holding.role in found.steps[after].pushes


def check_processes(found: Plan) -> None:
    for role in found.roles:
        assert [process.rank for process in role.processes] == list(range(len(role.processes)))
        for process in role.processes:
            assert all(found.inventory.node_of(device) == process.node for device in process.devices)
            if role.is_engine and role.where == "devices":
                assert len(process.devices) == role.tensor_parallel
    covered = [d for group in found.groups for first, last in group.devices for d in range(first, last + 1)]
    assert sorted(covered) == sorted({d for role in found.roles for d in role.devices})


def check_turns(found: Plan) -> None:
    """Roles of one step of a phase with turns share no device."""
    orders = {phase.name: phase.order for phase in found.flow.phases}
    for step in found.steps:
        if orders[step.phase] == "in_turn":
            used = [device for name in step.roles for device in found.role(name).devices]
            assert len(used) == len(set(used))


def examples(count):
    return settings(max_examples=count, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.slow
@examples(200)
@given(arguments())
def test_every_plan_keeps_its_promises(args):
    found = planned(args)
    if found is None:
        return
    specs = {spec.name: spec for spec in args[1]}
    check_processes(found)
    check_turns(found)
    check_residency(found, specs)
    check_memory(found)
    check_nothing_leaves_for_nothing(found, specs)
    check_hand_overs(found)
    check_dropped(found)


@pytest.mark.slow
@examples(40)
@given(arguments())
def test_equal_arguments_give_equal_plans_and_json(args):
    found = planned(args)
    again = planned((args[0], [replace(spec) for spec in args[1]], args[2]))
    assert again == found
    if found is not None and again is not None:
        assert again.to_json() == found.to_json()


@examples(60)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4), st.integers(2, 6))
def test_blocks_are_disjoint_and_stay_on_their_nodes(blocks, num_nodes):
    names = ("actor", "critic", "reference", "rollout")[-len(blocks) :]
    specs = [RoleSpec(name, f"{count}x{size}") for name, (count, size) in zip(names, blocks, strict=True)]
    specs += [RoleSpec(name, "cpu*1") for name in ("actor", "rollout") if name not in names]
    flow = default_flow("rl", [spec.name for spec in specs])
    found = planned((Inventory.parse(f"{num_nodes}x4"), specs, flow))
    total = sum(count * size for count, size in blocks)
    if found is None:
        assert total > num_nodes  # fewer devices than nodes always find room
        return
    used = [device for role in found.roles for device in role.devices]
    assert len(used) == len(set(used)) == total
    for name, (count, size) in zip(names, blocks, strict=True):
        nodes = [process.node for process in found.role(name).processes]
        for block in range(count):
            assert len(set(nodes[block * size : (block + 1) * size])) == -(-size // 4)
