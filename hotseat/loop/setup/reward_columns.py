"""Columns of the data for reward functions of TRL's form, which are called by names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotseat.config import Config
from hotseat.errors import UserError
from hotseat.loop.setup.user_files import parameters_of
from hotseat.rewards.function import locate
from hotseat.types import Prompt

# Names under which such a function gets the prompts and the answers.
_PASSED = ("prompts", "completions", "completion_ids")


def keeps_columns(config: Config) -> bool:
    """Return whether prompts have to keep the columns of their rows: some function may be called by names."""
    return any(parameters is None or "completions" in parameters for _, _, parameters in _functions(config))


def check_columns(config: Config, prompts: Sequence[Prompt], *, is_evaluation: bool = False) -> None:
    """Raise `UserError` if a function that is called by names requires a column that the data does not have."""
    used = "eval.reward" if is_evaluation and config.eval.reward is not None else "reward.function"
    there = [name for name in prompts[0].columns or () if name not in ("prompt", "completion", *_PASSED)]
    for key, path, parameters in _functions(config):
        if key != used or parameters is None or "completions" not in parameters:
            continue
        missing = [name for name, is_required in parameters.items() if is_required and name not in (*_PASSED, *there)]
        if missing:
            raise UserError(
                f"{key} {path}: it has a parameter completions, so it is called by names, as TRL does, and it requires"
                f" {', '.join(missing)}: no such column. It can have the columns {', '.join(there) or '(none)'}, and"
                f" {', '.join(_PASSED)}: rename the parameter or the column, or give the parameter a default"
            )


def _functions(config: Config) -> Iterator[tuple[str, str, dict[str, bool] | None]]:
    """Yield (key, path, parameters) of the reward functions; parameters is None where the text does not show them."""
    for key, path in (("reward.function", config.reward.function), ("eval.reward", config.eval.reward)):
        if path is not None:
            yield key, path, parameters_of(*locate(path))
