"""A flag of OpenRLHF: its spellings, values and defaults, and the config fields that it sets.

Names are those of OpenRLHF 0.8 and 0.9, where words are joined by underscores; `dotted` is the newer spelling. Where
the two have different defaults, a command line with a dotted flag in it gets the newer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["int", "int|auto", "float", "str", "switch"]
MANY = 1_000_000  # number of values of a flag without a bound
UNBOUNDED = 100_000_000  # OpenRLHF's defaults from this number on stand for no limit
SAME: Any = object()  # marks a newer default that equals the older one


@dataclass(frozen=True)
class Flag:
    """One flag: it sets config fields, or has no effect (and says why)."""

    name: str
    dotted: str | None = None
    kind: Kind = "str"
    num_values: tuple[int, int] = (1, 1)  # least and most
    default: Any = None  # OpenRLHF's
    newer_default: Any = SAME
    sets: tuple[str, ...] = ()  # config fields
    by: str | None = None  # name of the function in derive.py that computes the fields; None: the value is copied
    convert: Callable[[Any], Any] | None = None  # applied to a value that is copied
    choices: Mapping[str, Any] | None = None  # word -> value
    because: str | None = None  # why it never has an effect
    read_by: str | None = None  # file:name of the code that reads a flag that sets no field
    aliases: tuple[str, ...] = ()
    is_secret: bool = False

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.name, *([self.dotted] if self.dotted else []), *self.aliases)

    def default_for(self, is_newer: bool) -> Any:
        return self.default if self.newer_default is SAME or not is_newer else self.newer_default


# --- conversion of values that OpenRLHF encodes -----------------------------------------------------------------------


def negated(value: bool) -> bool:
    return not value


def unless_minus_one(value: int) -> int | None:
    """Convert OpenRLHF's -1, which stands for never, to None."""
    return None if value == -1 else value


def unless_unbounded(value: float) -> float | None:
    return None if value >= UNBOUNDED else value


def from_zero(value: int) -> int:
    """Convert negative numbers, which stand for off in OpenRLHF, to 0."""
    return max(value, 0)


def whole(value: float | None) -> float | None:
    """Convert a whole float to an int: OpenRLHF reads some counts of tokens as floats."""
    return int(value) if value is not None and value.is_integer() else value


def symmetric(values: list[float]) -> list[float]:
    """Convert one number to the range around 0; keep two numbers."""
    return [-values[0], values[0]] if len(values) == 1 else values


def ipo_or_dpo(is_ipo: bool) -> str:
    return "ipo" if is_ipo else "dpo"


def all_or_some(values: list[str]) -> str | list[str]:
    return values[0] if values == ["all-linear"] else values


def flag(name: str, dotted: str | None, sets: str | Iterable[str] = (), **more: Any) -> Flag:
    return Flag(name, dotted, sets=(sets,) if isinstance(sets, str) else tuple(sets), **more)


def integer(name: str, dotted: str | None, default: int | None, sets: str | Iterable[str] = (), **more: Any) -> Flag:
    return flag(name, dotted, sets, kind="int", default=default, **more)


def integer_or_auto(name: str, dotted: str | None, default: int, sets: str, **more: Any) -> Flag:
    """Make a flag that takes a number, as in OpenRLHF, or `auto`, which is ours."""
    return flag(name, dotted, sets, kind="int|auto", default=default, **more)


def decimal(name: str, dotted: str | None, default: Any, sets: str | Iterable[str] = (), **more: Any) -> Flag:
    return flag(name, dotted, sets, kind="float", default=default, **more)


def text(name: str, dotted: str | None, default: str | None, sets: str | Iterable[str] = (), **more: Any) -> Flag:
    return flag(name, dotted, sets, kind="str", default=default, **more)


def switch(name: str, dotted: str | None, sets: str | Iterable[str] = (), **more: Any) -> Flag:
    return flag(name, dotted, sets, kind="switch", default=False, num_values=(0, 0), **more)
