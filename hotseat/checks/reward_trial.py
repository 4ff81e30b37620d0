"""Calls the user's reward function once before a run starts, so that a broken one is refused before a model loads.

The call is made as for the first row, with the label as every answer. A model may never write such an answer, and the
prompt has no chat template around it: a function that raises, or that gives no reward, may be right to do so, and the
run starts with a warning. A problem that no answer can cause is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotseat.checks.named_files import first_row
from hotseat.checks.reward_columns import label_hint_of
from hotseat.checks.stage import CheckContext
from hotseat.checks.user_files import line_of_function
from hotseat.config import Config
from hotseat.config.presence import reward_files
from hotseat.errors import Problem
from hotseat.rewards.function import Trial, try_reward
from hotseat.user_functions import shown_place
from hotseat.words import label_text

# Outcomes for which a run is refused, by whether the call was made for a row of the data. The function may be unable to
# score a made-up row.
_REFUSED = {True: ("broken", "not here", "unusable"), False: ("broken", "not here")}
_MAX_SHOWN = 200  # characters of a prompt, or of what was returned


@dataclass(frozen=True)
class TrialRow:
    """Row to call a reward function with. source: the file whose first row it is; None if it is made up.

    columns: of that row, for functions that are called by names.
    """

    prompt: str
    label: Any
    answer: str
    source: str | None
    columns: dict[str, Any] | None = None


def reward_functions(context: CheckContext) -> Iterator[Problem]:
    """Try the reward functions of a config, to find broken ones. What may be right is noted."""
    config, notes = context.config, context.notes
    limit_s = config.reward.trial_timeout_s
    if not config.has_rollouts or limit_s == 0:
        return
    max_gib = config.reward.max_memory_gib
    evaluation = config.eval
    for key, path, data, num_samples in (
        *((key, path, config.data.path, config.rollout.samples_per_prompt) for key, path in reward_files(config)),
        ("eval.reward", evaluation.reward, evaluation.path, evaluation.samples_per_prompt),
    ):
        if path is None or not re.fullmatch(r".+\.py(:\w+)?", path):
            continue  # no file of the user's
        context.show(f"calling {path} once, to see that it works")
        row = trial_row(config, data)
        trial = try_reward(
            path,
            [row.prompt + row.answer] * num_samples,
            [row.prompt] * num_samples,
            [row.label] * num_samples,
            timeout_s=limit_s,
            max_memory_bytes=None if max_gib is None else int(max_gib * 2**30),
            seed=config.seed,
            # Ray's workers, in which the function will run, can import from the folder that the command is given in.
            extra_path=[] if config.cluster.is_in_process else [os.getcwd()],
            columns=row.columns,
            kwargs=config.reward.kwargs if key == "reward.function" else None,
        )
        is_elsewhere = trial.outcome == "not here" and bool(os.environ.get("RAY_ADDRESS"))
        if trial.outcome == "late":
            notes.append(f"{key}: {path} was not tried: no answer within {limit_s:g} s (reward.trial_timeout_s)")
        elif trial.outcome in _REFUSED[row.source is not None] and not is_elsewhere:
            yield Problem(
                key,
                f"{_described(config, path, trial, row, num_samples)}\n"
                "    docs/rewards.md has what it gets and what it may return; reward.trial_timeout_s=0 starts without"
                " this trial",
            )
        elif is_elsewhere or trial.outcome == "unusable" or (trial.outcome == "failed" and row.source is not None):
            notes.append(
                f"warning: {key}: {_described(config, path, trial, row, num_samples)}\n    The run stops if more than"
                f" {config.reward.max_failed_fraction:.0%} of a step's samples have no reward"
                " (reward.max_failed_fraction)"
            )


def trial_row(config: Config, path: str | None) -> TrialRow:
    """Make the row to call a reward function with: the first of a file of JSON lines, or a made-up one."""
    data = config.data
    file = Path(path or "").expanduser()
    row = first_row(file) if file.suffix == ".jsonl" and file.is_file() else None
    prompt = None if row is None else _text(row.get(data.input_key))
    is_unlabelled = row is not None and data.label_key is not None and row.get(data.label_key) is None
    if row is None or prompt is None or is_unlabelled:
        return TrialRow("1 + 1 = ", "" if data.label_key is None else "2", "2", None)
    if data.input_template is not None and not data.apply_chat_template:
        prompt = data.input_template.replace("{}", prompt)
    label = "" if data.label_key is None else row.get(data.label_key)
    columns = {**row, "prompt": row.get(data.input_key)}
    return TrialRow(prompt, label, label_text(label) or "an answer", path, columns)


def _text(value: Any) -> str | None:
    """Return the text of a prompt, which is a string or a list of messages; None if it is neither."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        content = value[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def _described(config: Config, path: str, trial: Trial, row: TrialRow, num_samples: int) -> str:
    """Describe where the function is, what went wrong, its arguments and its result."""
    file, _, name = path.partition(".py:")
    file = f"{file}.py" if name else file
    name = name or "reward_func"
    line = line_of_function(Path(file).expanduser(), name)
    where = shown_place(Path(file).expanduser()) if line is None else f"{file}:{line}"
    source = "a made-up row" if row.source is None else f"the first row of {row.source}"
    answer = "the label" if label_text(row.label) is not None else repr(row.answer)
    times = f", {num_samples} times" if num_samples > 1 else ""
    lines = [
        f"{where}: {name} {trial.problem}",
        f"    called as for {source}{times}: prompt {_shown(row.prompt)}, label {_shown(row.label)}, and {answer} as"
        " the answer",
    ]
    if trial.returned is not None:
        lines.append(f"    returned: {_shown(trial.returned)}")
    if label_text(row.label) is None and row.columns is not None:
        hint = label_hint_of(config, [name for name in row.columns if name != "prompt"])
        lines += [f"    {hint}"] if hint else []
    return "\n".join(lines)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
