"""Conflicts of `cluster`, `flow`, `overlap` and `components`: what runs where and when."""

from __future__ import annotations

import re

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_evaluation, placed_roles
from hotseat.config.resolved import overlap_queue
from hotseat.config.schema import Config
from hotseat.registry.roles import ROLES


@conflict()
def names_of_roles(config: Config) -> Problems:
    key, placed = "cluster.component_names", placed_roles(config)
    for name, role in config.cluster.component_names.items():
        if name in ROLES:
            yield key, f"{name} is a role already: choose another name for {role}"
            continue
        if name in placed:  # the loader replaces names, unless that would name a role twice
            yield key, f"{name} is {role}, which cluster.component_placement places twice: keep one of the two entries"
        for phase in config.flow or ():
            if isinstance(phase.run, dict) and name in phase.run:
                twice = f"{name} is {role}, which it names twice: keep one of the two entries"
                yield "flow", f"phase {phase.name!r}: {twice}"


@conflict(RL)
def names_of_components(config: Config) -> Problems:
    for name in config.components:
        key = f"components.{name}"
        if name in (*ROLES, "agents"):
            yield key, f"{name} is the name of processes that every run may have: choose another"
        elif name in config.cluster.component_names:
            role = config.cluster.component_names[name]
            yield key, f"cluster.component_names has {name} for {role}: choose another name for one of them"
        elif not re.fullmatch(r"[A-Za-z_][\w-]*", name):
            yield key, f"{name!r}: begin with a letter, and use letters, digits, '_' and '-'"


@conflict(RL)
def components_without_evaluation(config: Config) -> Problems:
    for name, component in config.components.items():
        if component.evaluates and not has_evaluation(config):
            yield (
                f"components.{name}.evaluates",
                "true, but nothing is evaluated: remove it, or set eval.path (or env.eval_seeds)",
            )


@conflict(RL)
def components_that_run_ahead(config: Config) -> Problems:
    if config.components and config.overlap.staleness > 0:
        yield (
            "overlap.staleness",
            f"{config.overlap.staleness}, with custom components: they work between a rollout and the update on"
            " it; set it to 0",
        )


@conflict(RL)
def sampler_that_runs_ahead(config: Config) -> Problems:
    if config.data.sampler is not None and config.overlap.staleness > 0:
        yield (
            "data.sampler",
            f"overlap.staleness is {config.overlap.staleness}: the scores that a sampler gets would depend on which"
            " answers arrive first; set overlap.staleness to 0, or leave data.sampler unset",
        )


@conflict(RL)
def determinism_that_runs_ahead(config: Config) -> Problems:
    if config.train.full_determinism and config.overlap.staleness > 0:
        yield (
            "train.full_determinism",
            f"overlap.staleness is {config.overlap.staleness}: which weights sample which answer depends on time: set"
            " it to 0, or train.full_determinism to false",
        )


@conflict(RL)
def queue_of_stale_batches(config: Config) -> Problems:
    staleness, queue = config.overlap.staleness, overlap_queue(config)
    if 0 < staleness < queue:
        yield (
            "overlap.queue",
            f"{queue} batches ahead would be older than overlap.staleness {staleness} allows: set at most {staleness},"
            f" or staleness {queue}",
        )
