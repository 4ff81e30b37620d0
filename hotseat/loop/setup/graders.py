"""Makes the settings of graders from the config, and checks them before a model loads. Needs neither torch nor Ray."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

from hotseat.config import Config
from hotseat.config.schema import GraderConfig
from hotseat.rewards.graders import Grader, grader_problem, package_problem
from hotseat.rewards.sandbox import Sandbox, SandboxSettings


def graders_of(config: Config) -> tuple[Grader, ...]:
    """Return the graders of samples to learn from."""
    return _made(config.reward.graders)


def eval_graders_of(config: Config) -> tuple[Grader, ...]:
    """Return the graders that score only evaluations, instead of any other reward."""
    return _made(config.eval.graders)


def _made(graders: Sequence[GraderConfig]) -> tuple[Grader, ...]:
    return tuple(
        Grader(
            grader.kind,
            grader.name or grader.kind,
            grader.weight,
            grader.timeout_s,
            grader.pattern,
            grader.json_schema,
            grader.partial,
        )
        for grader in graders
    )


def sandbox_of(config: Config) -> SandboxSettings:
    limits = config.reward.sandbox
    return SandboxSettings(
        command=None if limits.command is None else tuple(limits.command),
        python=limits.python,
        timeout_s=limits.timeout_s,
        max_cpu_s=limits.max_cpu_s,
        max_memory_bytes=limits.max_memory_mib * 2**20,
        max_processes=limits.max_processes,
        max_output_bytes=limits.max_output_kib * 2**10,
        max_concurrent=limits.max_concurrent,
    )


def grader_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (key, message) of graders that cannot work: a pattern, a schema, or a package that is missing here."""
    if config.task != "rl":
        return
    for key, graders in (("reward.graders", graders_of(config)), ("eval.graders", eval_graders_of(config))):
        for number, grader in enumerate(graders):
            problem = grader_problem(grader)
            if problem is None and not _grades_elsewhere(config):
                problem = package_problem(grader.kind)
            if problem is not None:
                yield f"{key}[{number}]", problem


def try_sandbox(config: Config, show: Callable[[str], object]) -> list[str]:
    """Run a small program in the sandbox if a grader uses it, and return notes on its limits for the user.

    Raises `UserError` if it does not work here.

    Rollout hosts, which may be on other machines, do the same when they start.
    """
    if config.task != "rl" or _grades_elsewhere(config):
        return []
    if any(grader.kind == "code" for grader in (*config.reward.graders, *config.eval.graders)):
        show("running a program in the sandbox, to see that it works")
        return [Sandbox(sandbox_of(config)).probe()]
    return []


def _grades_elsewhere(config: Config) -> bool:
    """Tell whether rollout hosts may be on machines that have other packages than this one."""
    return config.cluster.runtime == "ray" and bool(os.environ.get("RAY_ADDRESS"))
