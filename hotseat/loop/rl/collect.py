"""Groups of a step or an evaluation: which are kept, and the metrics of their rewards and lengths."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotseat.algorithms.filtering import reason_to_drop
from hotseat.errors import RunError
from hotseat.loop.workers.group_facts import GroupFacts
from hotseat.loop.workers.observations import SUCCESS
from hotseat.rewards import RewardTally
from hotseat.types import Failed

MAX_REFILLS = 20  # batches of replacements for one step, before the run stops


@dataclass(frozen=True)
class GroupFilter:
    """Conditions on the groups that a step may learn from."""

    min_samples: int  # 2 where the estimator compares samples of a group
    low: float | None  # exclusive bounds of the mean score; None: no bound
    high: float | None
    max_failed_fraction: float
    hint: Callable[[], str] = str  # at the cause of failed rewards, for an error

    def reason_to_drop(self, facts: GroupFacts) -> str | None:
        """Return why a group is dropped, or None to keep it."""
        if facts.dropped_because is not None:
            return facts.dropped_because
        return reason_to_drop(facts.scores, self.low, self.high, min_samples=self.min_samples)


@dataclass(frozen=True)
class Collected:
    """Groups of a step, in prompt order, and the groups that were dropped."""

    groups: tuple[GroupFacts, ...]
    num_generated: int  # groups
    dropped: tuple[tuple[GroupFacts, str], ...]  # groups, and why
    num_failed: int  # samples without a reward

    @property
    def all_groups(self) -> list[GroupFacts]:
        return [*self.groups, *(facts for facts, _ in self.dropped)]


def add_rewards(tally: RewardTally, facts: GroupFacts) -> None:
    """Count the rewards and failures of a group's samples."""
    tally.add([*(Failed(why) for _, why in facts.failures), *facts.rewards])


def too_few_kept(num_generated: int, num_kept: int, num_groups: int, reasons: Sequence[str]) -> RunError:
    """Make the error of a step for which too many groups were dropped."""
    why = ", ".join(f"{count} dropped: {reason}" for reason, count in Counter(reasons).most_common())
    return RunError(
        f"{num_generated} prompts gave only {num_kept} of the {num_groups} groups of a step ({why}): the rewards"
        " leave nothing to learn from; widen algorithm.filtering.low and high, switch"
        " algorithm.filtering.enabled off, or have components drop fewer groups"
    )


def evaluation_metrics(
    groups: Sequence[GroupFacts], num_samples: int, *, has_full_reward: bool = True
) -> dict[str, float]:
    """Return mean reward, accuracy (share of samples with the full reward of 1) and pass@k, overall and per source.

    has_full_reward: a reward of 1 or more stands for a right answer. A reward model's numbers mean no such thing.
    """
    metrics: dict[str, float] = {}
    sources = sorted({facts.source for facts in groups})
    for source in ["", *(name for name in sources if name)] if len(sources) > 1 else [""]:
        members = [facts for facts in groups if not source or facts.source == source]
        label = f"eval/{source}/" if source else "eval/"
        rewards = [reward for facts in members for reward in facts.rewards]
        if not rewards:
            continue
        metrics[f"{label}reward"] = statistics.fmean(rewards)
        if has_full_reward:
            metrics[f"{label}accuracy"] = statistics.fmean(reward >= 1.0 for reward in rewards)
        if has_full_reward and num_samples > 1:
            best = [max(facts.rewards) >= 1.0 for facts in members if facts.rewards]
            metrics[f"{label}pass@{num_samples}"] = statistics.fmean(best)
        num_failed = sum(len(facts.failures) for facts in members)
        if num_failed:
            metrics[f"{label}failed"] = float(num_failed)  # the other numbers leave failed samples out
        metrics[f"{label}length"] = statistics.fmean(n for facts in members for n in facts.num_sampled)
        metrics |= {f"{label}success": rate for rate in success_rates(members)}
    return metrics


def success_rates(groups: Sequence[GroupFacts]) -> list[float]:
    """Return the share of episodes that succeeded, if they say so: those in simulators do."""
    successes = [extra[SUCCESS] for facts in groups for extra in facts.extra if SUCCESS in extra]
    return [statistics.fmean(successes)] if successes else []


def rollout_metrics(collected: Collected) -> dict[str, float]:
    groups = collected.groups
    rewards = [reward for facts in groups for reward in facts.rewards]
    lengths = [length for facts in groups for length in facts.num_sampled]
    metrics = {
        "reward": statistics.fmean(rewards),
        "reward_std": _standard_deviation(rewards),
        "group_reward_std": statistics.fmean(_standard_deviation(facts.rewards) for facts in groups),
        "groups_alike": statistics.fmean(min(facts.rewards) == max(facts.rewards) for facts in groups),
        "length": statistics.fmean(lengths),
        "length_max": float(max(lengths)),
        "truncated": statistics.fmean(flag for facts in groups for flag in facts.truncated),
        "samples": float(len(rewards)),
        "sampled_tokens": float(sum(lengths)),
        "samples_failed": float(collected.num_failed),
        "groups_dropped": float(len(collected.dropped)),
    }
    tasks = sorted({facts.source for facts in groups if facts.source})
    for task in tasks if len(tasks) > 1 else []:
        members = [facts for facts in groups if facts.source == task]
        metrics |= {f"{SUCCESS}/{task}": rate for rate in success_rates(members)}
    names = sorted({name for facts in groups for extra in facts.extra for name in extra})
    for name in names:
        metrics[f"extra/{name}"] = statistics.fmean(
            extra[name] for facts in groups for extra in facts.extra if name in extra
        )
    return metrics


def _standard_deviation(values: Sequence[float]) -> float:
    """Return that of a population, in floats: `statistics.pstdev` computes in fractions, ten times as long."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
