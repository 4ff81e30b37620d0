"""The trackers of a run, and the names under which they get its metrics."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hotseat import extensions
from hotseat.config import Config
from hotseat.observe.tracker_sink import KEY, MLFLOW, TRACKIO, WANDB, Tracker, TrackerSink, is_wandb_requested


def trackers(config: Config, run_dir: Path, say: Callable[..., object], is_resumed: bool) -> list[TrackerSink]:
    """Make the sinks of trackers that the config, or a key for W&B in the environment, asks for."""
    wandb, mlflow, trackio = config.log.wandb, config.log.mlflow, config.log.trackio
    places: dict[Tracker, dict[str, str | None]] = {}
    if is_wandb_requested(wandb.enabled, os.environ):
        if WANDB.is_installed():
            place = {"entity": wandb.org, "project": wandb.project, "group": wandb.group}
            places[WANDB] = place | {"name": wandb.run_name or run_dir.name}
        else:
            say(f"{KEY} is set, but {WANDB.hint}")
    if mlflow.enabled:
        places[MLFLOW] = {"uri": mlflow.uri, "project": mlflow.experiment, "name": mlflow.run_name or run_dir.name}
    if trackio.enabled:
        place = {"project": trackio.project, "space": trackio.space, "group": trackio.group}
        places[TRACKIO] = place | {"name": trackio.run_name or run_dir.name}
    settings = config.model_dump(mode="json")
    return [
        TrackerSink(tracker, run_dir, settings, say, is_resumed=is_resumed, where=place)
        for tracker, place in places.items()
    ]


def renaming(config: Config) -> Callable[[int, Mapping[str, Any]], Mapping[str, Any]]:
    """Return what adds OpenRLHF's names to the metrics that trackers get."""
    if not config.log.openrlhf_names:
        return lambda step, values: values
    algorithm = config.algorithm
    kl = algorithm.kl.coef if algorithm.kl.as_loss else 0.0
    # Those of other tasks are unset.
    terms = (kl, algorithm.entropy_coef, algorithm.distill_coef, algorithm.dpo.nll_coef, algorithm.aux_loss_coef)
    is_plain = not any(terms)
    with_names = extensions.load(extensions.METRIC_NAMES)
    return lambda step, values: with_names(config.task, step, values, is_plain_loss=is_plain)
