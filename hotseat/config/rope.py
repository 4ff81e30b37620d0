"""The value of `actor.rope_scaling`: how rotary positions are stretched beyond those of a checkpoint.

Only kinds whose angles depend on the position alone, and with parameters that every engine reads alike: those of the
others depend on the lengths in a batch, so that engine and trainer would disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Kind -> parameters that it must have, besides the factor, and those that it may have.
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "yarn": ((), ("original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "rope_theta")),
    "linear": ((), ("original_max_position_embeddings", "rope_theta")),
    "llama3": (
        ("low_freq_factor", "high_freq_factor"),
        ("original_max_position_embeddings", "rope_theta"),
    ),
}


def rope_scaling_problem(scaling: Mapping[str, Any]) -> str | None:
    """Return why a value of `actor.rope_scaling` cannot be used, whatever the model; None if it can."""
    kind, factor = scaling.get("rope_type"), scaling.get("factor")
    if kind not in KINDS:
        return (
            f"rope_type is {kind!r}, must be one of {', '.join(KINDS)}: of others, angles depend on more than the"
            " position, so that engines and trainer disagree"
        )
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 1:
        return f"factor is {factor!r}, must be a number above 1: by how much positions are stretched"
    needed, optional = KINDS[kind]
    absent = [name for name in needed if name not in scaling]
    if absent:
        return f"{kind} needs {' and '.join(absent)}, too"
    unknown = sorted(scaling.keys() - {"rope_type", "factor", *needed, *optional})
    if unknown:
        return (
            f"{unknown[0]} is no parameter of {kind} that every engine reads; it takes {', '.join(needed + optional)}"
        )
    wrong = [name for name in needed + optional if not isinstance(scaling.get(name, 1), int | float)]
    return f"{wrong[0]} is {scaling[wrong[0]]!r}, must be a number" if wrong else None
