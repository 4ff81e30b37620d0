"""Required options that are not set."""

from __future__ import annotations

from hotseat.config.conflicts.conflict_list import Problems
from hotseat.config.presence import has_agent, has_judge, has_simulator, is_placed
from hotseat.config.schema import Config
from hotseat.registry.estimators import estimator_entry


def missing(config: Config) -> list[tuple[str, str]]:
    """Return (key, message) of required options that are not set."""
    problems = [*_models_and_data(config)]
    return problems if not config.has_rollouts else [*problems, *_of_rl(config)]


def _models_and_data(config: Config) -> Problems:
    if config.actor.model is None:
        yield "actor.model", "not set: give a checkpoint directory or a hub name"
    if config.has_rollouts and is_placed(config, "env") and not has_simulator(config):
        yield "env.path", "not set, but env is placed: name a simulator, babyai, gym, mujoco_warp or a Python file"
    if config.data.path is None and not has_simulator(config):
        yield "data.path", "not set: give a file, a saved data set or a hub name"


def _of_rl(config: Config) -> Problems:
    reward, samples = config.reward, config.rollout.samples_per_prompt
    has_other_source = reward.graders or has_judge(config) or has_agent(config)  # a simulator is one
    if not has_other_source and all(source is None for source in (reward.function, reward.url, reward.model)):
        yield (
            "reward.function",
            "no source of rewards: set reward.function, reward.url, reward.model or agent.path; a config may also have"
            " reward.graders, reward.judge.rubric or agent.command",
        )
    if has_judge(config) and reward.judge.model is None:
        what = "a checkpoint directory or a hub name" if reward.judge.url is None else "its name at the endpoint"
        yield "reward.judge.model", f"not set: give {what}"
    if config.algorithm.distill_coef > 0 and config.reference.model is None and not config.reference.teachers:
        yield "reference.model", "not set: it is the teacher from which algorithm.distill_coef has the policy learn"
    if estimator_entry(config.algorithm.estimator).needs_group and samples < 2:
        yield (
            "rollout.samples_per_prompt",
            f"{samples}: a group of one has no advantage under {config.algorithm.estimator}; set it to 2 or more,"
            " usually 8",
        )
