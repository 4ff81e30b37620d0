"""Why a run collapsed: rules over its records, each with its evidence and a cure.

    RULES                a table, an entry for each cause: what it reads, when it fires, what helps
    diagnose(recorded)   how the run ended, and the causes that fire, the most likely first

Most rules need harm: healthy runs have stale samples, spikes and low entropy, too, and a solved task has groups that
are all alike. Values are compared with the same run's beginning, its noise and the range of its rewards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hotseat.observe.recorded import Curve, Recorded
from hotseat.registry.lookup import Table

GOALS = ("eval/accuracy", "eval/success", "eval/reward", "reward")  # what a run is for, the most telling first
MIN_STEPS = 8  # of a reward that is judged not to have risen
FALL = 0.25  # share of what was gained over the worst reward; a larger one is a fall
SOLVED = 0.9  # share of the range of rewards from which on a task counts as solved
NOISES = 4.0  # standard deviations of a single value that chance does not exceed
MOST = 0.7  # share of groups or samples


@dataclass(frozen=True)
class Ending:
    """How a run ended. metric: the goal by which that is judged. stalled: it rose, then found no more signal."""

    kind: Literal["fell", "did not rise", "stalled", "rose", "held", "unknown"]
    metric: str = "reward"
    began: int = 0  # the first step of the fall
    before: float = math.nan  # the highest value before the fall, else the first
    after: float = math.nan  # the last value, or the lowest of a fall that was made good

    @property
    def is_poor(self) -> bool:
        return self.is_harm or self.kind == "stalled"

    @property
    def is_harm(self) -> bool:
        return self.kind in ("fell", "did not rise")

    def __str__(self) -> str:
        if self.kind == "unknown":
            return "too few steps were recorded to say how it went"
        place = f", beginning at step {self.began}" if self.kind in ("fell", "stalled") else ""
        return f"{self.metric} {self.kind}: {self.before:.3g} to {self.after:.3g}{place}"


@dataclass(frozen=True)
class Evidence:
    """A metric that shows a cause: its value at a step, the threshold that it passed, and its trend."""

    metric: str
    step: int
    value: float
    threshold: str
    first: float = math.nan
    last: float = math.nan

    def __str__(self) -> str:
        if math.isnan(self.value):
            return f"{self.metric} is {self.threshold} at step {self.step}"
        return (
            f"{self.metric} is {self.value:.3g} at step {self.step} ({self.threshold}); it went from {self.first:.3g}"
            f" to {self.last:.3g}"
        )


@dataclass(frozen=True)
class Change:
    """An option to change. `to` is None where the right value cannot be computed."""

    option: str
    now: Any
    to: Any

    def __str__(self) -> str:
        return f"{self.option}: {_shown(self.now)} -> {_shown(self.to)}"


@dataclass(frozen=True)
class Signs:
    """What a rule found. strength: how far the threshold was passed, as a factor."""

    began: int
    strength: float
    evidence: tuple[Evidence, ...]
    cure: tuple[Change, ...]
    detail: str = ""


@dataclass(frozen=True)
class Rule:
    """A cause. explains: others that it brings about, so that they rank behind it if they begin no earlier."""

    name: str
    reads: str
    fires: str
    words: str
    cure: str
    find: Callable[[Recorded, Ending], Signs | None]
    explains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cause:
    rule: Rule
    signs: Signs
    follows: str | None = None  # name of the cause that brought it about


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


# --- how it ended -----------------------------------------------------------------------------------------------------


def ending_of(recorded: Recorded) -> Ending:
    """Tell how a run ended: by the first of its goals that fell, else by its reward."""
    for name in GOALS:
        fall = _fall(name, recorded.curve(name), recorded)
        if fall is not None:
            return fall
    curve = recorded.curve("reward")
    if len(curve.raw) < MIN_STEPS:
        return Ending("unknown")
    low, high = _range(recorded)
    held_out = recorded.curve("eval/accuracy")
    gained = max(curve.last - curve.first, (held_out.last - held_out.raw[0]) * (high - low) if held_out else 0.0)
    # What is left to gain at the start counts: little of it is nothing.
    has_risen = gained > max(0.1 * (high - curve.first), curve.noise) > 0.0
    is_solved = high > low and curve.last >= low + SOLVED * (high - low)
    if has_risen and (began := _stalls_from(recorded)) is not None:
        return Ending("stalled", "reward", began, curve.at(began), curve.last)
    kind: Literal["rose", "held", "did not rise"] = "rose" if has_risen else "held" if is_solved else "did not rise"
    return Ending(kind, "reward", curve.steps[0], curve.first, curve.last)


def _stalls_from(recorded: Recorded) -> int | None:
    """Return the step from which on, for a third of a run or more, most groups are alike without being right."""
    reward, (low, high) = recorded.curve("reward"), _range(recorded)
    began = recorded.curve("groups_alike").lasts_from(lambda share: share >= MOST)
    if (
        began is None
        or recorded.config.rollout.samples_per_prompt == 1
        or began > reward.steps[-len(reward.steps) // 3]
    ):
        return None
    is_poor = reward.last < low + 0.75 * (high - low)
    return (
        began
        if is_poor and not _rises(reward.since(reward.steps[len(reward.steps) // 2]), 0.1 * (high - low))
        else None
    )


def _fall(name: str, curve: Curve, recorded: Recorded) -> Ending | None:
    """Return the fall of a goal from its peak, to its end or for a fifth of the run; None where it is noise."""
    if len(curve.raw) < 2:
        return None
    low = _range(recorded)[0] if name.endswith("reward") else 0.0
    # The few values of evaluations are no measure of their noise: they have to fall further.
    is_short = len(curve.raw) < MIN_STEPS
    least = 0.0 if is_short else NOISES * curve.noise
    fall = Ending("held", name)
    lows = [(len(curve.raw), curve.last, 2 * FALL if is_short else FALL)]
    width = len(curve.raw) // 5
    if not is_short:  # a run that fell and came back
        lows += [
            (index, statistics.median(curve.raw[index : index + width]), 2 * FALL)
            for index in range(1, len(curve.raw) - width + 1)
        ]
    for index, after, share in lows:
        before = max(curve.values[:index])
        is_deeper = fall.kind == "held" or before - after > fall.before - fall.after
        if before > low and before - after >= max(share * (before - low), least) and is_deeper:
            top = max(step for step, value in curve.pairs[:index] if value == before)
            middle = (before + after) / 2
            began = next((step for step, value in curve.pairs if step > top and value <= middle), curve.steps[-1])
            fall = Ending("fell", name, began, before, after)
    return fall if fall.is_harm else None


def _range(recorded: Recorded) -> tuple[float, float]:
    """Return the lowest and the highest reward of any sample, else of any step."""
    if recorded.rewards is not None:
        return recorded.rewards
    values = recorded.curve("reward").raw or (0.0,)
    return min(values), max(values)


# --- what rules share -------------------------------------------------------------------------------------------------


def _evidence(recorded: Recorded, metric: str, step: int, threshold: str) -> Evidence:
    curve = recorded.curve(metric)
    return Evidence(metric, step, curve.at(step), threshold, curve.raw[0], curve.last)


def _lasting(
    recorded: Recorded, metric: str, holds: Callable[[float], bool], threshold: str
) -> tuple[int, Evidence] | None:
    """Return since when a condition on a metric lasts, with the evidence; None if it does not at the end."""
    began = recorded.curve(metric).lasts_from(holds)
    return None if began is None else (began, _evidence(recorded, metric, began, threshold))


def _rises(curve: Curve, least: float) -> bool:
    return bool(curve) and curve.last - curve.first > max(least, curve.noise)


def _has_learned(recorded: Recorded) -> bool:
    """Tell whether the run's own reward rose, whatever became of held-out goals."""
    low, high = _range(recorded)
    return _rises(recorded.curve("reward"), 0.1 * (high - low))


def _entropy(recorded: Recorded) -> str:
    """Return the metric that measures entropy: without it, recorded samples estimate it."""
    return "entropy" if recorded.curve("entropy") else "surprise"


def _slower(recorded: Recorded, factor: float) -> Change:
    rate = recorded.config.actor.optimizer.learning_rate
    return Change("actor.optimizer.learning_rate", rate, rate / factor)


# --- rules ------------------------------------------------------------------------------------------------------------


def _failed_rewards(recorded: Recorded, ending: Ending) -> Signs | None:
    shares = recorded.failed_shares
    began = min((step for step, share in shares.items() if share >= 0.1), default=None)
    if began is None:
        return None
    last = shares[max(shares)]
    evidence = Evidence("share of samples that failed", began, shares[began], "a tenth of a step", 0.0, last)
    change = Change("reward.function", recorded.config.reward.function, "what its errors say")
    return Signs(began, shares[began] / 0.1, (evidence,), (change,), f"such as {recorded.reasons['failed']}")


def _not_finite(recorded: Recorded, ending: Ending) -> Signs | None:
    skipped = recorded.curve("skipped_updates")
    num_skipped = skipped.raw[-1] if skipped else 0.0
    broken = {name: step for name, step in recorded.not_finite.items() if name in ("loss", "grad_norm", "kl")}
    if num_skipped < max(3.0, 0.05 * len(skipped.raw)) and not broken:
        return None
    began = min([*broken.values(), *(step for step, value in skipped.pairs if value > 0)])
    evidence = tuple(Evidence(name, step, math.nan, "not finite") for name, step in broken.items())
    if skipped:
        evidence = (*evidence, _evidence(recorded, "skipped_updates", began, "3 or more, and one in 20 steps"))
    changes = [_slower(recorded, 10)]
    if recorded.config.train.dtype == "fp16":
        changes.insert(0, Change("train.dtype", "fp16", "bf16"))
    return Signs(began, max(1.0, num_skipped / 3), evidence, tuple(changes))


def _constant_reward(recorded: Recorded, ending: Ending) -> Signs | None:
    spread = recorded.curve("reward_std")
    if len(spread.raw) < 3 or any(value > 1e-9 for value in spread.raw):
        return None
    evidence = (
        _evidence(recorded, "reward_std", spread.steps[0], "0 in every step"),
        _evidence(recorded, "reward", spread.steps[0], "one value for every answer"),
    )
    change = Change("reward.function", recorded.config.reward.function, "one that tells answers apart")
    return Signs(spread.steps[0], 10.0, evidence, (change,))


def _alike(recorded: Recorded, ending: Ending) -> Signs | None:
    has_hacked = ending.metric != "reward" and _has_learned(recorded)
    if not ending.is_poor or has_hacked or recorded.config.rollout.samples_per_prompt == 1:
        return None
    found = _lasting(recorded, "groups_alike", lambda share: share >= MOST, f"{MOST:.0%} of groups or more, to the end")
    if found is None:
        return None
    began, evidence = found
    rollout = recorded.config.rollout
    low, high = _range(recorded)
    cure = [Change("rollout.samples_per_prompt", rollout.samples_per_prompt, 2 * rollout.samples_per_prompt)]
    detail = "prompts are too hard or too easy"
    if rollout.temperature < MOST:
        cure.insert(0, Change("rollout.temperature", rollout.temperature, 1.0))
        detail = f"the temperature is {rollout.temperature:g}, so that answers to one prompt are the same"
    elif recorded.curve("reward").last <= low + 0.1 * (high - low):
        detail = "nearly every answer is wrong: easier prompts, or a reward with steps between its values"
    return Signs(began, evidence.value / MOST, (evidence,), tuple(cure), detail)


def _truncation(recorded: Recorded, ending: Ending) -> Signs | None:
    if not ending.is_harm:
        return None
    found = _lasting(recorded, "truncated", lambda share: share >= 0.5, "half of the answers or more, to the end")
    if found is None:
        return None
    began, evidence = found
    now = recorded.config.rollout.max_new_tokens or round(recorded.curve("length").last)
    change = Change("rollout.max_new_tokens", now, 4 * now)
    return Signs(began, evidence.value / 0.5, (evidence,), (change,))


def _scored_apart(recorded: Recorded) -> bool:
    return recorded.config.eval.reward is not None or bool(recorded.config.eval.graders)


def _length_reward(recorded: Recorded, ending: Ending) -> Signs | None:
    length, reward = recorded.curve("length"), recorded.curve("reward")
    if not length or not _has_learned(recorded):
        return None
    limit = 1.5 * length.values[0]
    began = length.lasts_from(lambda value: value >= limit)
    if began is None:
        return None
    share = (reward.last - reward.at(began)) / (reward.last - reward.first)
    # Answers of a healthy run may grow, too; but those that are cut off are rarely right.
    has_fallen = ending.kind == "fell" and ending.metric != "reward"
    tracks = statistics.correlation(length.values, [reward.at(step) for step in length.steps]) >= 0.8
    is_full = recorded.curve("truncated").last >= 0.5 and tracks and not _scored_apart(recorded)
    if share < 0.5 or not (has_fallen or is_full):
        return None
    evidence = [
        _evidence(recorded, "length", began, "1.5 times the first value, to the end"),
        _evidence(recorded, "reward", began, "half of its rise or more follows"),
    ]
    if has_fallen:
        evidence.append(_evidence(recorded, ending.metric, ending.began, f"{FALL:.0%} below its peak"))
    else:
        evidence.append(_evidence(recorded, "truncated", length.steps[-1], "half of the answers"))
    now = recorded.config.rollout.max_new_tokens or round(length.last)
    cure = (
        Change("reward.function", recorded.config.reward.function, "one without length in it"),
        Change("reward.overlong.buffer_length", recorded.config.reward.overlong.buffer_length, max(1, now // 2)),
    )
    detail = f"{share:.0%} of the reward's rise came while answers grew"
    return Signs(began, length.last / limit, tuple(evidence), cure, detail)


def _reward_hack(recorded: Recorded, ending: Ending) -> Signs | None:
    if ending.kind != "fell" or ending.metric == "reward" or not _has_learned(recorded):
        return None
    if not _scored_apart(recorded) and ending.metric == "eval/reward":
        return None  # the same reward on other prompts: they do not generalise
    evidence = (
        _evidence(recorded, "reward", recorded.curve("reward").steps[-1], "rises"),
        _evidence(recorded, ending.metric, ending.began, f"{FALL:.0%} below its peak"),
    )
    cure = (
        Change("reward.function", recorded.config.reward.function, "the score of the evaluation"),
        Change(
            "algorithm.kl.coef", recorded.config.algorithm.kl.coef, max(0.01, 10 * recorded.config.algorithm.kl.coef)
        ),
    )
    return Signs(ending.began, (ending.before - ending.after) / (FALL * abs(ending.before)), evidence, cure)


def _repeated_data(recorded: Recorded, ending: Ending) -> Signs | None:
    """Compare trained prompts with held-out ones, which the same reward scores."""
    reward, held_out = recorded.curve("reward"), recorded.curve("eval/reward")
    if len(recorded.passes) < 3 or len(held_out.raw) < 3 or _scored_apart(recorded) or not _has_learned(recorded):
        return None
    low, high = _range(recorded)
    gaps = Curve(held_out.steps[1:], tuple(reward.at(step) - value for step, value in held_out.pairs[1:]))
    began = gaps.lasts_from(lambda gap: gap > 0.5 * (high - low))
    if began is None:
        return None
    num_before = sum(step <= began for step in recorded.passes.values())
    evidence = (
        Evidence("reward - eval/reward", began, gaps.at(began), "half of the range", gaps.raw[0], gaps.last),
        Evidence("passes over the prompts", began, num_before, "3 in all", 1, len(recorded.passes)),
    )
    change = Change("train.num_episodes", recorded.config.train.num_episodes, max(1, num_before))
    detail = f"{recorded.num_prompts} different prompts were trained; more of them would help most"
    return Signs(began, gaps.last / (0.5 * (high - low)), evidence, (change,), detail)


def _entropy_collapse(recorded: Recorded, ending: Ending) -> Signs | None:
    metric = _entropy(recorded)
    curve = recorded.curve(metric)
    if not ending.is_poor or len(curve.raw) < 4:
        return None
    limit = (0.3 if ending.kind == "stalled" else 0.1) * max(curve.values[:2])
    found = _lasting(
        recorded, metric, lambda value: value < limit, f"below {limit:.2g}, by the first values, to the end"
    )
    if found is None:
        return None
    _, evidence = found
    began = curve.lasts_from(lambda value: value < 0.5 * max(curve.values[:2])) or evidence.step
    now = recorded.config.algorithm.entropy_coef
    cure = (
        Change("algorithm.entropy_coef", now, 2 * now if now else 0.01),
        Change("algorithm.clip_high", recorded.config.algorithm.clip_high, 0.28),
        _slower(recorded, 3),
    )
    return Signs(began, limit / max(evidence.value, limit / 100), (evidence,), cure)


def _entropy_bonus(recorded: Recorded, ending: Ending) -> Signs | None:
    coefficient = recorded.config.algorithm.entropy_coef
    curve = recorded.curve("entropy")
    if not ending.is_harm or not coefficient or not curve:
        return None
    found = _lasting(recorded, "entropy", lambda value: value > 2 * curve.raw[0], "twice the first value, to the end")
    if found is None:
        return None
    began, evidence = found
    change = Change("algorithm.entropy_coef", coefficient, coefficient / 100)
    return Signs(began, evidence.value / (2 * curve.raw[0]), (evidence,), (change,))


def _kl_penalty(recorded: Recorded, ending: Ending) -> Signs | None:
    """Compare what the penalty subtracts from an answer's reward with the differences that are to be learned."""
    coefficient, kl = recorded.curve("kl_coefficient"), recorded.curve("kl")
    if not ending.is_harm or not kl or not coefficient:
        return None
    spread, length = recorded.curve("group_reward_std"), recorded.curve("length")
    sizes = {
        step: abs(coefficient.at(step) * value * length.at(step)) / max(spread.at(step), 1e-9)
        for step, value in kl.pairs
        if spread.at(step) > 0
    }
    ratio = Curve(tuple(sizes), tuple(sizes.values()))
    over = [step for step, value in sizes.items() if value > 1]
    # A policy that is farther from the reference than its own entropy was not held back.
    entropy = recorded.curve(_entropy(recorded))
    is_far = entropy and statistics.median(kl.raw) > entropy.raw[0]
    if len(over) < max(3, 0.5 * len(sizes)) or is_far:
        return None
    began = over[0]
    name = "KL penalty of an answer / group_reward_std"
    evidence = (
        Evidence(name, began, ratio.at(began), "above 1", ratio.raw[0], ratio.last),
        _evidence(recorded, "kl", began, "the coefficient is " + _shown(coefficient.at(began))),
    )
    largest = statistics.median(sizes[step] for step in over)
    now = recorded.config.algorithm.kl.coef
    change = Change("algorithm.kl.coef", now, float(f"{now / (10 * largest):.1g}"))
    return Signs(began, largest, evidence, (change,))


def _kl_growth(recorded: Recorded, ending: Ending) -> Signs | None:
    kl = recorded.curve("kl")
    if not ending.is_harm or len(kl.raw) < MIN_STEPS:
        return None
    # The first value is 0; what the policy has per token to differ in is its own entropy.
    entropy = recorded.curve(_entropy(recorded))
    limit = max(10 * statistics.median(kl.values[1 : max(3, len(kl.raw) // 5)]), entropy.raw[0] if entropy else 0.1)
    found = _lasting(recorded, "kl", lambda value: value > limit, f"{limit:.2g}: 10 times the first, and the entropy")
    if found is None:
        return None
    began, evidence = found
    now = recorded.config.algorithm.kl.coef
    change = Change("algorithm.kl.coef", now, 10 * now)
    return Signs(began, evidence.value / limit, (evidence,), (change, _slower(recorded, 3)))


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


def _jumps(name: str, curve: Curve) -> list[tuple[int, float]]:
    """Return the steps at which a metric jumps, with the factor."""
    factor, floor = _JUMPS[name]
    found = []
    for index in range(1, len(curve.raw)):
        before = statistics.median(curve.raw[max(0, index - 3) : index]) + floor
        after = statistics.median(curve.raw[index : index + 3]) + floor
        growth = after / before if before > 0 else 1.0
        if name == "length" and 0 < growth < 1:
            growth = 1 / growth
        if growth >= factor:
            found.append((curve.steps[index], growth))
    return found


def _learning_rate(recorded: Recorded, ending: Ending) -> Signs | None:
    reward = recorded.curve("reward")
    if not ending.is_harm or not reward or (ending.metric != "reward" and _has_learned(recorded)):
        return None
    own = _fall("reward", reward, recorded) or ending  # an evaluation says later that it fell
    near = max(3, len(reward.raw) // 10)
    latest = own.began + near if own.kind == "fell" else reward.steps[0] + 2 * near
    earliest = own.began - near if own.kind == "fell" else 0
    found = {
        name: (step, factor)
        for name in _JUMPS
        for step, factor in _jumps(name, recorded.curve(name))[::-1]
        if earliest <= step <= latest
    }
    if not found:
        return None
    began = min(step for step, _ in found.values())
    evidence = [
        _evidence(recorded, name, step, f"a jump by a factor of {factor:.1f} within 3 steps")
        for name, (step, factor) in found.items()
    ]
    evidence.insert(0, _evidence(recorded, "reward", own.began or began, "falls with it, or never rises"))
    strength = max(factor / _JUMPS[name][0] for name, (_, factor) in found.items())
    return Signs(began, strength, tuple(evidence), (_slower(recorded, 10),))


GAP = 0.5  # nats per token by which stale policies may differ: the ratio is 1.6


def _staleness(recorded: Recorded, ending: Ending) -> Signs | None:
    lag, gap = recorded.curve("staleness_max"), recorded.curve("engine_gap")
    if not ending.is_harm or not lag or max(lag.raw) < 2 or not gap:
        return None
    began = next((step for step, value in gap.pairs if value > GAP and lag.at(step) >= 1), None)
    if began is None:
        return None
    evidence = [
        _evidence(recorded, "engine_gap", began, f"{GAP} nats per token between sampling and learning"),
        _evidence(recorded, "staleness_max", began, "2 updates or more"),
    ]
    newest = recorded.curve("engine_gap_lag_0")
    if newest:
        evidence.append(_evidence(recorded, "engine_gap_lag_0", began, "without staleness, so the engine agrees"))
    config = recorded.config
    cure = [Change("overlap.staleness", config.overlap.staleness, 1)]
    if config.algorithm.correction.kind == "none":
        cure.append(Change("algorithm.correction.kind", "none", "tis"))
    return Signs(began, max(gap.values) / GAP, tuple(evidence), (*cure, _slower(recorded, 3)))


def _engine_gap(recorded: Recorded, ending: Ending) -> Signs | None:
    found: list[tuple[int, Evidence]] = []
    for name in ("engine_gap_use", "canary_use"):
        curve = recorded.curve(name)
        over = [step for step, value in curve.pairs if value > 1]
        if len(over) >= max(2, 0.2 * len(curve.raw)):
            found.append((over[0], _evidence(recorded, name, over[0], "1, its limit, in a fifth of the steps")))
    if not found:
        return None
    began, evidence = min(found, key=lambda each: each[0])
    config = recorded.config
    cure = [Change("algorithm.correction.kind", config.algorithm.correction.kind, "tis")]
    if config.rollout.quantization is not None:
        cure.insert(0, Change("rollout.quantization", config.rollout.quantization, "null"))
    elif config.rollout.engine != "transformers":
        cure.insert(0, Change("rollout.engine", config.rollout.engine, "transformers"))
    return Signs(began, evidence.value, (evidence,), tuple(cure))


def _large_updates(recorded: Recorded, ending: Ending) -> Signs | None:
    train, rollout = recorded.config.train, recorded.config.rollout
    num_samples = rollout.batch_size * rollout.samples_per_prompt
    num_updates = train.max_epochs * math.ceil(num_samples / train.batch_size)
    clipped = recorded.curve("clipped")
    fall = _fall("reward", recorded.curve("reward"), recorded)
    # Once the policy is broken, nothing is learned and nothing clipped.
    shares = clipped.within(0, clipped.steps[-1] if fall is None else fall.began) if clipped else []
    if not ending.is_harm or num_updates < 8 or not shares or statistics.median(shares) < 0.2:
        return None
    began = next(step for step, value in zip(clipped.steps, clipped.raw, strict=True) if value >= 0.2)
    cure = [_slower(recorded, 3)]
    if train.max_epochs > 1:
        cure.insert(0, Change("train.max_epochs", train.max_epochs, 1))
    if train.batch_size < num_samples:
        cure.insert(0, Change("train.batch_size", train.batch_size, num_samples))
    evidence = _evidence(recorded, "clipped", began, "a fifth of the tokens, in most steps before the fall")
    detail = f"{num_updates} optimizer steps for each rollout"
    return Signs(began, statistics.median(shares) / 0.2, (evidence,), tuple(cure), detail)


def _critic(recorded: Recorded, ending: Ending) -> Signs | None:
    if not ending.is_harm:
        return None
    found = _lasting(recorded, "explained_variance", lambda value: value < 0, "below 0, to the end")
    if found is None:
        return None
    began, evidence = found
    critic = recorded.config.critic
    cure = (
        Change("critic.warmup_steps", critic.warmup_steps, max(10, 2 * critic.warmup_steps)),
        Change("critic.optimizer.learning_rate", critic.optimizer.learning_rate, 3 * critic.optimizer.learning_rate),
    )
    return Signs(began, 1.0 - evidence.value, (evidence,), cure)


def _dropped(recorded: Recorded, ending: Ending) -> Signs | None:
    num_dropped, num_all = recorded.num_samples.get("dropped", 0), sum(recorded.num_samples.values())
    dropped = recorded.curve("groups_dropped")
    began = next((step for step, value in dropped.pairs if value > 0), None)
    if began is None or num_dropped < MOST * num_all or not (ending.is_harm or recorded.error):
        return None
    share = num_dropped / num_all
    evidence = Evidence("samples dropped in the ledger", began, share, f"above a share of {MOST}", 0.0, share)
    filtering = recorded.config.algorithm.filtering
    change = Change("algorithm.filtering.enabled", filtering.enabled, False)
    return Signs(began, share / MOST, (evidence,), (change,), f"such as {recorded.reasons['dropped']}")


RULES = Table[Rule](
    "rule",
    Rule(
        "failed-rewards",
        "ledger, `samples_failed`",
        "a tenth of the samples of a step failed",
        "rewards or agents fail",
        "`reward.function`: what its errors say",
        _failed_rewards,
    ),
    Rule(
        "constant-reward",
        "`reward_std`",
        "it is 0 in every step",
        "every answer has the same reward, so nothing is learned",
        "`reward.function`: one that tells answers apart",
        _constant_reward,
        ("groups-alike", "entropy-collapse"),
    ),
    Rule(
        "groups-alike",
        "`groups_alike`",
        "70% of groups or more to the end, and harm, or the run stalled",
        "the answers to a prompt have equal rewards, so that there is no signal",
        "`rollout.temperature` 1 if it is below 0.7; twice `rollout.samples_per_prompt`; other prompts",
        _alike,
    ),
    Rule(
        "truncation",
        "`truncated`",
        "half of the answers or more to the end, and harm",
        "answers are cut off before they end",
        "`rollout.max_new_tokens` times 4",
        _truncation,
        ("groups-alike", "constant-reward"),
    ),
    Rule(
        "length-reward",
        "`length`, `reward`, `eval/...`, `truncated`",
        "length grows by half, most of the reward's rise follows, and held-out goals fall; or half of the answers"
        " are cut, and reward correlates with length by 0.8 over the steps",
        "the reward pays for length",
        "`reward.function`; `reward.overlong.buffer_length`",
        _length_reward,
        ("truncation", "reward-hack", "repeated-data", "groups-alike", "entropy-collapse", "kl-growth"),
    ),
    Rule(
        "reward-hack",
        "`reward`, `eval/...`",
        "reward rises while a held-out goal that is scored otherwise falls",
        "the policy found what the reward function pays for, and it is not the task",
        "`reward.function`: the score of the evaluation; `algorithm.kl.coef`",
        _reward_hack,
        ("groups-alike", "entropy-collapse", "kl-growth", "truncation"),
    ),
    Rule(
        "repeated-data",
        "ledger, `reward`, `eval/reward`",
        "after 3 passes or more, trained prompts have more reward than held-out ones by half of its range",
        "the prompts were repeated until the policy knew them by heart",
        "`train.num_episodes` as at its beginning; more prompts",
        _repeated_data,
        ("entropy-collapse", "groups-alike"),
    ),
    Rule(
        "dropped-data",
        "ledger, `groups_dropped`",
        "70% of samples are dropped, and harm or an error",
        "nearly all groups are dropped, so that prompts run out",
        "`algorithm.filtering.enabled` off, or wider bounds",
        _dropped,
    ),
    Rule(
        "not-finite",
        "`skipped_updates`, `loss`, `grad_norm`, `kl`",
        "a number is not finite, or one update in 20 is skipped",
        "gradients are not finite",
        "`train.dtype` bf16 instead of fp16; a tenth of `actor.optimizer.learning_rate`",
        _not_finite,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse"),
    ),
    Rule(
        "engine-gap",
        "`engine_gap_use`, `canary_use`",
        "above 1 in a fifth of the steps",
        "engine and trainer compute different log-probs for the same weights",
        "`rollout.quantization` off, `rollout.engine` transformers, `algorithm.correction.kind` tis",
        _engine_gap,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse", "kl-growth", "large-updates"),
    ),
    Rule(
        "staleness",
        "`engine_gap`, `staleness_max`",
        "0.5 nats per token between sampling and learning with a staleness of 2 or more, and harm",
        "samples are too old for the policy that learns from them",
        "`overlap.staleness` 1, `algorithm.correction.kind` tis, a third of the learning rate",
        _staleness,
        ("learning-rate", "groups-alike", "truncation", "entropy-collapse", "kl-growth", "large-updates"),
    ),
    Rule(
        "kl-penalty",
        "`kl`, `kl_coefficient`, `length`, `group_reward_std`",
        "in half of the steps the penalty of an answer is above the spread of rewards in its group, while `kl` is below"
        " the first entropy, and harm",
        "the KL penalty outweighs the reward",
        "`algorithm.kl.coef` at a tenth of that spread",
        _kl_penalty,
        ("learning-rate", "groups-alike", "truncation", "kl-growth", "entropy-collapse"),
    ),
    Rule(
        "entropy-bonus",
        "`entropy`, `algorithm.entropy_coef`",
        "twice the first value to the end, and harm",
        "the entropy bonus outweighs the reward: answers become random",
        "a hundredth of `algorithm.entropy_coef`",
        _entropy_bonus,
        ("learning-rate", "groups-alike", "truncation", "kl-growth"),
    ),
    Rule(
        "large-updates",
        "`clipped`",
        "a fifth of the tokens in most steps before the fall, with 8 optimizer steps for a rollout or more, and harm",
        "too much is learned from each rollout",
        "`train.max_epochs` 1, a larger `train.batch_size`, a third of the learning rate",
        _large_updates,
        ("learning-rate", "groups-alike", "truncation", "kl-growth", "entropy-collapse"),
    ),
    Rule(
        "learning-rate",
        "`reward` with `length`, `truncated`, `entropy`, `grad_norm`, `policy_kl`, `kl`",
        "one of these jumps where the reward falls, or at the start of a run whose reward never rises",
        "the learning rate is too high: an update broke the policy",
        "a tenth of `actor.optimizer.learning_rate`",
        _learning_rate,
        ("groups-alike", "truncation", "entropy-collapse", "kl-growth", "critic"),
    ),
    Rule(
        "kl-growth",
        "`kl`, `entropy`",
        "10 times the first values and above the entropy to the end, and harm",
        "the policy drifts away from the reference",
        "`algorithm.kl.coef` times 10, a third of the learning rate",
        _kl_growth,
        ("entropy-collapse", "groups-alike", "truncation"),
    ),
    Rule(
        "entropy-collapse",
        "`entropy`, else -log p in samples",
        "a tenth of the first values to the end, and harm; or 30% of them, and the run stalled",
        "the policy became deterministic before it had solved the task",
        "`algorithm.entropy_coef`, `algorithm.clip_high` 0.28, a third of the learning rate",
        _entropy_collapse,
        ("groups-alike",),
    ),
    Rule(
        "critic",
        "`explained_variance`",
        "below 0 to the end, and harm",
        "the critic is worse than a constant",
        "`critic.warmup_steps`, 3 times `critic.optimizer.learning_rate`",
        _critic,
    ),
)


def diagnose(recorded: Recorded) -> tuple[Ending, list[Cause]]:
    """Return how a run ended and the causes that fire, the most likely first.

    Causes are in the order in which they began, and at one step by strength; a cause that another brings about, which
    began before or about then, comes behind all that have no such origin.
    """
    ending = ending_of(recorded)
    # A consequence may pass its threshold first; where a run stalls, all goes slowly.
    slack = max(1, len(recorded.curve("reward").steps) // (2 if ending.kind == "stalled" else 10))
    found = {rule.name: signs for rule in RULES.values() if (signs := rule.find(recorded, ending)) is not None}
    causes = []
    for name, signs in found.items():
        origins = [
            other for other, its in found.items() if name in RULES[other].explains and its.began <= signs.began + slack
        ]
        causes.append(Cause(RULES[name], signs, min(origins, key=lambda other: found[other].began, default=None)))
    return ending, sorted(causes, key=lambda each: (each.follows is not None, each.signs.began, -each.signs.strength))


def render_table() -> str:
    """Render the rules as the table of docs/diagnosing.md."""
    rows = [f"| `{rule.name}` | {rule.reads} | {rule.fires} | {rule.cure} |" for rule in RULES.values()]
    return "\n".join(["| cause | read | fires if | cure |", "| --- | --- | --- | --- |", *rows])
