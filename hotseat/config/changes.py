"""Changes of the config between a checkpoint and the run that resumes from it: which are allowed, and what they are.

A change after which the run could not end bit for bit as if uninterrupted is refused, unless the user names its key
(`checkpoint.allow_changes`). `may_change` lists the keys that may always change, by subject, as the schema says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.config.annotations import MayChange
from hotseat.config.conflicts import no_effect
from hotseat.config.hiding import without_secrets
from hotseat.config.load import loads_saved, nearest_key, valid_keys
from hotseat.config.precision import with_dtype_of
from hotseat.config.resolved import FP8_KEYS
from hotseat.config.schema import Config, changeable_keys
from hotseat.errors import UserError

# The length of a run, and so of its schedules.
NUM_STEPS = (*changeable_keys(MayChange.STEPS), *changeable_keys(MayChange.PASSES))
_NEVER = ("task", "seed")  # refused even if the user names them: the order of prompts follows from the seed
_SILENT = ("checkpoint.resume", "checkpoint.allow_changes", "name", "run_dir")  # not reported: they change no result


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the checkpoint's. is_allowed: accepted only because the user named it."""

    key: str
    before: Any
    after: Any
    is_allowed: bool = False

    def __str__(self) -> str:
        before, after = (without_secrets(value, self.key.rpartition(".")[2]) for value in (self.before, self.after))
        return f"{self.key}: {before} when the checkpoint was written, now {after}"


def may_change(config: Config | None = None) -> list[tuple[str, tuple[str, ...]]]:
    """Return (subject, keys) of what may change without `allow_changes`, for one config or for all of them."""
    is_rl = config is not None and config.has_rollouts
    subjects = [subject for subject in MayChange if not is_rl or subject is not MayChange.PASSES]
    return [(subject.value, changeable_keys(subject)) for subject in subjects]


def changes_between(saved: str, config: Config) -> list[Change]:
    """List the changes since a checkpoint with the `saved` config was written; raise UserError for forbidden ones."""
    allowed = config.checkpoint.allow_changes
    known = list(valid_keys())
    for key in allowed:
        if not any(_is_below(each, [key]) for each in known):
            raise UserError(f"--allow-change {key}: unknown key; {nearest_key(tuple(key.split('.')))}")
    free = _free_keys(config)
    accepted: list[Change] = []
    refused: list[Change] = []
    for change in _differences(saved, config):
        if _is_below(change.key, free):
            accepted.append(change)
        elif _is_below(change.key, allowed) and not _is_below(change.key, _NEVER):
            accepted.append(replace(change, is_allowed=True))
        else:
            refused.append(change)
    if refused:
        raise UserError(_changes_error(refused, [change.key for change in accepted if change.is_allowed]))
    used = [change.key for change in accepted if change.is_allowed]
    unused = [key for key in allowed if not any(_is_below(each, [key]) for each in used)]
    if unused:
        raise UserError(
            f"--allow-change {unused[0]} has no effect: its value is that of the checkpoint, or may change without"
            " permission; leave it out"
        )
    return accepted


def keys_to_allow(saved: str, config: Config) -> list[str]:
    """List what differs from a checkpoint with the `saved` config and may not, unless the user names it."""
    kept = (*_free_keys(config), *_NEVER)
    return [change.key for change in _differences(saved, config) if not _is_below(change.key, kept)]


def _free_keys(config: Config) -> list[str]:
    return [key for _, keys in may_change(config) for key in keys]


def _differences(saved: str, config: Config) -> Iterator[Change]:
    """Yield what a resumed run has otherwise, except what it takes over from the checkpoint and what has no effect."""
    before = loads_saved(saved)
    resumed = with_dtype_of(config, before)
    then, now = _flat(before.model_dump(mode="json")), _flat(resumed.model_dump(mode="json"))
    different = [key for key in dict.fromkeys((*now, *then)) if then.get(key) != now.get(key)]
    idle = {key for key, _ in no_effect(resumed, different)}
    for key in different:
        old, new = then.get(key), now.get(key)
        # What the run chose before is taken from the checkpoint.
        is_budget = key.endswith("chosen_tokens_per_device")
        is_left = new is None and (is_budget or key in ("rollout.num_engines", "rollout.num_slots"))
        is_taken_over = is_left or (key == "train.checkpointed_layers" and new == "auto")
        # FP8 decides the default of algorithm.correction, so it counts even where another engine has no such option.
        is_idle = key in idle and key not in FP8_KEYS
        if is_taken_over or is_idle or _is_below(key, _SILENT):
            continue
        yield Change(key, old, new)


def _changes_error(refused: Sequence[Change], allowed: Sequence[str]) -> str:
    """Compose the error for refused changes, with what to add to the command to resume anyway.

    allowed: keys that the command allows already. They are named again, since OpenRLHF's commands take the last list.
    """
    lines = [f"  {change}" for change in refused]
    keys = [change.key for change in refused if not _is_below(change.key, _NEVER)]
    never = " and ".join(change.key for change in refused if change.key not in keys)
    again = f"repeat the command with{''.join(f' --allow-change {key}' for key in (*allowed, *keys))}"
    if never:
        hint = f"set {never} back{f' and {again}' if keys else ''}, or start a new run"
    else:
        hint = f"set them back, or start a new run; to resume anyway, with different results, {again}"
    return "\n".join(["this run cannot be resumed with another config:", *lines, hint])


def _is_below(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
