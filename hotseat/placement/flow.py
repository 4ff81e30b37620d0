"""The flow of one iteration: its phases, the roles that work in each, and the parts that must be on the device then.

`parse_flow` reads the form of a config (its schema is in docs/placement.md); `default_flow` returns that of a task.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

from hotseat.errors import PlacementError
from hotseat.extensions import load
from hotseat.placement.role_names import Part, check_role, did_you_mean
from hotseat.registry.roles import ROLES, role_entry
from hotseat.registry.tasks import TASKS

Order = Literal["together", "in_turn"]
Kind = Literal["rollout", "prepare", "update", "sync"]

_TRAINS = (Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER)
_SAMPLES = (Part.WEIGHTS, Part.KV_CACHE)


@dataclass(frozen=True, slots=True)
class RoleWork:
    """A role at work in a phase, and the parts that must be on its devices for it."""

    role: str
    parts: tuple[Part, ...]

    @property
    def is_training(self) -> bool:
        return Part.GRADIENTS in self.parts


class _AtWork:
    """What phases and steps have in common."""

    __slots__ = ()
    works: tuple[RoleWork, ...]
    pushes: tuple[str, ...]

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(work.role for work in self.works)

    @property
    def kind(self) -> Kind:
        """The kind of work, whatever the phase is named."""
        if self.pushes:
            return "sync"
        if any(work.is_training for work in self.works):
            return "update"
        return "rollout" if any(work.role in ("rollout", "env") for work in self.works) else "prepare"


@dataclass(frozen=True, slots=True)
class Phase(_AtWork):
    """The work of roles at one point of the flow. `pushes` names the roles that get the actor's weights in it."""

    name: str
    works: tuple[RoleWork, ...]
    order: Order = "together"
    pushes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Overlap:
    """Limits within which the rollout of later batches may overlap training on earlier ones.

    `queue` batches may wait for training; a batch may be `staleness` weight versions old. Both 0: no overlap.
    With `carries_over`, rollout may share devices with training: it stands still meanwhile and goes on afterwards.
    """

    queue: int = 0
    staleness: int = 0
    carries_over: bool = False

    def __post_init__(self) -> None:
        for name, value in (("queue", self.queue), ("staleness", self.staleness)):
            if value < 0:
                raise PlacementError(f"overlap.{name} is {value}: it must be 0 (no overlap) or more")

    @property
    def is_on(self) -> bool:
        return self.queue > 0 or self.staleness > 0


@dataclass(frozen=True, slots=True)
class Flow:
    """The phases of one iteration, in order; after the last comes the first again."""

    phases: tuple[Phase, ...]
    overlap: Overlap = Overlap()

    @property
    def roles(self) -> tuple[str, ...]:
        """Roles that work in some phase, in order of their first work."""
        return tuple(dict.fromkeys(role for phase in self.phases for role in phase.roles))

    @property
    def rollout_phases(self) -> tuple[Phase, ...]:
        """Phases that make episodes."""
        return tuple(phase for phase in self.phases if "rollout" in phase.roles and not phase.pushes)

    @property
    def training_phases(self) -> tuple[Phase, ...]:
        """Phases that use episodes; with overlap, the rollout of later ones continues meanwhile."""
        return tuple(phase for phase in self.phases if "rollout" not in phase.roles)

    def parts_of(self, role: str) -> tuple[Part, ...]:
        """Return the parts of a role that some phase needs."""
        needed = {part for phase in self.phases for work in phase.works if work.role == role for part in work.parts}
        return tuple(part for part in Part if part in needed)


@dataclass(frozen=True, slots=True)
class PhaseStep(_AtWork):
    """A phase, or one turn of a phase in which roles that share devices take turns: `prepare.1` is its second."""

    name: str
    phase: str
    works: tuple[RoleWork, ...]
    pushes: tuple[str, ...] = ()
    beside: tuple[RoleWork, ...] = ()  # the rollout of later batches, where overlap allows it during this step


def default_flow(
    task: str, roles: Collection[str], overlap: Overlap | None = None, components: Sequence[str] = ()
) -> Flow:
    """Return the usual flow of a task for the roles that are placed.

    components: those of the roles that are the user's own. They work one after another, in this order, between reward
    models and the other scores.
    """
    for role in roles:
        check_role(role, components)
    if task not in TASKS:
        hint = did_you_mean(task, tuple(TASKS))
        raise PlacementError(f"unknown task {task!r}: {hint}the tasks are {', '.join(TASKS)}")
    needed, phases = load(TASKS[task].flow)(frozenset(roles), components)
    for role in needed:
        if role not in roles:
            raise PlacementError(f"task {task} needs the role {role}, which is not placed: give it a selection")
    flow = Flow(tuple(phase for phase in phases if phase.works), overlap or Overlap())
    idle = [role for role in roles if role not in flow.roles]
    if idle:
        raise PlacementError(
            f"task {task} has no work for {', '.join(idle)}: leave {'it' if len(idle) == 1 else 'them'} out of the"
            f" placement, or write a flow that uses {'it' if len(idle) == 1 else 'them'}"
        )
    return flow


_Made = tuple[tuple[str, ...], tuple[Phase, ...]]


def _works(roles: frozenset[str], *names: str, parts: tuple[Part, ...] = (Part.WEIGHTS,)) -> tuple[RoleWork, ...]:
    return tuple(RoleWork(name, parts) for name in names if name in roles)


def rl_phases(roles: frozenset[str], components: Sequence[str]) -> _Made:
    """Return the roles that RL needs, and its phases. The other tasks have functions of this form, too."""
    scorer = "inference" if "inference" in roles else "actor"
    scores = _works(roles, "judge", parts=_SAMPLES)  # it writes its verdicts as an engine writes answers
    scores += _works(roles, "reward", *components, "reference", "critic", scorer)
    targets = tuple(role.name for role in ROLES.values() if role.gets_weights and role.name in roles)
    return ("actor", "rollout"), (
        Phase("rollout", _works(roles, "env", parts=(Part.SIMULATOR,)) + _works(roles, "rollout", parts=_SAMPLES)),
        Phase("prepare", scores, "in_turn"),
        Phase("update", _works(roles, "critic", "actor", parts=_TRAINS), "in_turn"),
        Phase("sync", _works(roles, "actor", *targets), pushes=targets),
    )


def sft_phases(roles: frozenset[str], _: Sequence[str]) -> _Made:
    return ("actor",), (Phase("update", _works(roles, "actor", parts=_TRAINS)),)


def rm_phases(roles: frozenset[str], _: Sequence[str]) -> _Made:
    trained = "actor" if "actor" in roles and "reward" not in roles else "reward"
    return (trained,), (Phase("update", _works(roles, trained, parts=_TRAINS)),)


def dpo_phases(roles: frozenset[str], _: Sequence[str]) -> _Made:
    training = Phase("update", _works(roles, "actor", parts=_TRAINS))
    return ("actor",), (Phase("prepare", _works(roles, "reference")), training)


_PHASE_KEYS = ("name", "run", "train", "push", "order")


def parse_flow(
    phases: Sequence[Mapping[str, object]],
    roles: Collection[str],
    overlap: Overlap | None = None,
    components: Sequence[str] = (),
) -> Flow:
    """Parse a flow as a config writes it, for these placed roles. components: those that are the user's own.

    Each phase has a `name`, an `order` (together or in_turn), and its works: `run` (a list of roles, or a mapping from
    role to parts), `train` (roles whose weights are updated), `push` (roles that get the actor's weights).
    """
    if not phases:
        raise PlacementError("the flow has no phases: write at least one, for instance {name: update, train: [actor]}")
    parsed = tuple(_parse_phase(written, index, components) for index, written in enumerate(phases))
    flow = Flow(parsed, overlap or Overlap())
    check_flow(flow, roles)
    return flow


def _parse_phase(written: Mapping[str, object], index: int, components: Sequence[str]) -> Phase:
    if not isinstance(written, Mapping):
        raise PlacementError(
            f"flow: phase {index} is {written!r}: write a mapping such as {{name: update, train: [actor]}}"
        )
    name = written.get("name")
    if not isinstance(name, str) or not name:
        raise PlacementError(f"flow: phase {index} has no name: write name: rollout or the like")
    where = f"flow: phase {name!r}"
    for key in written:
        if key not in _PHASE_KEYS:
            hint = did_you_mean(str(key), _PHASE_KEYS)
            raise PlacementError(f"{where}: unknown key {key!r}: {hint}the keys are {', '.join(_PHASE_KEYS)}")
    order = written.get("order", "together")
    if order not in get_args(Order):
        raise PlacementError(f"{where}: order is {order!r}: write together or in_turn")
    works = _run_works(written.get("run", ()), where, components)
    works += [RoleWork(role, _TRAINS) for role in _names(written.get("train", ()), "train", where, components)]
    pushes = _names(written.get("push", ()), "push", where, components)
    if pushes:
        works += [RoleWork(role, (Part.WEIGHTS,)) for role in ("actor", *pushes) if role not in {w.role for w in works}]
    return Phase(name, tuple(works), "in_turn" if order == "in_turn" else "together", tuple(pushes))


def _run_works(run: object, where: str, components: Sequence[str]) -> list[RoleWork]:
    if not isinstance(run, Mapping):
        without = (Part.GRADIENTS, Part.OPTIMIZER)
        return [
            RoleWork(role, tuple(p for p in Part if p in role_entry(role).parts and p not in without))
            for role in _names(run, "run", where, components)
        ]
    works = []
    for role, parts in run.items():
        names = [parts] if isinstance(parts, str) else parts
        if not isinstance(names, Sequence) or not names:
            raise PlacementError(f"{where}: parts of {role} are {parts!r}: write a list such as [weights, kv_cache]")
        needed = tuple(sorted({_part(n, where) for n in names}, key=list(Part).index))
        works.append(RoleWork(check_role(str(role), components), needed))
    return works


def _part(name: object, where: str) -> Part:
    try:
        return Part(str(name))
    except ValueError:
        choices = tuple(part.value for part in Part)
        hint = did_you_mean(str(name), choices)
        raise PlacementError(f"{where}: unknown part {name!r}: {hint}the parts are {', '.join(choices)}") from None


def _names(written: object, key: str, where: str, components: Sequence[str]) -> list[str]:
    names = [written] if isinstance(written, str) else written
    if not isinstance(names, Sequence):
        raise PlacementError(f"{where}: {key} is {written!r}: write a list of roles")
    return [check_role(str(name), components) for name in names]


def check_flow(flow: Flow, roles: Collection[str]) -> None:
    """Refuse a flow that cannot be carried out by these placed roles."""
    names: set[str] = set()
    for phase in flow.phases:
        where = f"flow: phase {phase.name!r}"
        if not re.fullmatch(r"[\w-]+", phase.name):
            raise PlacementError(f"{where}: use letters, digits, '_' and '-' in its name")
        if phase.name in names:
            raise PlacementError(f"flow: two phases are named {phase.name!r}: give each its own name")
        names.add(phase.name)
        if not phase.works:
            raise PlacementError(f"{where}: no role works in it: name roles under run, train or push")
        _check_push(phase, where)
        for work in phase.works:
            _check_work(work, where, roles)
            if phase.roles.count(work.role) > 1:
                raise PlacementError(f"{where}: {work.role} is named twice: name it once, or make two phases")


# In order; each with the key under which its roles are written.
_KEYS: dict[Kind, str] = {"rollout": "run", "prepare": "run", "update": "train", "sync": "push"}
# When a run takes a role among those of its kind, whatever the flow says.
_NUMBERS: dict[Kind, dict[str, int]] = {"prepare": {"judge": 0, "reward": 0, "actor": 3}, "update": {"critic": 0}}
_COMPONENT, _OTHER = 1, 2  # the numbers of custom components, and of all other roles


def check_runs(flow: Flow, task: str, roles: Collection[str], components: Sequence[str] = ()) -> None:
    """Refuse a flow that a run of this task with these roles cannot follow. components: those that are the user's own.

    A flow names, divides and arranges the work of the task's usual flow: it has no other work, and leaves none out.
    """
    usual_flow = default_flow(task, roles, components=components)
    usual = {(phase.kind, work.role): (phase, work) for phase in usual_flow.phases for work in phase.works}
    phase_of: dict[tuple[Kind, str], Phase] = {}
    for phase in flow.phases:
        where = f"flow: phase {phase.name!r}"
        for work in phase.works:
            role, key = work.role, (phase.kind, work.role)
            if key not in usual:
                others = ", ".join(other for kind, other in usual if kind == phase.kind)
                raise PlacementError(
                    f"{where}: {role} has no work with the roles under {_KEYS[phase.kind]}, which can be {others}: give"
                    " it a phase of its own, or take it out"
                )
            if key in phase_of:
                raise PlacementError(
                    f"{where}: {role} does the same in phase {phase_of[key].name!r}: take it out of one of them"
                )
            phase_of[key] = phase
            usual_phase, usual_work = usual[key]
            _check_same(work, usual_work, where)
            if role in usual_phase.pushes and role not in phase.pushes:
                raise PlacementError(f"{where}: {role} gets the actor's weights in it: name it under push")
    for (kind, role), (usual_phase, _) in usual.items():
        if (kind, role) not in phase_of:
            raise PlacementError(
                f"flow: {role} has no work under {_KEYS[kind]}, which it has in {usual_phase.name!r} usually: add it"
            )
    _check_order(flow, components)
    for kind in ("rollout", "sync"):
        phases = [phase for phase in flow.phases if phase.kind == kind]
        if len(phases) > 1 or any(phase.order == "in_turn" for phase in phases):
            names = " and ".join(repr(phase.name) for phase in phases)
            at_once = " and ".join(dict.fromkeys(role for phase in phases for role in phase.roles))
            raise PlacementError(
                f"flow: phase {names}: {at_once} work at the same time: write one phase, with order together"
            )


def _check_same(work: RoleWork, usual: RoleWork, where: str) -> None:
    """Refuse work without parts that it uses, and training where a run does not train."""
    lacking = ", ".join(part for part in usual.parts if part not in work.parts)
    if lacking:
        remedy = "name it under train" if usual.is_training else f"add {lacking} to its parts"
        raise PlacementError(f"{where}: {work.role} works without its {lacking}: {remedy}")
    if work.is_training and not usual.is_training:
        raise PlacementError(
            f"{where}: {work.role} does not learn in it: take it out of train, or gradients out of its parts"
        )


def _check_order(flow: Flow, components: Sequence[str]) -> None:
    kinds = list(_KEYS)
    for earlier, phase in pairwise(flow.phases):
        if kinds.index(phase.kind) < kinds.index(earlier.kind):
            raise PlacementError(
                f"flow: phase {phase.name!r} comes after {earlier.name!r}: samples are made, scored and learned from,"
                " then weights are pushed: write the phases in this order"
            )
    # In turn as if the roles shared their devices.
    turns = [
        (phase, roles)
        for phase in flow.phases
        for roles in ([(role,) for role in phase.roles] if phase.order == "in_turn" else [phase.roles])
    ]
    for (earlier, before), (phase, after) in pairwise(turns):
        if earlier.kind != phase.kind:
            continue
        known = dict.fromkeys(components, _COMPONENT) | _NUMBERS.get(phase.kind, {})
        numbers = {role: known.get(role, _OTHER) for role in (*before, *after)}
        first = min(after, key=numbers.__getitem__)
        too_early = [role for role in before if numbers[role] > numbers[first]]
        if too_early:
            of, what = (f" of phase {earlier.name!r}", "its phase") if phase is not earlier else ("", "it")
            raise PlacementError(
                f"flow: phase {phase.name!r}: {first} works before {too_early[0]}{of}: write {what} first"
            )


def _check_work(work: RoleWork, where: str, roles: Collection[str]) -> None:
    for part in work.parts:
        if part not in role_entry(work.role).parts:
            can = ", ".join(p for p in Part if p in role_entry(work.role).parts)
            raise PlacementError(f"{where}: {work.role} has no {part}: it can have {can}")
    if work.role not in roles:
        raise PlacementError(
            f"{where}: {work.role} works in it but is not placed: give it a selection or take it out of the phase"
            f" (placed are {', '.join(roles) or 'none'})"
        )


def _check_push(phase: Phase, where: str) -> None:
    if not phase.pushes:
        return
    for role in phase.pushes:
        if role not in ("rollout", "inference", "reference"):
            raise PlacementError(
                f"{where}: {role} cannot get the actor's weights: push to rollout, inference or reference"
            )
    if phase.order == "in_turn":
        raise PlacementError(f"{where}: a push needs both sides at once: leave order out or set it to together")
    for role in ("actor", *phase.pushes):
        if not any(work.role == role and Part.WEIGHTS in work.parts for work in phase.works):
            raise PlacementError(f"{where}: a push needs the weights of {role} on the device: add them to its parts")


def shared_devices(flow: Flow, devices: Mapping[str, Collection[int]]) -> dict[tuple[str, str], list[int]]:
    """Return the devices that a role of the rollout shares with a role of the training, by the two."""
    pairs = {}
    for first in dict.fromkeys(role for phase in flow.rollout_phases for role in phase.roles):
        for second in dict.fromkeys(role for phase in flow.training_phases for role in phase.roles):
            shared = sorted(set(devices.get(first, ())) & set(devices.get(second, ())))
            if shared:
                pairs[first, second] = shared
    return pairs


def make_steps(flow: Flow, devices: Mapping[str, Collection[int]]) -> tuple[PhaseStep, ...]:
    """Cut the flow's phases into steps. devices: those of each role.

    In an `in_turn` phase, a role works one step after the last of the roles before it that share a device with it;
    roles that share none work at the same time.
    """
    steps: list[PhaseStep] = []
    is_beside = flow.overlap.is_on and not shared_devices(flow, devices)
    beside = tuple(work for phase in flow.rollout_phases for work in phase.works) if is_beside else ()
    for phase in flow.phases:
        turns = [0] * len(phase.works)
        if phase.order == "in_turn":
            sets = [frozenset(devices.get(work.role, ())) for work in phase.works]
            for index in range(len(turns)):
                shared = [turns[earlier] for earlier in range(index) if not sets[earlier].isdisjoint(sets[index])]
                turns[index] = 1 + max(shared, default=-1)
        for turn in range(max(turns) + 1):
            name = phase.name if max(turns) == 0 else f"{phase.name}.{turn}"
            works = tuple(work for work, own in zip(phase.works, turns, strict=True) if own == turn)
            steps.append(
                PhaseStep(name, phase.name, works, phase.pushes, beside if phase in flow.training_phases else ())
            )
    return tuple(steps)
