"""Conflicts of `algorithm` and of the teachers in `reference`."""

from __future__ import annotations

from hotseat.config.annotations import RL
from hotseat.config.conflicts.conflict_list import Problems, conflict
from hotseat.config.presence import has_simulator
from hotseat.config.resolved import STEPS, correction_kind, ratio_step, shortest_kl_horizon, uses_k1_loss
from hotseat.config.schema import AlgorithmConfig, Config
from hotseat.registry.corrections import CORRECTIONS, correction_entry
from hotseat.registry.estimators import ESTIMATORS, estimator_entry
from hotseat.registry.lookup import names_that
from hotseat.registry.policy_losses import DEFAULT_POLICY_LOSS, POLICY_LOSSES, policy_loss_entry


@conflict(RL)
def teachers_beside_a_model(config: Config) -> Problems:
    if config.reference.teachers and config.reference.model is not None:
        yield "reference.model", "reference.teachers is set too: list all teachers there"


@conflict(RL)
def teacher_weights_of_others(config: Config) -> Problems:
    teachers, weights = config.reference.teachers, config.reference.teacher_weights
    if weights and set(weights) != set(teachers):
        yield (
            "reference.teacher_weights",
            f"for {', '.join(sorted(weights))}, but reference.teachers are"
            f" {', '.join(sorted(teachers)) or 'not set'}: give each teacher a weight",
        )
    elif weights and abs(sum(weights.values()) - 1) > 1e-6:
        yield "reference.teacher_weights", f"add up to {sum(weights.values()):g} instead of 1"


@conflict(RL)
def filter_that_keeps_nothing(config: Config) -> Problems:
    low, high = config.algorithm.filtering.low, config.algorithm.filtering.high
    if low >= high:
        yield "algorithm.filtering.low", f"{low} is not below high, {high}"


@conflict(RL)
def correction_without_range(config: Config) -> Problems:
    low, high = config.algorithm.correction.low, config.algorithm.correction.high
    if low >= high:
        yield (
            "algorithm.correction.low",
            f"{low} is not below high, {high}: a ratio of probabilities is kept between them, usually 0.5 and 5",
        )


@conflict(RL)
def rejection_of_every_answer(config: Config) -> Problems:
    correction = config.algorithm.correction
    key, reject = "algorithm.correction.reject_high", correction.reject
    low, high = correction.reject_low, correction.reject_high
    if reject is None:
        return
    if high is None:
        usual = "2 keeps geometric means between 0.5 and 2" if reject == "k1" else "0.1 is loose, 0.01 strict"
        yield key, f"has to be set with reject {reject}: {usual}"
        return
    low = 1 / high if low is None else low
    if reject == "k1" and not low < 1 < high:
        yield (
            key,
            "answers on which engine and trainer agree up to rounding have ratios on both sides of 1, and the"
            f" bounds keep those from {low:g} to {high:g}: set reject_low below 1 and reject_high above 1, such as"
            " 0.5 and 2",
        )


@conflict(RL)
def correction_of_another_loss(config: Config) -> Problems:
    loss, entry = config.algorithm.policy_loss, correction_entry(correction_kind(config))
    has_episode_ratio = policy_loss_entry(loss).has_episode_ratio
    if has_episode_ratio and entry.weighs_tokens:
        yield (
            "algorithm.correction.kind",
            f"{entry.name} weighs tokens, and algorithm.policy_loss {loss} has one ratio per sequence: set"
            f" {' or '.join(names_that(CORRECTIONS, 'replaces_ratio'))}, which takes that ratio to the engine's"
            " probabilities,"
            f" {' or '.join(names_that(CORRECTIONS, 'is_per_episode'))}, or policy_loss {DEFAULT_POLICY_LOSS}",
        )
    elif not has_episode_ratio and entry.replaces_ratio:
        others = " and ".join(names_that(POLICY_LOSSES, "has_episode_ratio"))
        yield (
            "algorithm.correction.kind",
            f"{entry.name} is the correction of algorithm.policy_loss {others}, and it is {loss}: set"
            f" {' or '.join(names_that(CORRECTIONS, 'weighs_tokens'))}",
        )


@conflict(RL)
def turns_without_groups(config: Config) -> Problems:
    algorithm = config.algorithm
    if algorithm.turn_credit == "own" and not estimator_entry(algorithm.estimator).credits_own_turns:
        yield (
            "algorithm.turn_credit",
            f"own needs an estimator that compares groups and does not discount, and algorithm.estimator is"
            f" {algorithm.estimator}: set {', '.join(names_that(ESTIMATORS, 'credits_own_turns'))}, or turn_credit to"
            " to_go",
        )


@conflict(RL)
def k1_as_a_loss(config: Config) -> Problems:
    if uses_k1_loss(config) and not config.algorithm.kl.allow_k1_loss:
        yield (
            "algorithm.kl.estimator",
            "k1 as a loss regularises nothing: its gradient is zero on average, whatever the reference; set k2 or k3,"
            " or algorithm.kl.as_loss to false, or algorithm.kl.allow_k1_loss to true if that is wanted",
        )


@conflict(RL)
def horizon_of_one_step(config: Config) -> Problems:
    kl, shortest = config.algorithm.kl, shortest_kl_horizon(config)
    if kl.coef > 0 and kl.target is not None and kl.horizon <= shortest:
        samples = config.rollout.batch_size * config.rollout.samples_per_prompt
        yield (
            "algorithm.kl.horizon",
            f"{kl.horizon} is too short for steps of {samples} samples: one of them could turn the coefficient"
            f" negative; set it above {shortest:g}",
        )


def _steps(algorithm: AlgorithmConfig) -> dict[str, str | None]:
    return {"algorithm.time_step": algorithm.time_step, "algorithm.ratio_step": algorithm.ratio_step}


@conflict(RL)
def actions_without_simulator(config: Config) -> Problems:
    for key, step in _steps(config.algorithm).items():
        if step == "action" and not has_simulator(config):
            yield key, "action: only simulators have actions; set it to token or chunk"


@conflict(RL)
def steps_of_a_loss_with_other_ratios(config: Config) -> Problems:
    algorithm, ratio = config.algorithm, ratio_step(config)
    loss, others = policy_loss_entry(algorithm.policy_loss), " or ".join(names_that(POLICY_LOSSES, "has_steps"))
    if loss.has_episode_ratio:
        for key, step in _steps(algorithm).items():
            if step is not None and (step != "token" or key == "algorithm.ratio_step"):
                yield (
                    key,
                    f"{step}: algorithm.policy_loss {loss.name} has one ratio per sequence; set policy_loss to"
                    f" {others}, or remove it",
                )
    elif not loss.has_steps and ratio != "token":
        yield (
            "algorithm.time_step" if algorithm.ratio_step is None else "algorithm.ratio_step",
            f"{ratio}: algorithm.policy_loss {algorithm.policy_loss} has ratios of its own; set policy_loss to"
            f" {others}, or ratio_step to token",
        )


@conflict(RL)
def ratios_longer_than_steps(config: Config) -> Problems:
    ratio, step = ratio_step(config), config.algorithm.time_step
    if STEPS.index(ratio) > STEPS.index(step):
        yield (
            "algorithm.ratio_step",
            f"{ratio} is longer than algorithm.time_step {step}: a ratio is multiplied by one advantage, and each"
            f" {step} has its own; set time_step to {ratio}, or remove it",
        )
