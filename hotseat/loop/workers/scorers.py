"""Scorers of a rollout host, as its settings name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hotseat.loop.workers.notes import note_writer
from hotseat.rewards import Grader, Graders, RewardFunction, Scorer
from hotseat.rewards.rubrics import JudgeSettings

if TYPE_CHECKING:
    from hotseat.loop.workers.rollout_host import HostSettings


def make_scorer(settings: HostSettings) -> Scorer | None:
    """Return what scores the samples to learn from, and evaluations without a reward of their own."""
    scorer, judge = _function_or_servers(settings), settings.judge
    if not settings.graders and (judge is None or (judge.engine is not None and scorer is None)):
        return scorer
    return Graders(
        settings.graders,
        sandbox=settings.sandbox,
        function=scorer,
        judge=None if judge is None or judge.engine is not None else _judge(judge),
        max_memory_bytes=settings.reward_max_bytes,
    )


def make_eval_scorer(settings: HostSettings) -> Scorer | None:
    """Return what scores evaluations instead of any other reward; None: evaluations have none of their own."""
    function = None if settings.eval_reward is None else _reward_function(settings.eval_reward, settings)
    if not settings.eval_graders:
        return function
    return Graders(
        settings.eval_graders,
        sandbox=settings.sandbox,
        function=function,
        max_memory_bytes=settings.reward_max_bytes,
    )


def _judge(settings: JudgeSettings) -> tuple[Grader, Scorer]:
    from hotseat.rewards.judge import Endpoints, Judge

    return Grader("judge", settings.name, settings.weight), Judge(settings, Endpoints(settings))


def _function_or_servers(settings: HostSettings) -> Scorer | None:
    if settings.reward_urls:
        from hotseat.rewards.service import RewardService

        return RewardService(
            settings.reward_urls,
            timeout_s=settings.reward_timeout_s,
            retries=settings.reward_retries,
            max_open=settings.reward_max_open,
            token=settings.reward_token,
        )
    return None if settings.reward is None else _reward_function(settings.reward, settings)


def _reward_function(path: str, settings: HostSettings) -> RewardFunction:
    return RewardFunction(
        path,
        timeout_s=settings.reward_timeout_s,
        retries=settings.reward_retries,
        max_memory_bytes=settings.reward_max_bytes,
        seed=settings.run_seed,
        say=None if settings.notes is None else note_writer(settings.notes),
    )
