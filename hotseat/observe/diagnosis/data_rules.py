"""Rules about rewards, answers and prompts: each returns the signs of one cause, or None."""

from __future__ import annotations

import statistics

from hotseat.observe.diagnosis.run_ending import FALL, MOST, SOLVED, Ending, has_learned, reward_range
from hotseat.observe.diagnosis.signs import (
    Evidence,
    OptionAdvice,
    OptionChange,
    Signs,
    evidence_at,
    lasting,
    scored_apart,
)
from hotseat.observe.recorded import MetricCurve, Recorded


def failed_rewards(recorded: Recorded, ending: Ending) -> Signs | None:
    shares = recorded.failed_shares
    began = min((step for step, share in shares.items() if share >= 0.1), default=None)
    if began is None:
        return None
    last = shares[max(shares)]
    evidence = Evidence("share of samples that failed", began, shares[began], "a tenth of a step", 0.0, last)
    change = OptionAdvice("reward.function", recorded.config.reward.function, "what its errors say")
    return Signs(began, shares[began] / 0.1, (evidence,), (change,), f"such as {recorded.reasons['failed']}")


def constant_reward(recorded: Recorded, ending: Ending) -> Signs | None:
    spread = recorded.curve("reward_std")
    if len(spread.raw) < 3 or any(value > 1e-9 for value in spread.raw):
        return None
    evidence = (
        evidence_at(recorded, "reward_std", spread.steps[0], "0 in every step"),
        evidence_at(recorded, "reward", spread.steps[0], "one value for every answer of a step"),
    )
    change = OptionAdvice("reward.function", recorded.config.reward.function, "one that tells answers apart")
    return Signs(spread.steps[0], 10.0, evidence, (change,), _same_reward(recorded) or "")


def _same_reward(recorded: Recorded) -> str | None:
    """Say which reward every answer got, where it is the same for all of the run."""
    low, high = reward_range(recorded)
    return None if high - low > 1e-9 else f"every answer of the run got the same reward, {high:.3g}"


def groups_alike(recorded: Recorded, ending: Ending) -> Signs | None:
    has_hacked = ending.metric != "reward" and has_learned(recorded)
    if not ending.is_poor or has_hacked or recorded.config.rollout.samples_per_prompt == 1:
        return None
    onset = lasting(recorded, "groups_alike", lambda share: share >= MOST, f"{MOST:.0%} of groups or more, to the end")
    if onset is None:
        return None
    began, evidence = onset
    rollout = recorded.config.rollout
    low, high = reward_range(recorded)
    cure = [OptionChange("rollout.samples_per_prompt", rollout.samples_per_prompt, 2 * rollout.samples_per_prompt)]
    detail = "prompts are too hard or too easy"
    is_cold = rollout.temperature < MOST
    if is_cold:
        cure.insert(0, OptionChange("rollout.temperature", rollout.temperature, 1.0))
        detail = f"the temperature is {rollout.temperature:g}, so that answers to one prompt are the same"
    elif same := _same_reward(recorded):
        detail = same
    elif recorded.curve("reward").last >= low + SOLVED * (high - low):
        detail = "nearly every answer has the highest reward"
        cure.append(OptionAdvice("data.path", recorded.config.data.path, "harder prompts"))
    elif recorded.curve("reward").last <= low + 0.1 * (high - low):
        detail = "nearly every answer is wrong"
        cure.append(OptionAdvice("data.path", recorded.config.data.path, "easier prompts"))
        cure.append(
            OptionAdvice("reward.function", recorded.config.reward.function, "one with steps between its values")
        )
    is_setting = is_cold and began == recorded.curve("groups_alike").steps[0]
    return Signs(began, evidence.value / MOST, (evidence,), tuple(cure), detail, is_setting)


def truncation(recorded: Recorded, ending: Ending) -> Signs | None:
    if not ending.is_harm:
        return None
    onset = lasting(recorded, "truncated", lambda share: share >= 0.5, "half of the answers or more, to the end")
    if onset is None:
        return None
    began, evidence = onset
    now = recorded.config.rollout.max_new_tokens or round(recorded.curve("length").last)
    change = OptionChange("rollout.max_new_tokens", now, 4 * now)
    return Signs(began, evidence.value / 0.5, (evidence,), (change,))


def _fallen(recorded: Recorded, ending: Ending) -> Evidence:
    value = recorded.curve(ending.metric).at(ending.began)
    return evidence_at(recorded, ending.metric, ending.began, ending.depth(value))


def length_reward(recorded: Recorded, ending: Ending) -> Signs | None:
    length, reward = recorded.curve("length"), recorded.curve("reward")
    if not length or not has_learned(recorded):
        return None
    limit = 1.5 * length.values[0]
    began = length.lasts_from(lambda value: value >= limit)
    if began is None:
        return None
    share = (reward.last - reward.at(began)) / (reward.last - reward.first)
    # Answers of a healthy run may grow, too; but those that are cut off are rarely right.
    has_fallen = ending.kind == "fell" and ending.metric != "reward"
    tracks = statistics.correlation(length.values, [reward.at(step) for step in length.steps]) >= 0.8
    is_full = recorded.curve("truncated").last >= 0.5 and tracks and not scored_apart(recorded)
    if share < 0.5 or not (has_fallen or is_full):
        return None
    evidence = [
        evidence_at(recorded, "length", began, "1.5 times the first value, to the end"),
        evidence_at(recorded, "reward", began, "half of its rise or more follows"),
    ]
    if has_fallen:
        evidence.append(_fallen(recorded, ending))
    else:
        evidence.append(evidence_at(recorded, "truncated", length.steps[-1], "half of the answers"))
    now = recorded.config.rollout.max_new_tokens or round(length.last)
    cure = (
        OptionAdvice("reward.function", recorded.config.reward.function, "one without length in it"),
        OptionChange("reward.overlong.buffer_length", recorded.config.reward.overlong.buffer_length, max(1, now // 2)),
    )
    detail = f"{share:.0%} of the reward's rise came while answers grew"
    return Signs(began, length.last / limit, tuple(evidence), cure, detail)


def reward_hack(recorded: Recorded, ending: Ending) -> Signs | None:
    if ending.kind != "fell" or ending.metric == "reward" or not has_learned(recorded):
        return None
    if not scored_apart(recorded) and ending.metric == "eval/reward":
        return None  # the same reward on other prompts: they do not generalise
    evidence = (
        evidence_at(recorded, "reward", recorded.curve("reward").steps[-1], "rises"),
        _fallen(recorded, ending),
    )
    cure = (
        OptionAdvice("reward.function", recorded.config.reward.function, "the score of the evaluation"),
        OptionChange(
            "algorithm.kl.coef", recorded.config.algorithm.kl.coef, max(0.01, 10 * recorded.config.algorithm.kl.coef)
        ),
    )
    return Signs(ending.began, (ending.before - ending.after) / (FALL * abs(ending.before)), evidence, cure)


def repeated_data(recorded: Recorded, ending: Ending) -> Signs | None:
    """Compare trained prompts with held-out ones, which the same reward scores."""
    reward, held_out = recorded.curve("reward"), recorded.curve("eval/reward")
    if len(recorded.passes) < 3 or len(held_out.raw) < 3 or scored_apart(recorded) or not has_learned(recorded):
        return None
    low, high = reward_range(recorded)
    gaps = MetricCurve(held_out.steps[1:], tuple(reward.at(step) - value for step, value in held_out.pairs[1:]))
    began = gaps.lasts_from(lambda gap: gap > 0.5 * (high - low))
    if began is None:
        return None
    num_before = sum(step <= began for step in recorded.passes.values())
    evidence = (
        Evidence("reward - eval/reward", began, gaps.at(began), "half of the range", gaps.raw[0], gaps.last),
        Evidence("passes over the prompts", began, num_before, "3 in all", 1, len(recorded.passes)),
    )
    change = OptionChange("train.num_episodes", recorded.config.train.num_episodes, max(1, num_before))
    detail = f"{recorded.num_prompts} different prompts were trained; more of them would help most"
    return Signs(began, gaps.last / (0.5 * (high - low)), evidence, (change,), detail)


def dropped_data(recorded: Recorded, ending: Ending) -> Signs | None:
    num_dropped, num_all = recorded.num_samples.get("dropped", 0), sum(recorded.num_samples.values())
    dropped = recorded.curve("groups_dropped")
    began = next((step for step, value in dropped.pairs if value > 0), None)
    if began is None or num_dropped < MOST * num_all or not (ending.is_harm or recorded.error):
        return None
    share = num_dropped / num_all
    evidence = Evidence("samples dropped in the ledger", began, share, f"above a share of {MOST}", 0.0, share)
    filtering = recorded.config.algorithm.filtering
    change = OptionChange("algorithm.filtering.enabled", filtering.enabled, False)
    return Signs(began, share / MOST, (evidence,), (change,), f"such as {recorded.reasons['dropped']}")
