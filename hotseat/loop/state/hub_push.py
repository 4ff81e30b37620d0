"""Pushes the exported model of a run to a hub, with a card made from what the run recorded.

Only the files that the export wrote are pushed. The card, and JSON files of the model, are left without paths of this
machine; values of the config that may be secret are not in the card, since it lists known settings alone.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hotseat import __version__
from hotseat.checks.hub import is_hub_name, push_problem
from hotseat.checks.named_files import hub_data_sets
from hotseat.config import Config
from hotseat.config.presence import task_numbers
from hotseat.config.schema import conditions_of, tasks_of
from hotseat.errors import RunError, UserError
from hotseat.loop.state.run_dir import kept_config
from hotseat.loop.workers.exports import MARKER, run_of
from hotseat.observe import read_lines

CARD = "README.md"
_PATHS = ("_name_or_path", "name_or_path", "base_model_name_or_path")  # keys of JSON files that may hold a path
# What the card lists of a config, as far as it has an effect in the run.
_SETTINGS = (
    *("seed", "algorithm.estimator", "algorithm.policy_loss", "algorithm.clip_low", "algorithm.clip_high"),
    *(
        "algorithm.kl.coef",
        "algorithm.distill_coef",
        "algorithm.distill.coef",
        "algorithm.distill.divergence",
        "algorithm.dpo.loss",
        "algorithm.dpo.beta",
    ),
    *("algorithm.reward_modelling.loss", "rollout.engine", "rollout.batch_size", "rollout.samples_per_prompt"),
    *("rollout.temperature", "rollout.top_p", "rollout.top_k", "rollout.max_new_tokens", "overlap.staleness"),
    *("data.max_length", "train.backend", "train.batch_size", "train.num_episodes", "train.max_epochs"),
    *("train.dtype", "train.lora.rank", "train.lora.alpha", "actor.optimizer.kind"),
    *("actor.optimizer.learning_rate", "actor.optimizer.schedule", "actor.optimizer.warmup_ratio"),
)
_TRAINING = ("reward", "loss", "accuracy")  # metrics that the card has besides those of evaluations
_PACKAGES = ("torch", "transformers")


def push(run_dir: Path, folder: Path, repo: str, is_private: bool) -> str:
    """Push a run's exported model, and return its address. The token is HF_TOKEN's.

    folder: of the model. repo: it is made if there is none. Raises `UserError` for what would not be taken, and
    `RunError` if the hub did not take the files.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils import disable_progress_bars

    config = kept_config(run_dir)
    if config is None:
        raise UserError(f"{run_dir} holds no run: there is no config.yaml in it")
    if run_of(folder) != run_dir.name:
        raise UserError(f"{folder} does not hold the model of {run_dir.name}: the run exports it at its end")
    if problem := push_problem(repo, os.environ):
        raise UserError(f"{repo} cannot be pushed to: {problem}")
    disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=os.environ["HF_TOKEN"])
    names = sorted(json.loads((folder / MARKER).read_text())["files"])
    contents = {name: _content(folder / name) for name in names} | {CARD: card(config, run_dir).encode()}
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    try:
        made = api.create_repo(repo, private=is_private, exist_ok=True)
        api.create_commit(made.repo_id, operations, commit_message=f"Model of the run {run_dir.name}")
    except Exception as error:  # of the hub's library, its transports, or files: the caller says how to push again
        raise RunError(f"{type(error).__name__}: {_first_line(error)}") from error
    return str(made)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no reason was given")


def _content(file: Path) -> Path | bytes:
    """Return a file to push, or what to push instead: JSON without the paths of models on this machine."""
    if file.suffix != ".json":
        return file
    text = file.read_bytes()
    try:
        values = json.loads(text)
    except ValueError:
        return file
    shown = _without_paths(values)
    return file if shown == values else json.dumps(shown, indent=2, ensure_ascii=False).encode()


def _without_paths(values: Any) -> Any:
    """Return JSON in which the names of models are without folders."""
    if isinstance(values, list):
        return [_without_paths(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {
        name: _named(value) if name in _PATHS and isinstance(value, str) else _without_paths(value)
        for name, value in values.items()
    }


def _named(model: str) -> str:
    """Return a model's name on the hub, or the last part of its path."""
    return model if is_hub_name(model) else _without_folders(model)


def _without_folders(text: str) -> str:
    return re.split(r"[/\\]", text.rstrip("/\\"))[-1]


# --- the card ---------------------------------------------------------------------------------------------------------


def card(config: Config, run_dir: Path) -> str:
    """Return the model card of a run: base model, task, data, settings, final metrics and versions."""
    from huggingface_hub import ModelCardData

    base, data_sets = str(config.actor.model), list(_hub_names(config))
    algorithm = [_without_folders(str(config.algorithm.estimator))] if config.has_rollouts else []
    facts = ModelCardData(
        base_model=base if is_hub_name(base) else None,
        datasets=data_sets or None,
        library_name="transformers",
        pipeline_tag=None if config.task_entry.has_scalar_head else "text-generation",
        tags=["hotseat", config.task, *algorithm],
    )
    data = ", ".join(_data_names(config)) or "the tasks of a simulator or an environment"
    trained = f"`{_named(base)}`, trained with Hotseat"
    parts = [
        f"---\n{facts.to_yaml()}\n---",
        f"# {run_dir.name}",
        f"{trained} (task `{config.task}`) on {data}.",
        "## Settings\n\n" + _table("setting", "value", _settings(config)),
    ]
    if metrics := final_metrics(run_dir):
        parts.append("## Metrics\n\n" + _table("metric", "last value", metrics))
    return "\n\n".join([*parts, "## Versions\n\n" + _table("package", "version", _versions())]) + "\n"


def _table(first: str, second: str, rows: Mapping[str, Any]) -> str:
    return "\n".join(
        [f"| {first} | {second} |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())]
    )


def _settings(config: Config) -> dict[str, Any]:
    """Return settings by key, those that are set or have a default, and that have an effect in this run."""
    rows: dict[str, Any] = {}
    for key in _SETTINGS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name)
        is_idle = any(condition.problem(config, section) for section, condition in conditions_of(key))
        if value is None or is_idle or config.task not in tasks_of(key):
            continue
        rows[f"`{key}`"] = _without_folders(value) if isinstance(value, str) else value
    return rows


def final_metrics(run_dir: Path) -> dict[str, str]:
    """Return the last value of each metric of evaluations, and of reward and loss."""
    metrics: dict[str, str] = {}
    path = run_dir / "metrics.jsonl"
    for record in read_lines(path) if path.is_file() else []:
        for name, value in record.items():
            is_number = isinstance(value, int | float) and math.isfinite(value)
            if is_number and (name.startswith("eval/") or name in _TRAINING):
                metrics[name] = f"{value:.6g}"
    return dict(sorted(metrics.items()))


def _hub_names(config: Config) -> Iterator[str]:
    for key, name in hub_data_sets(config):
        if key == "data.path":
            yield name.partition("@")[0]


def _data_names(config: Config) -> Iterator[str]:
    """Yield names of the data: on the hub, or of files without their folders."""
    on_hub = set(_hub_names(config))
    for part in (config.data.path or "").split(",") if task_numbers(config.data.path) is None else ():
        name = part.strip()
        if name:
            yield f"`{name.partition('@')[0]}`" if name.partition("@")[0] in on_hub else f"`{_without_folders(name)}`"


def _versions() -> dict[str, str]:
    rows = {"hotseat": __version__}
    for package in _PACKAGES:
        try:
            rows[package] = version(package)
        except PackageNotFoundError:  # of a build that is not installed as a package
            continue
    return rows
