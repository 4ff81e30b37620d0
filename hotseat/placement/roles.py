"""Roles, and the parts that each can keep on a device."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from hotseat.errors import PlacementError


class Part(StrEnum):
    """A part of a role's state that stays on a device between computations."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"  # moments, and the fp32 master weights where there are any
    KV_CACHE = "kv_cache"
    SIMULATOR = "simulator"


_FORWARD = frozenset({Part.WEIGHTS})
_TRAINED = frozenset({Part.WEIGHTS, Part.GRADIENTS, Part.OPTIMIZER})

# A reward model can be trained (task rm), hence its three parts.
PARTS_OF_ROLE: dict[str, frozenset[Part]] = {
    "actor": _TRAINED,
    "critic": _TRAINED,
    "reference": _FORWARD,
    "reward": _TRAINED,
    "judge": frozenset({Part.WEIGHTS, Part.KV_CACHE}),
    "rollout": frozenset({Part.WEIGHTS, Part.KV_CACHE}),
    "env": frozenset({Part.SIMULATOR}),
    "inference": _FORWARD,
}
ROLES: tuple[str, ...] = tuple(PARTS_OF_ROLE)
_PARTS_OF_COMPONENT = _FORWARD  # of a user's own class: whatever it keeps on its devices
_SECTIONS = {"judge": "reward.judge.engine"}


def section_of(role: str) -> str:
    """Return the name of the section that holds a role's options, for messages."""
    return _SECTIONS.get(role, role) if role in PARTS_OF_ROLE else f"components.{role}"


def parts_of(role: str) -> frozenset[Part]:
    """Return the parts that a role can keep on a device; other names are those of components of one's own."""
    return PARTS_OF_ROLE.get(role, _PARTS_OF_COMPONENT)


def nearest(word: str, choices: tuple[str, ...]) -> str | None:
    """Return the choice that `word` was probably meant to be, or None."""
    import difflib  # only on the way to an error message

    for choice in choices:
        if word and (choice.startswith(word) or word.startswith(choice)):
            return choice
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return matches[0] if matches else None


def check_role(name: str, components: Collection[str] = ()) -> str:
    """Return `name` if it is a role, or one of the user's own components; otherwise raise an error with the nearest."""
    if name in PARTS_OF_ROLE or name in components:
        return name
    guess = nearest(name.lower(), (*ROLES, *components))
    hint = f"did you mean {guess!r}? " if guess else ""
    raise PlacementError(
        f"unknown role {name!r}: {hint}the roles are {', '.join((*ROLES, *components))}; other names for"
        " them are declared in cluster.component_names, components of one's own in components"
    )
