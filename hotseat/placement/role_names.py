"""Names of roles, and the nearest valid name for a wrong one."""

from __future__ import annotations

from collections.abc import Collection

from hotseat.errors import PlacementError
from hotseat.registry.roles import ROLES, Part

__all__ = ["Part", "check_role", "did_you_mean", "nearest"]


def nearest(word: str, choices: tuple[str, ...]) -> str | None:
    """Return the choice that `word` was probably meant to be, or None."""
    import difflib  # only on the way to an error message

    for choice in choices:
        if word and (choice.startswith(word) or word.startswith(choice)):
            return choice
    matches = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return matches[0] if matches else None


def did_you_mean(word: str, choices: tuple[str, ...]) -> str:
    """Return the part of an error message that names the nearest choice; empty if there is none."""
    guess = nearest(word, choices)
    return f"did you mean {guess!r}? " if guess else ""


def check_role(name: str, components: Collection[str] = ()) -> str:
    """Return `name` if it is a role, or a custom component; otherwise raise an error with the nearest."""
    if name in ROLES or name in components:
        return name
    hint = did_you_mean(name.lower(), (*ROLES, *components))
    raise PlacementError(
        f"unknown role {name!r}: {hint}the roles are {', '.join((*ROLES, *components))}; other names for"
        " them are declared in cluster.component_names, custom components in components"
    )
