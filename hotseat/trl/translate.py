"""`hotseat.from_trl`: a config object of TRL becomes our config."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any, NamedTuple

from hotseat.config import Config, conflicts
from hotseat.config.load import validate
from hotseat.config.yaml_lines import Document, nested
from hotseat.errors import ConfigError, Problem
from hotseat.trl.derive import DERIVED, ConfigDraft
from hotseat.trl.fields import CONFIGS, VERSION, TrlConfig, TrlField
from hotseat.trl.lora import default_of, derive_lora, is_lora

# What fields stand for in versions of TRL that do not have them yet, where that is not their default.
_BEFORE = {"use_bias_correction_kl": False}
_COUNTS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps"),
    *("num_generations", "num_iterations", "steps_per_generation"),
)
# Options without an effect until the user names the data to evaluate on.
_LATER = "eval."


class TrlTranslation(NamedTuple):
    """A checked config, and what differs from TRL's run, a line each that begins with the field."""

    config: Config
    differences: list[str]


def from_trl(
    config: Any,
    *,
    model: str | os.PathLike[str] | None = None,
    peft_config: Any = None,
    num_processes: int | None = None,
) -> TrlTranslation:
    """Translate TRL's GRPOConfig, SFTConfig, DPOConfig or RewardConfig into a config that means the same run.

    model: checkpoint directory or hub name. peft_config: PEFT's LoraConfig. num_processes: with which the script would
    have been launched, since TRL's batch sizes are those of one; unset is what the config object says. The data and the
    rewards are no part of it: `hotseat.run(config, "data.path=...", "reward.function=...")`. Raises one ConfigError
    that names every value that cannot be carried over, with the reason.
    """
    entry = _entry_of(config)
    names = [field.name for field in entry.fields]
    values = {name: _plain(getattr(config, name, _BEFORE.get(name, _default(entry, name)))) for name in names}
    world_size = max(1, int(config.world_size))
    draft = ConfigDraft(entry.task, values, world_size if num_processes is None else num_processes, world_size)
    _check_counts(draft)
    draft.set("", {"task": entry.task})
    _note_strangers(draft, config, names)
    _set_keys(draft, entry)
    if peft_config is not None:
        _set_adapters(draft, peft_config)
    if isinstance(model, str | os.PathLike):
        draft.set("model", {"actor.model": os.fspath(model)})
    elif model is not None:
        draft.refuse("model", f"{type(model).__name__}: give the checkpoint's directory or its hub name")
    return TrlTranslation(_checked(draft), draft.differences)


def _entry_of(config: Any) -> TrlConfig:
    """Return the entry of TRL's class of an object, or of a class of the user's that inherits from it."""
    theirs = next((each for each in type(config).__mro__ if each.__module__.split(".")[0] == "trl"), type(config))
    if theirs.__module__.startswith("trl.trainer.") and theirs.__name__ in CONFIGS:
        return CONFIGS[theirs.__name__]
    takes = ", ".join(CONFIGS)
    raise ConfigError([Problem("", f"{theirs.__module__}.{theirs.__name__} is no config that is known here: {takes}")])


def _default(entry: TrlConfig, name: str) -> Any:
    return next(entry.default_of(field) for field in entry.fields if field.name == name)


def _check_counts(draft: ConfigDraft) -> None:
    """Raise an error for counts below 1, by which others are divided."""
    counts = {name: draft.values[name] for name in _COUNTS if draft.values.get(name) is not None}
    counts["num_processes"] = draft.num_processes
    problems = [Problem(name, f"given {count}, must be at least 1") for name, count in counts.items() if count < 1]
    if problems:
        raise ConfigError(problems)


def _plain(value: Any) -> Any:
    """Replace enumerations by their values, and objects with fields by mappings."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value


def _note_strangers(draft: ConfigDraft, config: Any, names: list[str]) -> None:
    """Note fields that the config has and the table does not know, and the other way round: another version of TRL."""
    for field in dataclasses.fields(config):
        if field.name not in names and default_of(field) not in (dataclasses.MISSING, getattr(config, field.name)):
            value = getattr(config, field.name)
            draft.refuse(field.name, f"{value!r}: no field of TRL {VERSION}, whose configs are known here")
    lacking = [name for name in names if not hasattr(config, name)]
    if lacking:
        draft.differ("", f"no fields of this version of TRL, read as unset: {', '.join(lacking)}")


def _set_keys(draft: ConfigDraft, entry: TrlConfig) -> None:
    for name in dict.fromkeys(field.by for field in entry.fields if field.by is not None):
        DERIVED[name](draft)
    for field in entry.fields:
        if field.by is not None:
            continue
        value = draft.values[field.name]
        if field.sets:
            for key in field.sets:
                draft.set(field.name, {key: field.convert(value) if field.convert else value})
        elif not _is_default(field, entry, value):
            shown = "a value" if field.is_secret else repr(value)
            if field.is_refused:
                draft.refuse(field.name, f"{shown}: {field.note}")
            else:
                draft.differ(field.name, f"{shown} has no effect here: {field.note}")


def _is_default(field: TrlField, entry: TrlConfig, value: Any) -> bool:
    return value in (entry.default_of(field), *field.silent)


def _set_adapters(draft: ConfigDraft, peft_config: Any) -> None:
    if is_lora(peft_config):
        derive_lora(draft, peft_config)
    else:
        draft.refuse("peft_config", f"{type(peft_config).__name__}: adapters are those of PEFT's LoraConfig")


def _checked(draft: ConfigDraft) -> Config:
    """Check the draft's keys as those of a file; raise an error that names the fields that set them."""

    def named(key: str, message: str) -> Problem:
        origin = draft.origins.get(key.partition("[")[0])
        return Problem(origin, f"{key}: {message}") if origin else Problem(key, message)

    config, problems = validate(Document(nested(draft.keys)))
    found = [(problem.key, problem.message) for problem in problems]
    bad = {key for key, _ in found}
    idle = conflicts.no_effect(config, [key for key in draft.keys if not key.startswith(_LATER) and key not in bad])
    found += [(key, f"has no effect: {because}") for key, because in idle]
    found += [problem for problem in conflicts.conflicts(config) if problem[0] not in bad]
    refused = {problem.key for problem in draft.problems}
    draft.problems += [problem for problem in (named(*each) for each in found) if problem.key not in refused]
    if draft.problems:
        raise ConfigError(draft.problems)
    return config
