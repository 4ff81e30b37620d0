"""Saved configs of runs, whose meaning does not change when a default does.

`to_yaml` leaves defaults out, so a file written under other defaults means something else when it is read again. A
saved config begins with a line that names its format; one without that line is of the first. The defaults of earlier
formats are filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotseat.config.load import loads, to_yaml
from hotseat.config.schema import Config
from hotseat.config.yaml_lines import dump, read_yaml
from hotseat.registry.tasks import DEFAULT_TASK, task_entry

MARK = "# hotseat config, format 3\n"
SECOND = "# hotseat config, format 2\n"


def to_saved(config: Config) -> str:
    """Format the config as a run keeps it, in its directory and in its checkpoints."""
    return MARK + to_yaml(config)


def loads_saved(text: str, overrides: Sequence[str] = ()) -> Config:
    """Read what `to_saved` wrote, in this version or an earlier one.

    Options that overrides leave without effect are removed, since users cannot remove them from a saved file.
    """
    if not text.startswith(MARK):
        text = _with_second_defaults(text if text.startswith(SECOND) else _with_first_defaults(text))
    return loads(text, overrides, forget_idle=True)


def _with_second_defaults(text: str) -> str:
    values: dict[str, Any] = read_yaml(text).values
    _section(values, "data").setdefault("max_lost_fraction", 1.0)
    _section(values, "train").setdefault("dtype", "bf16")
    return dump(values)


def _with_first_defaults(text: str) -> str:
    values: dict[str, Any] = read_yaml(text).values
    is_rl = task_entry(values.get("task", DEFAULT_TASK)).has_rollouts
    for name, size in (("train", 4), ("rollout", 16))[: 2 if is_rl else 1]:
        section = _section(values, name)
        if not section.keys() & {"max_tokens_per_device", "chosen_tokens_per_device"}:
            section.setdefault("micro_batch_size", size)
    if is_rl:
        algorithm = _section(values, "algorithm")
        algorithm.setdefault("aggregation", "token_mean")
        kl = _section(algorithm, "kl")
        if kl.get("coef", 0.0):
            kl.setdefault("estimator", "k1")
            if kl.get("as_loss") and kl["estimator"] == "k1":
                kl["allow_k1_loss"] = True
    return dump(_without_empty(values))


def _section(values: dict[str, Any], name: str) -> dict[str, Any]:
    section: dict[str, Any] = values.setdefault(name, {})
    return section


def _without_empty(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: _without_empty(value) if isinstance(value, Mapping) else value for key, value in values.items()}
    return {key: value for key, value in kept.items() if value != {}}
