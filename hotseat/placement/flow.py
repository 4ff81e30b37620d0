"""The flow of one iteration: its phases, the roles that work in each, and the parts that must be on the device then.

`parse_flow` reads the form of a config (its schema is in docs/placement.md); `default_flow` returns that of a task.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from hotseat.errors import PlacementError
from hotseat.extensions import load
from hotseat.placement.role_names import Part, check_role, did_you_mean
from hotseat.registry.roles import ROLES, role_entry
from hotseat.registry.tasks import task_entry

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
    """Common part of phases and steps."""

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
    With `carries_over`, rollout may share devices with training: it pauses meanwhile and continues afterwards.
    """

    queue: int = 0
    staleness: int = 0
    carries_over: bool = False

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

    components: custom ones among the roles. They work one after another, in this order, between reward models and the
    other scores.
    """
    phases = load(task_entry(task).flow)(frozenset(roles), components)
    return Flow(tuple(phase for phase in phases if phase.works), overlap or Overlap())


def _works(roles: frozenset[str], *names: str, parts: tuple[Part, ...] = (Part.WEIGHTS,)) -> tuple[RoleWork, ...]:
    return tuple(RoleWork(name, parts) for name in names if name in roles)


def rl_phases(roles: frozenset[str], components: Sequence[str]) -> tuple[Phase, ...]:
    """Return the phases of RL. The other tasks have functions of this form, too."""
    scorer = "inference" if "inference" in roles else "actor"
    scores = _works(roles, "judge", parts=_SAMPLES)  # it writes its verdicts as an engine writes answers
    scores += _works(roles, "reward", *components, "reference", "critic", scorer)
    targets = tuple(role.name for role in ROLES.values() if role.gets_weights and role.name in roles)
    return (
        Phase("rollout", _works(roles, "env", parts=(Part.SIMULATOR,)) + _works(roles, "rollout", parts=_SAMPLES)),
        Phase("prepare", scores, "in_turn"),
        Phase("update", _works(roles, "critic", "actor", parts=_TRAINS), "in_turn"),
        Phase("sync", _works(roles, "actor", *targets), pushes=targets),
    )


def sft_phases(roles: frozenset[str], _: Sequence[str]) -> tuple[Phase, ...]:
    return (Phase("update", _works(roles, "actor", parts=_TRAINS)),)


def rm_phases(roles: frozenset[str], _: Sequence[str]) -> tuple[Phase, ...]:
    return (Phase("update", _works(roles, "reward" if "reward" in roles else "actor", parts=_TRAINS)),)


def dpo_phases(roles: frozenset[str], _: Sequence[str]) -> tuple[Phase, ...]:
    training = Phase("update", _works(roles, "actor", parts=_TRAINS))
    return Phase("prepare", _works(roles, "reference")), training


def parse_flow(
    phases: Sequence[Mapping[str, Any]],
    roles: Collection[str],
    overlap: Overlap | None = None,
    components: Sequence[str] = (),
) -> Flow:
    """Parse a flow as a config writes it, with the types checked, for these placed roles. components: custom roles.

    Each phase has a `name`, an `order` (together or in_turn), and its works: `run` (a list of roles, or a mapping from
    role to parts), `train` (roles whose weights are updated), `push` (roles that get the actor's weights).
    """
    if not phases:
        raise PlacementError("the flow has no phases: write at least one, for instance {name: update, train: [actor]}")
    parsed = tuple(_parse_phase(written, components) for written in phases)
    flow = Flow(parsed, overlap or Overlap())
    check_flow(flow, roles)
    return flow


def _parse_phase(written: Mapping[str, Any], components: Sequence[str]) -> Phase:
    run, train, pushes = written.get("run", []), written.get("train", []), tuple(written.get("push", []))
    for role in (*run, *train, *pushes):
        check_role(role, components)
    works = [RoleWork(role, _run_parts(run, role, f"flow: phase {written['name']!r}")) for role in run]
    works += [RoleWork(role, _TRAINS) for role in train]
    if pushes:
        works += [RoleWork(role, (Part.WEIGHTS,)) for role in ("actor", *pushes) if role not in {w.role for w in works}]
    return Phase(written["name"], tuple(works), written.get("order", "together"), pushes)


def _run_parts(run: Sequence[str] | Mapping[str, Sequence[str]], role: str, where: str) -> tuple[Part, ...]:
    """Return the parts that a phase has for a role under `run`: those that are written, or all but what trains."""
    if not isinstance(run, Mapping):
        return tuple(p for p in Part if p in role_entry(role).parts and p not in (Part.GRADIENTS, Part.OPTIMIZER))
    if not run[role]:
        raise PlacementError(f"{where}: parts of {role} are []: write a list such as [weights, kv_cache]")
    choices = tuple(part.value for part in Part)
    for name in run[role]:
        if name not in choices:
            hint = did_you_mean(name, choices)
            raise PlacementError(f"{where}: unknown part {name!r}: {hint}the parts are {', '.join(choices)}")
    return tuple(part for part in Part if part in run[role])


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
    """Refuse a flow that a run of this task with these roles cannot follow. components: custom roles.

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
