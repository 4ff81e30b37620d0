"""The roles of a run, and the parts that each can keep on a device.

`config/presence.py` says which roles a config has; `loop/rl/role_records.py` how their processes are made, started
and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

from hotseat.registry.lookup import Table


class Part(StrEnum):
    """A part of a role's state that stays on a device between computations."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and the fp32 master weights where there are any
    KV_CACHE = "kv_cache"
    SIMULATOR = "simulator"


RoleKind = Literal["model", "engine", "simulator", "component"]  # model: behind a training backend


@dataclass(frozen=True, slots=True)
class RoleEntry:
    """Facts about a role.

    turn: its place in the order of work in a step. present_if, work: for docs. parts: that it can keep on a device.
    section: of the config, with its options. is_independent: its processes work independently of each other, and one
    process can hold several. answers_pings: its processes do so while they work. gets_weights: those of the actor, in
    every sync. makes_groups: it works on samples before they are learned from, so a replay that
    evaluates nothing has no such role.
    """

    name: str
    kind: RoleKind
    turn: int
    present_if: str
    work: str
    parts: frozenset[Part]
    section: str
    is_independent: bool = False
    answers_pings: bool = False
    gets_weights: bool = False
    makes_groups: bool = False


_PARTS: dict[RoleKind, frozenset[Part]] = {
    "model": frozenset({Part.WEIGHTS}),
    "engine": frozenset({Part.WEIGHTS, Part.KV_CACHE}),
    "simulator": frozenset({Part.SIMULATOR}),
    "component": frozenset({Part.WEIGHTS}),  # whatever it keeps on its devices
}
TRAINED_PARTS = frozenset({Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER})


def _role(
    name: str, kind: RoleKind, turn: int, present_if: str, work: str, *, trained: bool = False, **more: Any
) -> RoleEntry:
    """Make an entry with the parts of its kind, and the section of its name."""
    parts = TRAINED_PARTS if trained else _PARTS[kind]
    return RoleEntry(name, kind, turn, present_if, work, **{"parts": parts, "section": name, **more})


_SERVES = {"is_independent": True, "answers_pings": True}
ROLES = Table[RoleEntry](  # in the order in which messages list them
    "role",
    _role(
        "actor", "model", 8, "always", "computes old log-probs and advantages; learns; sends its weights", trained=True
    ),
    _role(
        "critic",
        "model",
        7,
        "estimator `gae`",
        "computes values; then learns from the returns, before the actor does",
        trained=True,
    ),
    _role(
        "reference",
        "model",
        5,
        "`algorithm.kl.coef`, `algorithm.distill_coef` or `algorithm.distill.coef` above 0",
        "computes log-probs, and a teacher's likely tokens",
    ),
    _role(
        "reward",
        "model",
        2,
        "`reward.model`",
        "scores episodes at the end of their last segment, before groups are filtered",
        trained=True,  # in task rm
        makes_groups=True,
    ),
    _role(
        "judge",
        "engine",
        3,
        "`reward.judge.rubric` without `reward.judge.url`",
        "writes verdicts on answers, which hosts add to rewards before groups are filtered; keeps its own weights",
        section="reward.judge.engine",
        makes_groups=True,
        **_SERVES,
    ),
    _role("rollout", "engine", 0, "always", "samples", gets_weights=True, makes_groups=True, **_SERVES),
    _role(
        "env",
        "simulator",
        1,
        "`env.path`",
        "simulates what the policy acts in, while the policy's engines sample",
        **_SERVES,
    ),
    _role(
        "inference",
        "model",
        6,
        "the placement names it",
        "computes old log-probs on devices of its own; gets the actor's weights in every sync, as engines do",
        gets_weights=True,
    ),
)

COMPONENT = _role(
    "a custom name",
    "component",
    4,
    "`components`",
    "a user's class sees scored groups (`loop/workers/component.py`) and may score or drop them"
    " (`loop/rl/components.py`), before groups are filtered",
    is_independent=True,
    makes_groups=True,
)


def role_entry(name: str) -> RoleEntry:
    """Return the facts about a role; any other name is that of a user's component."""
    return ROLES.get(name) or replace(COMPONENT, name=name, section=f"components.{name}")
