"""Groups of a step or an evaluation: which are kept, and the metrics of their rewards and lengths."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotseat.algorithms.filtering import reason_to_drop
from hotseat.errors import RunError
from hotseat.loop.workers.group_facts import GivenUp, GroupFacts
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
    given_up: tuple[GivenUp, ...] = ()  # groups that were sampled beyond those that were needed

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


def metrics_of_sets(
    groups: Sequence[GroupFacts], num_samples: int, sets: Mapping[str, range], *, has_full_reward: bool = True
) -> dict[str, float]:
    """Return the metrics of an evaluation: those of the prompts in no set, and those of each set with its name.

    If all prompts are in sets, the former are of all together. sets: by name, the indices of their prompts.
    """
    members = {name: [facts for facts in groups if facts.prompt in indices] for name, indices in sets.items()}
    others = [facts for facts in groups if not any(facts.prompt in indices for indices in sets.values())]
    metrics = evaluation_metrics(others or groups, num_samples, has_full_reward=has_full_reward)
    if not others:
        metrics = {key: value for key, value in metrics.items() if key.count("/") == 1}  # sources are told apart below
    for name, facts in members.items():
        measured = evaluation_metrics(facts, num_samples, has_full_reward=has_full_reward)
        metrics |= {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in measured.items()}
    return metrics


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
            metrics |= {f"{label}pass@{k}": solved for k, solved in _passes(members, num_samples)}
        num_failed = sum(len(facts.failures) for facts in members)
        if num_failed:
            metrics[f"{label}failed"] = float(num_failed)  # the other numbers leave failed samples out
        metrics[f"{label}length"] = statistics.fmean(n for facts in members for n in facts.num_sampled)
        metrics |= {f"{label}success": rate for rate in success_rates(members)}
    return metrics


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """Estimate without bias the probability that one of k answers is right: 1 - C(n - c, k) / C(n, k).

    Chen et al., "Evaluating Large Language Models Trained on Code", 2021, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def _passes(groups: Sequence[GroupFacts], num_samples: int) -> Iterator[tuple[int, float]]:
    """Yield (k, pass@k) for the powers of two below the number of samples, over prompts with k rewards or more."""
    k = 2
    while k < num_samples:
        solved = [
            pass_at(k, len(facts.rewards), sum(reward >= 1.0 for reward in facts.rewards))
            for facts in groups
            if len(facts.rewards) >= k
        ]
        if solved:
            yield k, statistics.fmean(solved)
        k *= 2


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
    metrics |= given_up_metrics(collected.given_up)
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


def given_up_metrics(given_up: Sequence[GivenUp]) -> dict[str, float]:
    """Return the metrics of groups that were not waited for; none without any.

    `length_given_up` is the mean length of their answers that had ended, `answers_cut` how many others there were.
    """
    if not given_up:
        return {}
    lengths = [length for each in given_up for length in each.lengths]
    metrics = {"groups_given_up": float(len(given_up))}
    metrics["answers_cut"] = float(sum(each.num_samples for each in given_up) - len(lengths))
    return metrics | ({"length_given_up": statistics.fmean(lengths)} if lengths else {})


def _standard_deviation(values: Sequence[float]) -> float:
    """Return that of a population, in floats: `statistics.pstdev` computes in fractions, ten times as long."""
    mean = statistics.fmean(values)
    return math.sqrt(statistics.fmean((value - mean) ** 2 for value in values))
