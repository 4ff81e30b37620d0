"""The roles of a run, and the parts that each can keep on a device.

`config/presence.py` says which roles a config has; `loop/rl/role_records.py` how their processes are made, started
and replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal


class Part(StrEnum):
    """A part of a role's state that stays on a device between computations."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and the fp32 master weights where there are any
    KV_CACHE = "kv_cache"
    SIMULATOR = "simulator"


RoleKind = Literal["model", "engine", "simulator", "component"]  # model: behind a training backend

_FORWARD = frozenset({Part.WEIGHTS})
_TRAINED = frozenset({Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER})
_ENGINE = frozenset({Part.WEIGHTS, Part.KV_CACHE})


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEntry:
    """Facts about a role.

    parts: that it can keep on a device. turn: its place in the order of work in a step. section: of the config, with
    its options. present_if, work: for docs. is_independent: its processes work independently of each other, and one
    process can hold several. answers_pings: its processes do so while they work. gets_weights: those of the actor, in
    every sync. makes_groups: it works on samples before they are learned from, so a replay has no such role.
    """

    name: str
    kind: RoleKind
    parts: frozenset[Part]
    turn: int
    section: str
    present_if: str
    work: str
    is_independent: bool = False
    answers_pings: bool = False
    gets_weights: bool = False
    makes_groups: bool = False


_ENTRIES = (
    RoleEntry(
        name="actor",
        kind="model",
        parts=_TRAINED,
        turn=8,
        section="actor",
        present_if="always",
        work="computes old log-probs and advantages; learns; sends its weights",
    ),
    RoleEntry(
        name="critic",
        kind="model",
        parts=_TRAINED,
        turn=7,
        section="critic",
        present_if="estimator `gae`",
        work="computes values; then learns from the returns, before the actor does",
    ),
    RoleEntry(
        name="reference",
        kind="model",
        parts=_FORWARD,
        turn=5,
        section="reference",
        present_if="`algorithm.kl.coef` or `algorithm.distill_coef` above 0",
        work="computes log-probs",
    ),
    RoleEntry(
        name="reward",
        kind="model",
        parts=_TRAINED,  # it can be trained: task rm
        turn=2,
        section="reward",
        present_if="`reward.model`",
        work="scores episodes at the end of their last segment, before groups are filtered",
        makes_groups=True,
    ),
    RoleEntry(
        name="judge",
        kind="engine",
        parts=_ENGINE,
        turn=3,
        section="reward.judge.engine",
        present_if="`reward.judge.rubric` without `reward.judge.url`",
        work=(
            "writes verdicts on answers, which hosts add to rewards before groups are filtered; keeps its own weights"
        ),
        is_independent=True,
        answers_pings=True,
        makes_groups=True,
    ),
    RoleEntry(
        name="rollout",
        kind="engine",
        parts=_ENGINE,
        turn=0,
        section="rollout",
        present_if="always",
        work="samples",
        is_independent=True,
        answers_pings=True,
        gets_weights=True,
        makes_groups=True,
    ),
    RoleEntry(
        name="env",
        kind="simulator",
        parts=frozenset({Part.SIMULATOR}),
        turn=1,
        section="env",
        present_if="`env.path`",
        work="simulates what the policy acts in, while the policy's engines sample",
        is_independent=True,
        answers_pings=True,
    ),
    RoleEntry(
        name="inference",
        kind="model",
        parts=_FORWARD,
        turn=6,
        section="inference",
        present_if="the placement names it",
        work=("computes old log-probs on devices of its own; gets the actor's weights in every sync, as engines do"),
        gets_weights=True,
    ),
)
ROLES: dict[str, RoleEntry] = {entry.name: entry for entry in _ENTRIES}  # in the order in which messages list them

_COMPONENT = RoleEntry(
    name="a custom name",
    kind="component",
    parts=_FORWARD,  # whatever it keeps on its devices
    turn=4,
    section="components",
    present_if="`components`",
    work=(
        "a user's class sees scored groups (`loop/workers/component.py`) and may score or drop them"
        " (`loop/rl/components.py`), before groups are filtered"
    ),
    is_independent=True,
    makes_groups=True,
)


def role_entry(name: str) -> RoleEntry:
    """Return the facts about a role; any other name is that of a user's component."""
    return ROLES.get(name) or replace(_COMPONENT, name=name, section=f"components.{name}")


def roles_in_docs() -> list[RoleEntry]:
    """Return all entries, that of components included, in the order of their work in a step."""
    return sorted([*ROLES.values(), _COMPONENT], key=lambda entry: entry.turn)
