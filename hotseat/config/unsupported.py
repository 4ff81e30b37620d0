"""The list of options that this version cannot run, yet or at all. Building a feature removes its line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hotseat.config.presence import roles_of
from hotseat.config.schema import Config


@dataclass(frozen=True)
class Unbuilt:
    """A feature that is not built: a field or section that must keep its default or, with `values`, not have these."""

    key: str
    what: str
    values: tuple[Any, ...] = ()
    role: str | None = None  # a run with this role needs the feature
    options: tuple[str, ...] = ()  # keys that only this feature reads
    is_refused: bool = False  # it is not to be built, for the reason in `what`

    def is_asked_for(self, config: Config) -> bool:
        if self.role is not None:
            return self.role in roles_of(config)
        value, default = value_at(config, self.key), value_at(Config(), self.key)
        return value in self.values if self.values else value != default

    def owns(self, key: str) -> bool:
        """Return whether a key belongs to this feature, so that nothing reads it before the feature is built."""
        own = self.options if self.values or self.role else (self.key, *self.options)
        return any(key == each or key.startswith(each + ".") for each in own)


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt(
        "train.load_in_4bit",
        "4-bit weights, with which engines and exports would have another model than the one that learns",
        is_refused=True,
    ),
    Unbuilt(
        "use_modelscope",
        "ModelScope; fetch the model with `modelscope download`, and give its folder",
        is_refused=True,
    ),
)


def value_at(config: BaseModel, key: str) -> Any:
    """Return the value, or the section, at a dotted key."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def unsupported(config: Config, set_keys: Iterable[str] = ()) -> list[tuple[str, str]]:
    """Return (key, feature) of every feature that this config uses and this version does not have.

    Where the feature is a section, the key is the first of `set_keys` in it that is not at its default.
    """
    default = Config()
    changed = [key for key in set_keys if value_at(config, key) != value_at(default, key)]
    features = []
    for unbuilt in UNBUILT:
        if unbuilt.is_asked_for(config):
            inside = (key for key in changed if key.startswith(unbuilt.key + "."))
            features.append((next(inside, unbuilt.key), unbuilt.what))
    return features
