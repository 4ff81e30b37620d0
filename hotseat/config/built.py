"""What of the config tree this version cannot run yet. One line goes when its feature comes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hotseat.config.roles import roles_of
from hotseat.config.schema import Config


@dataclass(frozen=True)
class Unbuilt:
    """A field or section that may only have its default; or, with `values`, one that may not have these."""

    key: str
    what: str
    values: tuple[Any, ...] = ()
    role: str | None = None  # asked for by a run that has this role
    options: tuple[str, ...] = ()  # keys that matter to nothing else

    def is_asked_for(self, config: Config) -> bool:
        if self.role is not None:
            return self.role in roles_of(config)
        value, default = value_at(config, self.key), value_at(Config(), self.key)
        return value in self.values if self.values else value != default

    def owns(self, key: str) -> bool:
        """Whether a key is the feature's own, so that nothing reads it before the feature is there."""
        own = self.options if self.values or self.role else (self.key, *self.options)
        return any(key == each or key.startswith(each + ".") for each in own)


UNBUILT: tuple[Unbuilt, ...] = (
    Unbuilt("task", "preference optimisation", ("dpo",), options=("algorithm.dpo",)),
    Unbuilt("flow", "flows other than the task's own"),
    Unbuilt("rollout.generate_batch_size", "sampling more prompts than a step needs"),
    Unbuilt("reward.url", "reward servers"),
    Unbuilt("cluster.component_placement", "simulators", role="env", options=("env",)),
    Unbuilt("actor.optimizer.kind", "Muon", options=("actor.optimizer.muon",)),
    Unbuilt("critic.optimizer.kind", "Muon", options=("critic.optimizer.muon",)),
    Unbuilt("train.attention", "a choice of attention"),
    Unbuilt("train.load_in_4bit", "4-bit weights"),
    Unbuilt("train.full_determinism", "deterministic kernels"),
    Unbuilt("data.image_key", "images", options=("data.max_images_per_prompt",)),
    Unbuilt("use_modelscope", "ModelScope"),
)


def value_at(config: BaseModel, key: str) -> Any:
    """The value of a dotted key; of a section, the section."""
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def not_built(config: Config, set_keys: Iterable[str] = ()) -> list[tuple[str, str]]:
    """(key, feature) of what this config asks for and this version does not have.

    Of a section, the key is the first of `set_keys` in it that is not at its default: what the user wrote.
    """
    default = Config()
    changed = [key for key in set_keys if value_at(config, key) != value_at(default, key)]
    found = []
    for unbuilt in UNBUILT:
        if unbuilt.is_asked_for(config):
            inside = (key for key in changed if key.startswith(unbuilt.key + "."))
            found.append((next(inside, unbuilt.key), unbuilt.what))
    return found
