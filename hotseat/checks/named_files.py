"""Checks of a config and of the files that it names: code, models and data. Needs no torch, transformers or Ray."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hotseat.checks.stage import CheckContext, Unsupported, problem_of
from hotseat.checks.user_files import (
    agent_problem,
    function_problem,
    is_reward_key,
    reward_problem,
    spelling_problem,
)
from hotseat.checks.weight_files import weights_problem
from hotseat.config import Config
from hotseat.config.chat_template import chat_template_problem
from hotseat.config.conflicts import missing
from hotseat.config.presence import (
    has_critic,
    has_judge_engine,
    has_reference,
    has_reward_model,
    has_simulator,
    reward_files,
    task_numbers,
)
from hotseat.config.resolved import judge_length
from hotseat.config.unsupported import unsupported
from hotseat.envs.family_loading import FAMILIES, import_problem, path_problem
from hotseat.errors import Problem
from hotseat.planning.config_plan import flow_problem
from hotseat.user_functions import is_of_script

# Endings of data files: a path with one of them is no name on the hub.
_ROW_FILES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow")
MODEL_FOLDER = "model"  # folder of a run with its exported model
# Formats that `datasets` reads by itself, as in json@FOLDER.
_BUILDERS = ("arrow", "csv", "json", "pandas", "parquet", "text", "webdataset", "xml")


def options(context: CheckContext) -> Iterator[Problem]:
    """Find options that a run must set and this config does not."""
    for key, message in missing(context.config):
        if key not in context.optional:
            yield Problem(key, message)


def flow(context: CheckContext) -> Iterator[Problem]:
    """Find a flow that no run can follow."""
    return problem_of("flow", flow_problem(context.config))


def unsupported_features(context: CheckContext) -> Iterator[Problem]:
    """Find features that this version does not have."""
    return (Unsupported(key, what) for key, what in unsupported(context.config))


# --- the user's code --------------------------------------------------------------------------------------------------


def user_files(context: CheckContext) -> Iterator[Problem]:
    """Find the user's files that are missing, or do not define what they should."""
    config = context.config
    if not config.has_rollouts:
        return
    for key, path, find_problem in (
        *((key, path, reward_problem) for key, path in reward_files(config)),
        ("eval.reward", config.eval.reward, reward_problem),
        ("agent.path", config.agent.path, agent_problem),
        ("algorithm.policy_loss", config.algorithm.policy_loss, function_problem),
        ("algorithm.estimator", config.algorithm.estimator, function_problem),
        ("data.sampler", config.data.sampler, function_problem),
        *((f"components.{name}.path", each.path, agent_problem) for name, each in config.components.items()),
    ):
        match = re.fullmatch(r"([^,]+\.py)(?::(\w+))?", path or "")
        if match is None:
            # The schema checks the names of functions, and the class of a component may be a module's.
            if path is not None and (key == "agent.path" or is_reward_key(key)):
                yield from problem_of(key, spelling_problem(key, path))
            continue
        file = Path(match[1]).expanduser()
        there_is_none = None if file.is_file() else f"there is no file {match[1]}{near(file)}"
        yield from problem_of(key, there_is_none or find_problem(file, match[2]))
    environment = config.agent.environment
    if environment.family is not None:
        from hotseat.agents.environments.families import library_problem  # which loads torch

        yield from problem_of("agent.environment", library_problem(environment.family, config.agent.python))
    elif config.agent.python is not None and shutil.which(config.agent.python) is None:
        hint = near(Path(config.agent.python))
        yield Problem("agent.python", f"there is no program {config.agent.python}{hint}")
    command = config.agent.command
    if command and shutil.which(command[0]) is None:
        yield Problem("agent.command", f"there is no program {command[0]}{near(Path(command[0]))}")


def simulators(context: CheckContext) -> Iterator[Problem]:
    """Find a simulator that is not there, or lacks a package."""
    config = context.config
    if has_simulator(config):
        path = str(config.env.path)
        problem = path_problem(path) or import_problem(path)
        if problem is not None:
            yield Problem("env.path", problem)
        elif not path.endswith(".py") and not config.env.tasks:
            example = FAMILIES[path].example
            yield Problem("env.tasks", f"not set: {path} has no tasks of its own; name some, such as {example}")


# --- models and data --------------------------------------------------------------------------------------------------


def models_of(config: Config) -> list[tuple[str, str]]:
    """List (key, folder or hub name) of every model that the run loads."""
    named = [
        ("actor.model", config.actor.model, True),
        ("critic.model", config.critic.model, has_critic(config)),
        ("reference.model", config.reference.model, has_reference(config)),
        ("reward.model", config.reward.model, has_reward_model(config)),
        ("reward.judge.model", config.reward.judge.model, has_judge_engine(config)),
        *((f"reference.teachers.{name}", model, True) for name, model in config.reference.teachers.items()),
    ]
    return [(key, name) for key, name, is_loaded in named if is_loaded and name is not None]


def looks_like_path(name: str) -> bool:
    """Tell whether a model that is no folder here was meant as one, and not as a name on the hub."""
    is_below_folder = "/" in name and Path(name).parent.is_dir()
    return name.startswith(("/", ".", "~")) or name.endswith("/") or name.count("/") > 1 or is_below_folder


def models(context: CheckContext) -> Iterator[Problem]:
    """Find models that are not there, or have no weights that can be loaded."""
    for key, name in models_of(context.config):
        yield from problem_of(key, model_problem(name))


def export_place(context: CheckContext) -> Iterator[Problem]:
    """Find a place for the trained model that is no folder, or in which no folder can be made."""
    config = context.config
    if config.checkpoint.export_path is None or os.environ.get("RAY_ADDRESS"):  # the first rank may be on another node
        return
    path = Path(config.checkpoint.export_path).absolute()
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    if not there.exists():
        problem = f"is a link to {os.readlink(there)}, which is not there"
    elif not there.is_dir():
        problem = "is a file"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = "cannot be written"
    else:
        return
    yield Problem("checkpoint.export_path", f"{there} {problem}, so the trained model could not go to {path}")


def model_problem(name: str) -> str | None:
    """Return why there is no model under a name that can only be a path, or none that loads; None: there may be one."""
    path = Path(name)
    if path.is_file():
        return f"{name} is a file: give the folder of a checkpoint, which holds config.json and weights"
    if path.is_dir() and not (path / "config.json").is_file():
        inside = [entry for entry in sorted(path.glob("*/config.json")) if entry.parent.name == MODEL_FOLDER]
        hint = f"; did you mean {inside[0].parent}?" if inside else ""
        return f"{name} is no checkpoint: there is no config.json in it{hint}"
    if not path.is_dir() and looks_like_path(name):
        home = path.expanduser()
        if home.is_dir():
            return f"{name}: ~ is not replaced here; write {home}"
        return f"there is no folder {name}{near(home)}"
    return weights_problem(path) if path.is_dir() else None


def _data_paths(config: Config) -> tuple[tuple[str, str | None], ...]:
    return ("data.path", config.data.path), ("eval.path", config.eval.path)


def _parts(joined: str | None) -> list[str]:
    """Return the names of data sets, none if the rows are tasks of an environment."""
    return [] if task_numbers(joined) is not None else (joined or "").split(",")


def rows(context: CheckContext) -> Iterator[Problem]:
    """Find data files that are not there."""
    for key, joined in _data_paths(context.config):
        for part in _parts(joined):
            part = part.strip()
            path = Path(part).expanduser()
            if not part or path.exists() or "@" in part:
                continue
            if part.startswith((".", "/", "~")) or path.suffix in _ROW_FILES or part.count("/") > 1:
                yield Problem(key, f"no such file or folder: {part}{near(path)}")


def hub_data_sets(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, name) of data sets that are neither files nor folders here, and so come from the hub."""
    for key, joined in _data_paths(config):
        for part in _parts(joined):
            name = part.strip()
            if not Path(name).expanduser().exists():
                name, _, folder = name.rpartition("@")  # NAME@FOLDER is a folder in it
                name = name.strip() or folder.strip()
                if "/" not in name and name != folder and Path(folder.strip()).expanduser().is_dir():
                    continue  # the format of the folder, as in json@FOLDER
            if name and name not in _BUILDERS and not Path(name).expanduser().exists():
                yield key, name


def columns(context: CheckContext) -> Iterator[Problem]:
    """Find columns that the first row of a file of JSON lines lacks."""
    config = context.config
    path = Path(config.data.path or "").expanduser()
    row = first_row(path) if path.suffix == ".jsonl" and path.is_file() else None
    if row is None:
        return
    data = config.data
    for name in config.task_entry.columns:
        column = getattr(data, name)
        if column is not None and column not in row:
            close = difflib.get_close_matches(column, row, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            columns = ", ".join(row) or "nothing"
            yield Problem(f"data.{name}", f"the first row of {path} has no {column!r}; {hint}it has: {columns}")


def chat_template(context: CheckContext) -> Iterator[Problem]:
    """Find a chat template that cannot be read."""
    return problem_of("data.chat_template", chat_template_problem(context.config.data.chat_template))


def num_rows_of(config: Config) -> int | None:
    """Count the rows of data in a single file of JSON lines; None for anything else."""
    path = Path(config.data.path or "").expanduser()
    if path.suffix != ".jsonl" or not path.is_file():
        return None
    with path.open(encoding="utf-8", errors="replace") as file:
        return sum(1 for line in file if line.strip())


def first_row(path: Path) -> dict[str, Any] | None:
    """Return the first row of a file of JSON lines; None if it is no row, for which reading the data raises later."""
    try:
        with path.open(encoding="utf-8") as file:
            row = json.loads(file.readline())
    except (OSError, ValueError):
        return None
    return row if isinstance(row, dict) else None


def near(path: Path, holding: str | None = None) -> str:
    """Return a hint for a path that does not exist: the entry with the most similar name, or the missing parent.

    holding: a file that a folder must have to be suggested.
    """
    parent = path.parent
    if is_of_script(path):
        return (
            ": it was an object of a Python script, and is not kept; to resume, call hotseat.run there with the same"
            " objects and name, and checkpoint.resume=true"
        )
    if not parent.is_dir():
        if holding is not None:
            return ""
        while not parent.parent.is_dir():
            parent = parent.parent
        return f": there is no {parent} either{near(parent)}"
    entries = [entry.name for entry in parent.iterdir() if holding is None or (entry / holding).is_file()]
    close = difflib.get_close_matches(path.name, entries, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {parent / close[0]}?"
    return "" if path.is_absolute() or holding is not None else f" (paths start in {Path.cwd()})"


# --- lengths ----------------------------------------------------------------------------------------------------------


def lengths(context: CheckContext) -> Iterator[Problem]:
    """Find sequences that may be longer than a local model has positions."""
    config = context.config
    for key, name in models_of(config):
        if key == "reward.model" and config.reward.retokenize:
            continue  # texts may be shorter in its own tokens
        try:
            shape = json.loads((Path(name) / "config.json").read_text())
        except (OSError, ValueError):
            continue  # reading the model raises later
        problem = length_problem(config, key, name, shape if isinstance(shape, dict) else {})
        if problem is not None:
            yield problem
            if problem.key == "data.max_length":
                return


def length_problem(config: Config, key: str, model: str, shape: Mapping[str, Any]) -> Problem | None:
    """Find that sequences, or requests to a judge, may be longer than a model with this config.json has positions."""
    option, length, is_set = "data.max_length", config.data.max_length, "max_length" in config.data.model_fields_set
    if key == "reward.judge.model":
        engine = config.reward.judge.engine
        option, length, is_set = "reward.judge.engine.max_length", judge_length(config), engine.max_length is not None
    positions = num_positions(shape)
    if positions is None or length <= positions:
        return None
    default = "" if is_set else " (its default)"
    why = f"{length}{default} is above the {positions} positions of {key} {model!r}: set it to {positions} or less"
    return Problem(option, why)


def num_positions(shape: Mapping[str, Any]) -> int | None:
    """Return the positions that a model with this config.json has; None if it does not say, or has no bound."""
    text = shape.get("text_config")
    values = text if isinstance(text, dict) else shape
    positions = values.get("max_position_embeddings", values.get("n_positions"))
    if not isinstance(positions, int) or positions < 1:
        return None
    # Scaled rotary angles reach further than some checkpoints state; engines, which know each kind, are stricter.
    scaling = values.get("rope_parameters") or values.get("rope_scaling")
    factor = scaling.get("factor") if isinstance(scaling, dict) else None
    return int(positions * factor) if isinstance(factor, int | float) and factor > 1 else positions
