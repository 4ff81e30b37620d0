"""Rules about updates, the policy, engines and the critic: each returns the signs of one cause, or None."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from hotseat.observe.diagnosis.run_ending import MIN_STEPS, Ending, fall_of, has_learned
from hotseat.observe.diagnosis.signs import (
    Evidence,
    OptionChange,
    Signs,
    entropy_metric,
    evidence_at,
    lasting,
    shown,
    slower,
)
from hotseat.observe.recorded import MetricCurve, Recorded
from hotseat.registry.correction_kinds import OFF_POLICY_CORRECTION
from hotseat.registry.engines import DEFAULT_ENGINE


def not_finite(recorded: Recorded, ending: Ending) -> Signs | None:
    skipped = recorded.curve("skipped_updates")
    num_skipped = skipped.raw[-1] if skipped else 0.0
    broken = {name: step for name, step in recorded.not_finite.items() if name in ("loss", "grad_norm", "kl")}
    if num_skipped < max(3.0, 0.05 * len(skipped.raw)) and not broken:
        return None
    began = min([*broken.values(), *(step for step, value in skipped.pairs if value > 0)])
    evidence = tuple(Evidence(name, step, math.nan, "not finite") for name, step in broken.items())
    if skipped:
        evidence = (*evidence, evidence_at(recorded, "skipped_updates", began, f"{num_skipped:.0f} by the end"))
    changes = [slower(recorded, 10)]
    if recorded.config.train.dtype == "fp16":
        changes.insert(0, OptionChange("train.dtype", "fp16", "bf16"))
    return Signs(began, max(1.0, num_skipped / 3), evidence, tuple(changes))


def entropy_collapse(recorded: Recorded, ending: Ending) -> Signs | None:
    metric = entropy_metric(recorded)
    curve = recorded.curve(metric)
    if not ending.is_poor or len(curve.raw) < 4:
        return None
    limit = (0.3 if ending.kind == "stalled" else 0.1) * max(curve.values[:2])
    onset = lasting(
        recorded, metric, lambda value: value < limit, f"below {limit:.2g}, by the first values, to the end"
    )
    if onset is None:
        return None
    _, low = onset
    half = 0.5 * max(curve.values[:2])
    began = curve.lasts_from(lambda value: value < half) or low.step
    start = evidence_at(recorded, metric, began, f"below {half:.2g}, half of the first values, to the end")
    evidence = (start, low) if began < low.step else (low,)
    now = recorded.config.algorithm.entropy_coef
    cure = (
        OptionChange("algorithm.entropy_coef", now, 2 * now if now else 0.01),
        OptionChange("algorithm.clip_high", recorded.config.algorithm.clip_high, 0.28),
        slower(recorded, 3),
    )
    return Signs(began, limit / max(low.value, limit / 100), evidence, cure)


def entropy_bonus(recorded: Recorded, ending: Ending) -> Signs | None:
    coefficient = recorded.config.algorithm.entropy_coef
    curve = recorded.curve("entropy")
    if not ending.is_harm or not coefficient or not curve:
        return None
    onset = lasting(recorded, "entropy", lambda value: value > 2 * curve.raw[0], "twice the first value, to the end")
    if onset is None:
        return None
    began, evidence = onset
    change = OptionChange("algorithm.entropy_coef", coefficient, coefficient / 100)
    return Signs(began, evidence.value / (2 * curve.raw[0]), (evidence,), (change,))


def kl_penalty(recorded: Recorded, ending: Ending) -> Signs | None:
    """Compare what the penalty subtracts from an answer's reward with the differences that are to be learned."""
    coefficient, kl = recorded.curve("kl_coefficient"), recorded.curve("kl")
    if not ending.is_harm or not kl or not coefficient:
        return None
    # A group of one sample has no spread: the baseline of its reward is made from the whole step.
    has_groups = recorded.config.rollout.samples_per_prompt > 1 and recorded.curve("group_reward_std")
    spread_name = "group_reward_std" if has_groups else "reward_std"
    spread, length = recorded.curve(spread_name), recorded.curve("length")
    sizes = {
        step: abs(coefficient.at(step) * value * length.at(step)) / max(spread.at(step), 1e-9)
        for step, value in kl.pairs
        if spread and spread.at(step) > 0
    }
    ratio = MetricCurve(tuple(sizes), tuple(sizes.values()))
    over = [step for step, value in sizes.items() if value > 1]
    # A policy that is farther from the reference than its own entropy was not held back.
    entropy = recorded.curve(entropy_metric(recorded))
    is_far = entropy and statistics.median(kl.raw) > entropy.raw[0]
    if len(over) < max(3, 0.5 * len(sizes)) or is_far:
        return None
    began = over[0]
    name = f"KL penalty of an answer / {spread_name}"
    evidence = (
        Evidence(name, began, sizes[began], "above 1", ratio.raw[0], ratio.last),
        evidence_at(recorded, "kl", began, "the coefficient is " + shown(coefficient.at(began))),
    )
    largest = statistics.median(sizes[step] for step in over)
    now = recorded.config.algorithm.kl.coef
    change = OptionChange("algorithm.kl.coef", now, float(f"{now / (10 * largest):.1g}"))
    return Signs(began, largest, evidence, (change,))


def kl_growth(recorded: Recorded, ending: Ending) -> Signs | None:
    kl = recorded.curve("kl")
    if not ending.is_harm or len(kl.raw) < MIN_STEPS:
        return None
    # The first value is 0; what the policy has per token to differ in is its own entropy.
    entropy = recorded.curve(entropy_metric(recorded))
    grown, own = 10 * statistics.median(kl.values[1 : max(3, len(kl.raw) // 5)]), entropy.raw[0] if entropy else 0.1
    limit = max(grown, own)
    origin = "10 times its first values" if grown >= own else "the first entropy" if entropy else "a least value"
    onset = lasting(recorded, "kl", lambda value: value > limit, f"above {limit:.2g}, {origin}, to the end")
    if onset is None:
        return None
    began, evidence = onset
    now = recorded.config.algorithm.kl.coef
    change = OptionChange("algorithm.kl.coef", now, 10 * now)
    return Signs(began, evidence.value / limit, (evidence,), (change, slower(recorded, 3)))


# A metric whose median over three steps grows by this factor from one step to the next jumps; of length, also one that
# shrinks. The second number keeps small values from counting.
_JUMPS = {
    "length": (1.5, 0.0),
    "truncated": (4.0, 0.05),
    "entropy": (3.0, 0.01),
    "grad_norm": (5.0, 0.01),
    "policy_kl": (10.0, 0.01),
    "kl": (10.0, 0.1),
}


def _jumps(name: str, curve: MetricCurve) -> list[tuple[int, float, float]]:
    """Return the steps at which a metric jumps, with the factor and the median of the three steps from there."""
    factor, floor = _JUMPS[name]
    jumps = []
    for index in range(1, len(curve.raw)):
        before = statistics.median(curve.raw[max(0, index - 3) : index]) + floor
        after = statistics.median(curve.raw[index : index + 3]) + floor
        growth = after / before if before > 0 else 1.0
        if name == "length" and 0 < growth < 1:
            growth = 1 / growth
        if growth >= factor:
            jumps.append((curve.steps[index], growth, after - floor))
    return jumps


def learning_rate(recorded: Recorded, ending: Ending) -> Signs | None:
    reward = recorded.curve("reward")
    if not ending.is_harm or not reward or (ending.metric != "reward" and has_learned(recorded)):
        return None
    own = fall_of("reward", reward, recorded) or ending  # an evaluation says later that it fell
    near = max(3, len(reward.raw) // 10)
    latest = own.began + near if own.kind == "fell" else reward.steps[0] + 2 * near
    earliest = own.began - near if own.kind == "fell" else 0
    jumps = {
        name: (step, factor, value)
        for name in _JUMPS
        for step, factor, value in _jumps(name, recorded.curve(name))[::-1]
        if earliest <= step <= latest
    }
    if not jumps:
        return None
    began = min(step for step, *_ in jumps.values())
    evidence = [
        replace(evidence_at(recorded, name, step, f"a jump by a factor of {factor:.1f} within 3 steps"), value=value)
        for name, (step, factor, value) in jumps.items()
    ]
    # Where an evaluation alone fell, the reward did not rise.
    has_fallen = own.kind == "fell" and own.metric == "reward"
    words = own.depth(reward.at(own.began)) if has_fallen else "it never rises"
    evidence.insert(0, evidence_at(recorded, "reward", own.began or began, words))
    strength = max(factor / _JUMPS[name][0] for name, (_, factor, _) in jumps.items())
    return Signs(began, strength, tuple(evidence), (slower(recorded, 10),))


GAP = 0.5  # nats per token by which stale policies may differ: the ratio is 1.6


def staleness(recorded: Recorded, ending: Ending) -> Signs | None:
    lag, gap = recorded.curve("staleness_max"), recorded.curve("engine_gap")
    if not ending.is_harm or not lag or max(lag.raw) < 2 or not gap:
        return None
    began = next((step for step, value in gap.pairs if value > GAP and lag.at(step) >= 1), None)
    if began is None:
        return None
    evidence = [
        evidence_at(recorded, "engine_gap", began, f"{GAP} nats per token between sampling and learning"),
        evidence_at(recorded, "staleness_max", began, f"up to {max(lag.raw):.0f} updates"),
    ]
    newest = recorded.curve("engine_gap_lag_0")
    if newest:
        evidence.append(evidence_at(recorded, "engine_gap_lag_0", began, "without staleness, so the engine agrees"))
    config = recorded.config
    cure = [OptionChange("overlap.staleness", config.overlap.staleness, 1)]
    if config.algorithm.correction.kind == "none":
        cure.append(OptionChange("algorithm.correction.kind", "none", OFF_POLICY_CORRECTION))
    return Signs(began, max(gap.values) / GAP, tuple(evidence), (*cure, slower(recorded, 3)))


def engine_gap(recorded: Recorded, ending: Ending) -> Signs | None:
    breaches: list[tuple[int, Evidence]] = []
    for name in ("engine_gap_use", "canary_use"):
        curve = recorded.curve(name)
        over = [step for step, value in curve.pairs if value > 1]
        if len(over) >= max(2, 0.2 * len(curve.raw)):
            breaches.append((over[0], evidence_at(recorded, name, over[0], "1, its limit, in a fifth of the steps")))
    if not breaches:
        return None
    began, evidence = min(breaches, key=lambda each: each[0])
    config = recorded.config
    cure = [OptionChange("algorithm.correction.kind", config.algorithm.correction.kind, OFF_POLICY_CORRECTION)]
    if config.rollout.quantization is not None:
        cure.insert(0, OptionChange("rollout.quantization", config.rollout.quantization, "null"))
    elif config.rollout.engine != DEFAULT_ENGINE:
        cure.insert(0, OptionChange("rollout.engine", config.rollout.engine, DEFAULT_ENGINE))
    return Signs(began, evidence.value, (evidence,), tuple(cure))


def large_updates(recorded: Recorded, ending: Ending) -> Signs | None:
    train, rollout = recorded.config.train, recorded.config.rollout
    num_samples = rollout.batch_size * rollout.samples_per_prompt
    num_updates = train.max_epochs * math.ceil(num_samples / train.batch_size)
    clipped = recorded.curve("clipped")
    fall = fall_of("reward", recorded.curve("reward"), recorded)
    # Once the policy is broken, nothing is learned and nothing clipped.
    shares = clipped.within(0, clipped.steps[-1] if fall is None else fall.began) if clipped else []
    if not ending.is_harm or num_updates < 8 or not shares or statistics.median(shares) < 0.2:
        return None
    began = next(step for step, value in zip(clipped.steps, clipped.raw, strict=True) if value >= 0.2)
    cure = [slower(recorded, 3)]
    if train.max_epochs > 1:
        cure.insert(0, OptionChange("train.max_epochs", train.max_epochs, 1))
    if train.batch_size < num_samples:
        cure.insert(0, OptionChange("train.batch_size", train.batch_size, num_samples))
    evidence = replace(
        evidence_at(recorded, "clipped", began, "a fifth of the tokens, in most steps before the fall"),
        value=clipped.within(began, began)[0],
    )
    detail = f"{num_updates} optimizer steps for each rollout"
    return Signs(began, statistics.median(shares) / 0.2, (evidence,), tuple(cure), detail)


_FAR_ABOVE = 100.0  # times the actor's learning rate: a critic's is rarely above ten
_BLOWN_UP = 10.0  # times the first value loss


def critic(recorded: Recorded, ending: Ending) -> Signs | None:
    if not ending.is_harm:
        return None
    onset = lasting(recorded, "explained_variance", lambda value: value < 0, "below 0, to the end")
    if onset is None:
        return None
    began, evidence = onset
    critic, loss = recorded.config.critic, recorded.curve("value_loss")
    rate = critic.optimizer.learning_rate
    share = rate / recorded.config.actor.optimizer.learning_rate
    signs = Signs(began, 1.0 - evidence.value, (evidence,), ())
    has_blown_up = loss and max(loss.values) > _BLOWN_UP * loss.raw[0] > 0
    if not has_blown_up and share < _FAR_ABOVE:
        warmup = OptionChange("critic.warmup_steps", critic.warmup_steps, max(10, 2 * critic.warmup_steps))
        return replace(signs, cure=(warmup, OptionChange("critic.optimizer.learning_rate", rate, 3 * rate)))
    if has_blown_up:
        top = max(loss.raw)
        step, words = loss.steps[loss.raw.index(top)], f"its peak, above {_BLOWN_UP:g} times the first value"
        blown_up = replace(evidence_at(recorded, "value_loss", step, words), value=top)
        signs = replace(signs, evidence=(evidence, blown_up))
    lower = rate * min(0.1, 3 / share)  # three times the actor's, as a critic may have
    detail = f"the critic's learning rate is {share:,.0f} times the actor's" if share >= 1.5 else ""
    return replace(signs, cure=(OptionChange("critic.optimizer.learning_rate", rate, lower),), detail=detail)
