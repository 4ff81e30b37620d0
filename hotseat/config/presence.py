"""The roles of a run, derived from its config."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hotseat.registry.estimators import estimator_entry
from hotseat.registry.preference_losses import preference_loss_entry
from hotseat.registry.roles import role_entry

if TYPE_CHECKING:
    from hotseat.config.schema import Config
    from hotseat.config.schema.reward_options import RewardFunctionConfig


def needs_siblings(config: Config) -> bool:
    """Return whether a sample whose siblings all failed cannot be learned from.

    With a custom estimator it cannot either, unless prompts have one sample each.
    """
    if has_teacher_alone(config):
        return False
    entry = estimator_entry(config.algorithm.estimator)
    return entry.needs_group or (entry.compares_episodes and config.rollout.samples_per_prompt > 1)


def has_critic(config: Config) -> bool:
    return config.has_rollouts and estimator_entry(config.algorithm.estimator).needs_critic


def has_reference(config: Config) -> bool:
    if config.task_entry.compares_answers:
        return compares_with_reference(config) and not is_base_reference(config)
    return config.has_rollouts and (config.algorithm.kl.coef > 0 or has_teacher(config))


def has_teacher(config: Config) -> bool:
    """Return whether the policy learns from a teacher's log-probs of its tokens, or from its distributions."""
    return config.has_rollouts and (config.algorithm.distill_coef > 0 or config.algorithm.distill.coef > 0)


def has_rewards(config: Config) -> bool:
    """Return whether anything scores answers."""
    reward = config.reward
    alone = bool(reward.graders) or has_judge(config) or has_agent(config)  # a simulator is one
    return alone or bool(reward_files(config)) or reward.url is not None or reward.model is not None


def has_teacher_alone(config: Config) -> bool:
    """Return whether the policy learns from a teacher's distributions, and nothing scores answers."""
    is_scored = has_rewards(config) or is_placed(config, "reward")
    return config.has_rollouts and config.algorithm.distill.coef > 0 and not is_scored


def compares_with_reference(config: Config) -> bool:
    """Return whether the loss of preferences takes log-probs of a reference."""
    return config.task_entry.compares_answers and preference_loss_entry(config.algorithm.dpo.loss).has_reference


def is_base_reference(config: Config) -> bool:
    """Return whether the policy without its adapters is the reference of preferences."""
    return compares_with_reference(config) and config.train.lora.rank > 0 and config.reference.model is None


def has_agent(config: Config) -> bool:
    """Tell whether an agent makes the episodes: a file, a program, an environment of a library, or a simulator's."""
    if has_simulator(config):
        return True
    agent = config.agent
    return agent.path is not None or agent.command is not None or agent.environment.family is not None


def has_own_process(config: Config) -> bool:
    """Tell whether an environment or a function of the user's runs in processes of its own."""
    return config.agent.environment.family is not None or config.agent.python is not None


def task_numbers(path: str | None) -> tuple[int, int] | None:
    """Return the first and last number of an environment's tasks, by `environment:FIRST-LAST`; None for other data."""
    scheme, colon, numbers = (path or "").partition(":")
    if scheme != "environment" or not colon:
        return None
    first, dash, last = numbers.strip().partition("-")
    if not (first.isdecimal() and last.isdecimal() and dash) or int(first) > int(last):
        raise ValueError(f"{path!r}: write it as environment:0-511, from the first task to the last")
    return int(first), int(last)


def has_simulator(config: Config) -> bool:
    """Tell whether the policy acts in a simulator."""
    return config.has_rollouts and config.env.path is not None


def has_env(config: Config) -> bool:
    """Tell whether the run has the role env: a simulator is named, or the placement names the role."""
    return config.has_rollouts and (is_placed(config, "env") or has_simulator(config))


def has_images(config: Config) -> bool:
    """Tell whether the policy sees images: those of the data, or those of a simulator."""
    return config.data.image_key is not None or (has_simulator(config) and config.env.images)


def has_evaluation(config: Config) -> bool:
    """Tell whether the policy is evaluated, on prompts or on held-out seeds of simulators."""
    if config.eval.path is not None or (config.has_rollouts and config.eval.sets):
        return True
    return has_simulator(config) and config.env.eval_seeds > 0


def has_reward_model(config: Config) -> bool:
    """Return whether the run has a reward model: named, or placed while the config names no other source of rewards."""
    if not config.has_rollouts or config.reward.model is not None:
        return config.has_rollouts
    reward = config.reward
    has_other_source = (
        reward_files(config) or reward.graders or has_judge(config) or reward.url is not None or has_agent(config)
    )
    return is_placed(config, "reward") and not has_other_source


def reward_files(config: Config) -> list[tuple[str, str]]:
    """Return (key, path) of the functions that score training samples."""
    reward = config.reward
    one = [] if reward.function is None else [("reward.function", reward.function)]
    return one + [(f"reward.functions[{at}]", each.function) for at, each in enumerate(reward.functions)]


def name_of_function(function: RewardFunctionConfig) -> str:
    """Return the name of one of several reward functions: as configured, else the function's, else its file's."""
    path, _, name = function.function.rpartition(":")
    return function.name or (name if path else Path(function.function).stem)


def has_reward_file(config: Config) -> bool:
    """Return whether a Python file scores answers, at least those of evaluations."""
    return bool(reward_files(config)) or config.eval.reward is not None


def has_code_grader(config: Config) -> bool:
    return any(grader.kind == "code" for grader in (*config.reward.graders, *config.eval.graders))


def has_judge(config: Config) -> bool:
    return config.has_rollouts and config.reward.judge.rubric is not None


def has_judge_engine(config: Config) -> bool:
    """Return whether the model that judges runs on an engine of the run's own, instead of behind an endpoint."""
    return has_judge(config) and config.reward.judge.url is None


def has_accuracy(config: Config) -> bool:
    """Return whether evaluations measure accuracy: not if a reward model judges them, whose numbers have no maximum."""
    return not has_reward_model(config) or config.eval.reward is not None or bool(config.eval.graders)


def has_inference(config: Config) -> bool:
    """Return whether a copy of the policy computes old log-probs on its own devices: if the placement names it."""
    return config.has_rollouts and is_placed(config, "inference")


def placed_roles(config: Config) -> set[str]:
    return {name.strip() for names in config.cluster.component_placement for name in names.split(",")}


def is_placed(config: Config, role: str) -> bool:
    return role in placed_roles(config)


def is_on_actor(config: Config, role: str) -> bool:
    """Return whether the placement says explicitly that a role has the actor's devices."""
    for names, selection in config.cluster.component_placement.items():
        roles = names.replace(" ", "").split(",")
        if role in roles:
            return "actor" in roles or (isinstance(selection, str) and selection.replace(" ", "") == "@actor")
    return not is_placed(config, role)  # a role that is not placed gets the actor's devices


# When the run has a process of each role.
_PRESENT: dict[str, Callable[[Config], bool]] = {
    "actor": lambda config: True,
    "critic": has_critic,
    "reference": has_reference,
    "reward": has_reward_model,
    "judge": has_judge_engine,
    "rollout": lambda config: config.has_rollouts,
    "env": has_env,
    "inference": has_inference,
}


def roles_of(config: Config) -> tuple[str, ...]:
    """Return the roles, custom components included, in the order in which they work in a step.

    Outside of RL the actor is the first: a reference scores what it learns from.
    """
    present: list[str] = [name for name, is_present in _PRESENT.items() if is_present(config)]
    if not config.has_rollouts:
        return tuple(present)
    return tuple(sorted([*present, *config.components], key=lambda name: role_entry(name).turn))
