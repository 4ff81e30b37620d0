"""Makes the settings of graders and of their sandbox from the config."""

from __future__ import annotations

from collections.abc import Sequence

from hotseat.config import Config
from hotseat.config.schema import GraderConfig
from hotseat.rewards.graders import Grader
from hotseat.rewards.sandbox import SandboxSettings


def graders_of(graders: Sequence[GraderConfig]) -> tuple[Grader, ...]:
    """Return graders, of samples to learn from or of evaluations."""
    return tuple(Grader(**{**dict(grader), "name": grader.name or grader.kind}) for grader in graders)


def sandbox_of(config: Config) -> SandboxSettings:
    """Return the limits of generated code."""
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
