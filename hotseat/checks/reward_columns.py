"""Columns of the data: for reward functions of TRL's form, which are called by names, and for hints at labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hotseat.checks.stage import DataContext
from hotseat.checks.user_files import parameters_of
from hotseat.config import Config
from hotseat.config.presence import has_reward_model, has_simulator, reward_files
from hotseat.errors import Problem, UserError
from hotseat.extensions import REWARD_FORMS
from hotseat.rewards.function import locate
from hotseat.rewards.function_worker import is_trl_form
from hotseat.words import label_text

if TYPE_CHECKING:
    from hotseat.types import Prompt

# Names under which such a function gets the prompts and the answers.
_PASSED = ("prompts", "completions", "completion_ids")
_NO_COLUMNS = ("prompt", "completion", *_PASSED)


def keeps_columns(config: Config) -> bool:
    """Return whether prompts have to keep the columns of their rows: some function may be called by names."""
    return any(parameters is None or is_trl_form(parameters) for _, _, parameters, _ in _functions(config))


def columns(context: DataContext) -> Iterator[Problem]:
    """Find functions that are called by names and require a column that the data does not have."""
    config = context.config
    yield from _lacking(config, _keys_of_functions(config, "data.path"), context.prompts)
    yield from _lacking(config, _keys_of_functions(config, "eval.path"), context.eval_prompts)


def left_out_notes(config: Config, source: str, left_out: Mapping[str, str]) -> list[str]:
    """Return warnings about columns that functions cannot get. Raises if a function requires one.

    source: the key that names the data. left_out: why, by column.
    """
    reasons = {
        name: f"the column {name} is not passed to reward functions, since {why} in it: store it as text or numbers"
        for name, why in left_out.items()
        if name not in _NO_COLUMNS
    }
    used = _keys_of_functions(config, source)
    for key, path, parameters, form in _functions(config):
        if key not in used or parameters is None or not is_trl_form(parameters):
            continue
        if required := [name for name in reasons if parameters.get(name)]:
            raise UserError(
                f"{source}: {key} {path}: it has a parameter {form}, and it requires {', '.join(required)}:"
                f" {'; '.join(reasons[name] for name in required)}"
            )
    return [f"warning: {source}: {reason}" for reason in reasons.values()]


def _keys_of_functions(config: Config, source: str) -> list[str]:
    """Return the keys of the functions that score the data that the key `source` names."""
    learned = [key for key, _ in reward_files(config)]
    if source == "data.path":
        return learned
    if config.eval.reward is not None:
        return ["eval.reward"]
    return [] if config.eval.graders else learned  # graders score evaluations without the function


def _lacking(config: Config, used: Sequence[str], prompts: Sequence[Prompt]) -> Iterator[Problem]:
    """Find that a function of the keys `used` requires a column that these prompts do not have."""
    if not prompts:
        return
    there = [name for name in prompts[0].columns or () if name not in _NO_COLUMNS]
    for key, path, parameters, form in _functions(config):
        if key not in used or parameters is None or not is_trl_form(parameters):
            continue
        missing = [name for name, is_required in parameters.items() if is_required and name not in (*_PASSED, *there)]
        if missing:
            yield Problem(
                "",
                f"{key} {path}: it has a parameter {form}, and it requires"
                f" {', '.join(missing)}: no such column. It can have the columns {', '.join(there) or '(none)'}, and"
                f" {', '.join(_PASSED)}: rename the parameter or the column, or give the parameter a default",
            )


def _functions(config: Config) -> Iterator[tuple[str, str, dict[str, bool] | None, str]]:
    """Yield (key, path, parameters, form) of the reward functions, the form in words, after `it has a parameter`.

    parameters: those of a function of another framework's form are what it is made to have; None where the text does
    not show them.
    """
    of_evaluation = [] if config.eval.reward is None else [("eval.reward", config.eval.reward)]
    for key, path in (*reward_files(config), *of_evaluation):
        parameters = parameters_of(*locate(path))
        form = next((form for form in REWARD_FORMS if form.parameter in (parameters or ())), None)
        if form is None or is_trl_form(parameters or ()):
            yield key, path, parameters, "completions, so it is called by names, as TRL does"
        else:
            words = f"{form.parameter}, so it is called for each answer with columns of the data"
            yield key, path, {"completions": True, **form.columns}, words


# --- labels -----------------------------------------------------------------------------------------------------------


def label_hint(config: Config, prompts: Sequence[Prompt]) -> str:
    """Return a hint at `data.label_key` if no prompt has a label that a reward could use; "" if some prompt has."""
    data = config.data
    if data.path is None or has_simulator(config) or has_reward_model(config) or not prompts:
        return ""
    if any(label_text(prompt.label) is not None for prompt in prompts):
        return ""
    from hotseat.data import load_rows  # not above: a trial, before torch is loaded, uses the rest of this file

    row = next(iter(load_rows(data.path, split=data.split, max_samples=1)), None)
    return label_hint_of(config, () if row is None else row.values)


def label_hint_of(config: Config, columns: Iterable[str]) -> str:
    """Return the hint for data with these columns and without labels; "" if no function would get them."""
    if any(parameters is not None and is_trl_form(parameters) for _, _, parameters, _ in _functions(config)):
        return ""  # it gets the columns themselves
    key = config.data.label_key
    why = "data.label_key is not set" if key is None else f"under data.label_key {key!r} every label is empty"
    others = [name for name in columns if name not in (config.data.input_key, key)]
    return f'hint: {why}, so every label is "": set it to one of the other columns: {", ".join(others) or "none"}'
