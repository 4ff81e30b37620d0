"""Scorers of a rollout host, as its settings name them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hotseat.loop.workers.notes import note_writer
from hotseat.rewards import Grader, Graders, RewardFunction, SandboxSettings, Scorer
from hotseat.rewards.rubrics import JudgeSettings


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of the scorers of a rollout host. The default scores nothing."""

    function: str | None = None
    function_kwargs: Mapping[str, Any] = field(default_factory=dict)  # further arguments of it
    functions: tuple[tuple[str, str, float], ...] = ()  # several, each with its name, path and weight
    eval_function: str | None = None  # scores evaluations, instead of any other reward
    urls: tuple[str, ...] = ()  # servers that score instead of `function`
    token: str | None = field(default=None, repr=False)  # for them
    max_open: int = 64  # requests to them at a time
    timeout_s: float = 60.0  # of an attempt to score a group
    retries: int = 2
    max_bytes: int | None = None  # memory of a function's processes
    seed: int = 0
    graders: tuple[Grader, ...] = ()  # their verdicts are added to the rewards of `function`
    eval_graders: tuple[Grader, ...] = ()  # as `graders`, for `eval_function`
    judge: JudgeSettings | None = None  # a model whose verdicts are added, too
    sandbox: SandboxSettings | None = None  # None: its defaults
    notes: str | None = None  # file for notes that the driver shows; None: they go to standard error


def make_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores the samples to learn from, and evaluations without a reward of their own."""
    scorer = _function_or_servers(settings)
    beside: list[tuple[Grader, Scorer]] = [
        (Grader("function", name, weight), _reward_function(path, settings))
        for name, path, weight in settings.functions
    ]
    if settings.judge is not None and settings.judge.engine is None:
        beside.append(_judge(settings.judge))
    has_verdicts = settings.graders or beside or (settings.judge is not None and scorer is not None)
    if not has_verdicts:
        return scorer
    return Graders(
        settings.graders,
        sandbox=settings.sandbox,
        function=scorer,
        beside=beside,
        max_memory_bytes=settings.max_bytes,
    )


def make_eval_scorer(settings: ScorerSettings) -> Scorer | None:
    """Return what scores evaluations instead of any other reward; None: evaluations have none of their own."""
    function = None if settings.eval_function is None else _reward_function(settings.eval_function, settings)
    if not settings.eval_graders:
        return function
    return Graders(
        settings.eval_graders, sandbox=settings.sandbox, function=function, max_memory_bytes=settings.max_bytes
    )


def _judge(settings: JudgeSettings) -> tuple[Grader, Scorer]:
    from hotseat.rewards.judge import Endpoints, Judge

    return Grader("judge", settings.name, settings.weight), Judge(settings, Endpoints(settings))


def _function_or_servers(settings: ScorerSettings) -> Scorer | None:
    if settings.urls:
        from hotseat.rewards.posting import RewardService

        return RewardService(
            settings.urls,
            timeout_s=settings.timeout_s,
            retries=settings.retries,
            max_open=settings.max_open,
            token=settings.token,
        )
    function, kwargs = settings.function, settings.function_kwargs
    return None if function is None else _reward_function(function, settings, kwargs)


def _reward_function(path: str, settings: ScorerSettings, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    return RewardFunction(
        path,
        timeout_s=settings.timeout_s,
        retries=settings.retries,
        max_memory_bytes=settings.max_bytes,
        seed=settings.seed,
        kwargs=kwargs,
        say=None if settings.notes is None else note_writer(settings.notes),
    )
