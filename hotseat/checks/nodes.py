"""Checks of the nodes of a cluster: that each has the files, folders and versions that the driver's has."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotseat.checks.named_files import models_of
from hotseat.checks.stage import CheckContext
from hotseat.cluster.node_facts import ABSENT, NodeFacts
from hotseat.cluster.runtime import ClusterNode
from hotseat.config import Config
from hotseat.config.presence import has_simulator, reward_files
from hotseat.errors import Problem
from hotseat.placement.plan_types import Plan
from hotseat.registry.backends import backend_entry
from hotseat.registry.engines import engine_entry
from hotseat.registry.roles import role_entry

MOST_CLOCK_SKEW_S = 2.0
_ALWAYS = ("hotseat", "torch", "transformers")
_ROLE_OF_MODEL = {"reward.judge.model": "judge", "reference.teachers": "reference"}


@dataclass(frozen=True, kw_only=True)
class NodesContext(CheckContext):
    """A config with its plan on a cluster.

    home: the driver's node. ask: returns what these nodes have, for these paths.
    """

    plan: Plan
    nodes: Sequence[ClusterNode]
    home: int
    ask: Callable[[Sequence[int], Sequence[str]], Mapping[int, NodeFacts]]


def memory_snapshots(context: NodesContext) -> Iterator[Problem]:
    """Find ranks that train on other nodes than the driver's, so that no node would have a whole memory snapshot."""
    trained = [role for role in context.plan.roles if role.name in ("actor", "critic")]
    others = {process.node for role in trained for process in role.processes} - {context.home}
    if context.config.checkpoint.memory_every is not None and others:
        named = ", ".join(map(str, sorted(others)))
        yield Problem(
            "checkpoint.memory_every",
            f"actor or critic have ranks on node{'s' * (len(others) > 1)} {named}, and the driver is on node"
            f" {context.home}: memory snapshots are of runs that train on the driver's node alone;"
            " leave it unset",
        )


def alike(context: NodesContext) -> Iterator[Problem]:
    """Find nodes that lack a file of the run, have another one, or have other versions of what computes."""
    config, plan = context.config, context.plan
    roles = roles_by_node(plan)
    if set(roles) <= {context.home}:
        return
    named = {key: path for key, path in paths_of(config) if _is_there(path)}
    asked_s = time.time()
    facts = context.ask(sorted({*roles, context.home}), sorted({*named.values()}))
    answered_s = time.time()
    own = facts[context.home]
    for node in sorted(set(roles) - {context.home}):
        name = f"node {node} ({context.nodes[node].hostname}, {context.nodes[node].address})"
        theirs = facts[node]
        needed = {key: path for key, path in named.items() if _role_of(key, config) & roles[node]}
        yield from _files(name, needed, own, theirs)
        yield from _versions(name, config, roles[node], own, theirs)
        early, late = asked_s - theirs.clock_s, theirs.clock_s - answered_s
        if max(early, late) > MOST_CLOCK_SKEW_S:
            apart = f"{early:.0f} s behind" if early > late else f"{late:.0f} s ahead of"
            context.notes.append(
                f"the clock of {name} is {apart} the driver's: times in logs and in the timeline are, too"
            )


def roles_by_node(plan: Plan) -> dict[int, set[str]]:
    """Return the roles on each node that has any."""
    roles: dict[int, set[str]] = {}
    for role in plan.roles:
        for process in role.processes:
            roles.setdefault(process.node, set()).add(role.name)
    return roles


def paths_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of the models and of the user's code that worker processes load."""
    yield from models_of(config)
    if config.has_rollouts:
        files = [
            *reward_files(config),
            ("eval.reward", config.eval.reward),
            ("agent.path", config.agent.path),
            ("algorithm.policy_loss", config.algorithm.policy_loss),
            *([("env.path", config.env.path)] if has_simulator(config) else []),
        ]
        for key, path in files:
            if path and (match := re.fullmatch(r"(.+\.py)(?::\w+)?", path)):
                yield key, match[1]


def _is_there(path: str) -> bool:
    return Path(path).expanduser().exists()


def _role_of(key: str, config: Config) -> set[str]:
    """Return the roles whose processes load what a key names."""
    section = next((role for start, role in _ROLE_OF_MODEL.items() if key.startswith(start)), key.partition(".")[0])
    if key == "actor.model":
        return {"actor", "rollout", "inference"}
    if key == "algorithm.policy_loss":
        return {"actor"}
    if key.endswith(".model") or section == "reference":
        return {section}
    return {"env"} if has_simulator(config) else {"rollout"}  # where the hosts are, which run the user's code


def _files(name: str, needed: Mapping[str, str], own: NodeFacts, theirs: NodeFacts) -> Iterator[Problem]:
    for key, path in needed.items():
        if theirs.paths[path] is None:
            from_folder = Path(path).is_absolute() or theirs.has_folder
            start = "" if from_folder else f", nor the folder {Path.cwd()}, from which relative paths start"
            yield Problem(key, f"{name} has no {path}{start}: share the folder, or copy it there under the same path")
        elif theirs.paths[path] != own.paths[path]:
            yield Problem(key, f"{name} has another {path} than the driver's node: copy the driver's there")


def _versions(name: str, config: Config, roles: Iterable[str], own: NodeFacts, theirs: NodeFacts) -> Iterator[Problem]:
    trains = any(role_entry(role).kind == "model" for role in roles)
    engines = {"rollout": config.rollout.engine, "judge": config.reward.judge.engine.kind}
    engines |= {} if config.reference.engine is None else {"reference": config.reference.engine}
    packages = [engine_entry(engine).package for role, engine in engines.items() if role in roles]
    packages += [backend_entry(config.train.backend).package] if trains else []
    for package in dict.fromkeys([*_ALWAYS, *filter(None, packages)]):
        here, there = own.versions.get(package, ABSENT), theirs.versions.get(package, ABSENT)
        if here.partition("+")[0] != there.partition("+")[0]:  # builds for other devices end in their names
            has = "other code of hotseat than" if package == "hotseat" else f"{package} {there}, and {here} is on"
            yield Problem("", f"{name} has {has} the driver's node: install the same on both")
