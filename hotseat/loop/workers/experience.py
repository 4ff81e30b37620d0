"""Turns groups of scored episodes into the batches that an update learns from, one function per stage.

The optimizer step of a sample depends only on its place in the rollout, never on the number of ranks. A rank gets whole
groups, because a baseline compares siblings.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hotseat.algorithms.advantages import Moments, compute_advantages
from hotseat.algorithms.aggregation import Aggregation, StepTotals, loss_weights, mask_truncated, step_totals
from hotseat.algorithms.kl import KlEstimator, distillation_advantages, estimate_kl
from hotseat.algorithms.routing import ROUTING
from hotseat.algorithms.shaping import overlong_penalty, penalise_truncation
from hotseat.algorithms.time_steps import mean_on_tokens, step_starts
from hotseat.algorithms.turns import TurnCredit
from hotseat.errors import RewardError
from hotseat.loop.workers.by_sample import BySample, TeacherScores, by_sample
from hotseat.loop.workers.group_format import columns_of, routing_of, row_of, samples_of
from hotseat.loop.workers.losses import (
    ADVANTAGES,
    GIVEN,
    LAGS,
    OLD_LOG_PROBS,
    RATIO_STARTS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    ROLLOUT_LOG_PROBS,
)
from hotseat.train.packing import balance, take
from hotseat.types import GIVEN_VERSION, MicroBatch, Prompt, PromptGroup, ScoredEpisode
from hotseat.user_functions import is_user_function, user_function


@dataclass(frozen=True)
class AdvantageSettings:
    """Settings by which rewards become advantages."""

    estimator: str
    gamma: float
    gae_lambda: float
    divide_by_std: bool
    reward_clip: tuple[float, float] | None
    kl_in_reward: float  # coefficient; 0: not in the reward
    kl_estimator: KlEstimator
    overlong_buffer: int  # 0: no penalty
    overlong_factor: float
    truncation_penalty: float | None  # None: no penalty
    max_sampled: int  # tokens that an episode may sample, over all of its turns
    time_step: Literal["token", "action", "chunk"] = "token"
    ratio_step: Literal["token", "action", "chunk"] | None = None  # tokens that share a ratio; None: `time_step`
    distill_coefficient: float = 0.0  # of the teacher's log-probs in advantages; the reference is the teacher
    turn_credit: TurnCredit = "to_go"
    over_batch: bool | None = None  # normalise over the batch; None: where the estimator does
    # (name, weight) of the rewards that the estimator may compare apart; they are in samples' `extra`.
    reward_parts: tuple[tuple[str, float], ...] = ()
    needs_parts: bool = False  # it compares nothing else
    has_rewards: bool = True  # else nothing scores answers, and advantages are those of a teacher


@dataclass(frozen=True)
class Share:
    """Part of a rollout for one rank: whole groups, and the optimizer step of each of their samples."""

    groups: tuple[PromptGroup, ...]
    steps: tuple[tuple[int, ...], ...]  # per group, per sample
    positions: tuple[int, ...] = ()  # of the groups among those of all shares of the rank; empty: it has one share

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all segments as flat arrays, and samples as rows: objects of their own take ten times as long."""
        samples = [sample for group in self.groups for sample in group.samples]
        groups = [(group.prompt, len(group.samples), group.num_failed) for group in self.groups]
        queries = [sample.episode.query for sample in samples]
        rows = list(map(row_of, samples))
        return _rebuild_share, (self.steps, self.positions, groups, rows, queries, columns_of(samples))


def _rebuild_share(
    steps: tuple[tuple[int, ...], ...],
    positions: tuple[int, ...],
    groups: Sequence[tuple[Prompt, int, int]],
    *rows: Any,
) -> Share:
    samples = iter(samples_of(*rows))
    rebuilt = [PromptGroup(prompt, tuple(itertools.islice(samples, size)), failed) for prompt, size, failed in groups]
    return Share(tuple(rebuilt), steps, positions)


def assign(
    sizes: Sequence[int], samples_per_step: int, num_ranks: int, tokens: Sequence[int] | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """Return (groups of each rank, optimizer step of each sample of each group), from the number of samples per group.

    Samples fill optimizer steps in order. Where samples failed, the last ones may not fill a step: they are a step of
    their own if they are at least half of one, and join the step before otherwise. The groups that begin in one step
    are cut into contiguous runs, one for each rank, as even in samples as whole groups allow. With `tokens`, the number
    of tokens per group, they are instead balanced by tokens in each step: no two ranks differ by more than the largest
    group of the step has.
    """
    steps: list[list[int]] = []
    position = 0
    for size in sizes:
        steps.append([(position + sample) // samples_per_step for sample in range(size)])
        position += size
    num_steps = max(1, (2 * position + samples_per_step) // (2 * samples_per_step))  # rounded, a half upwards
    last = num_steps - 1
    steps = [[min(step, last) for step in group] for group in steps]
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    for step in range(num_steps):
        members = [index for index, group in enumerate(steps) if group and group[0] == step]
        if tokens is not None:
            for rank, part in enumerate(balance([tokens[index] for index in members], num_ranks)):
                ranks[rank] += sorted(members[place] for place in part)
            continue
        total = sum(sizes[index] for index in members)
        seen = 0
        for index in members:
            middle = seen + sizes[index] / 2
            ranks[min(num_ranks - 1, int(middle * num_ranks / total))].append(index)
            seen += sizes[index]
    return ranks, steps


def flatten(groups: Sequence[PromptGroup]) -> MicroBatch:
    """Lay all segments of all samples flat, with the engine's log-probs, and the experts that it recorded.

    Weights are set later, for the whole step.
    """
    samples = [sample for group in groups for sample in group.samples]
    segments = [(segment, sample) for sample in samples for segment in sample.episode.segments]
    batch = MicroBatch.from_segments(
        [segment.token_ids for segment, _ in segments],
        [segment.mask for segment, _ in segments],
        [str(sample.episode.key) for _, sample in segments],
        {ROLLOUT_LOG_PROBS: [segment.log_probs for segment, _ in segments]},
        [segment.images for segment, _ in segments],
    )
    routing = routing_of([segment for segment, _ in segments])
    if routing is not None:
        batch = with_fields(batch, {ROUTING: torch.cat(routing)})
    versions = [segment.versions for segment, _ in segments]
    is_given = torch.cat(versions) == GIVEN_VERSION if versions else torch.zeros(0)
    return with_fields(batch, {GIVEN: is_given.to(torch.float32)}) if bool(is_given.any()) else batch


def for_teacher(groups: Sequence[PromptGroup], batch: MicroBatch) -> MicroBatch:
    """Return the batch as a teacher reads it: its own prompts, where it has some, before the same answers."""
    segments = [
        (segment, group.prompt) for group in groups for sample in group.samples for segment in sample.episode.segments
    ]
    if not any(prompt.teacher_prompt for _, prompt in segments):
        return batch
    ids, masks = [], []
    for segment, prompt in segments:
        other, begin = prompt.teacher_prompt or prompt.token_ids, len(prompt.token_ids)
        ids.append(torch.cat([torch.tensor(other, dtype=torch.int64), segment.token_ids[begin:]]))
        masks.append(torch.cat([torch.zeros(len(other), dtype=torch.bool), segment.mask[begin:]]))
    return MicroBatch.from_segments(ids, masks, batch.sample_ids)


def teacher_scores(
    groups: Sequence[PromptGroup], pieces: Sequence[MicroBatch], outputs: Mapping[str, Sequence[Tensor]]
) -> TeacherScores:
    """Return a teacher's log-probs and further outputs of the pieces of `for_teacher`, for the policy's tokens."""
    every = {name: by_sample(pieces, of_pieces) for name, of_pieces in outputs.items()}
    scores = {name: BySample(_behind_own_prompts(groups, values)) for name, values in every.items()}
    return TeacherScores(scores.pop("log_probs"), scores)


def _behind_own_prompts(groups: Sequence[PromptGroup], values: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
    """Return what a teacher said of the tokens of `for_teacher`, by sample id, for the tokens of the policy's batch."""
    moved = {}
    for group in groups:
        other, own = group.prompt.teacher_prompt, len(group.prompt.token_ids)
        for name in (str(sample.episode.key) for sample in group.samples):
            answers = [of[len(other) :] for of in values[name]]
            zeros = [answer.new_zeros((own, *answer.shape[1:])) for answer in answers]
            joined = [torch.cat(pair) for pair in zip(zeros, answers, strict=True)]
            moved[name] = joined if other else values[name]
    return moved


def with_lags(groups: Sequence[PromptGroup], batch: MicroBatch, version: int) -> MicroBatch:
    """Add to each token the number of versions by which the oldest weights in its context are behind `version`.

    The context is the sampled tokens of its segment up to itself. Where requests continue after a push with their KV
    cache, new weights read what old ones computed. A lag of 0 means that engine and trainer have the same weights.
    """
    lags = []
    for group in groups:
        for sample in group.samples:
            for segment in sample.episode.segments:
                versions = torch.where(segment.mask, segment.versions, version)
                lags.append(version - versions.cummin(0).values)
    return with_fields(batch, {LAGS: torch.cat(lags).to(torch.float32) if lags else torch.zeros(0)})


def shaped_rewards(groups: Sequence[PromptGroup], batch: MicroBatch, settings: AdvantageSettings) -> Tensor:
    """Return rewards after the penalties on length and truncation: [num_episodes] float64."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = torch.tensor([_exact_reward(sample) for sample in samples], dtype=torch.float64)
    if settings.overlong_buffer:
        lengths = batch.layout.sampled_per_episode
        rewards = rewards + overlong_penalty(
            lengths, settings.max_sampled, settings.overlong_buffer, settings.overlong_factor
        )
    if settings.truncation_penalty is not None:
        truncated = torch.tensor([sample.episode.is_truncated for sample in samples])
        rewards = penalise_truncation(rewards, truncated, settings.truncation_penalty)
    return rewards


def rewarded_lengths(sample: ScoredEpisode) -> tuple[int, ...]:
    """Return how many sampled tokens each turn reward is of: those of a turn, or of an action; () if there are none."""
    episode, count = sample.episode, len(sample.turn_rewards)
    if count == len(episode.turn_lengths):
        return episode.turn_lengths
    is_of_actions = episode.action_length > 0 and count * episode.action_length == sum(episode.turn_lengths)
    return (episode.action_length,) * count if is_of_actions else ()


def _exact_reward(sample: ScoredEpisode) -> float:
    """Return the reward of an episode, which is the exact sum of its turns' if it differs from that by rounding alone.

    Turn rewards sum up to the reward, in whatever order and precision they were added up: differences of rounding are
    no reward, and an estimator that divides by a deviation would enlarge them.
    """
    total = math.fsum(sample.turn_rewards)
    if abs(total) <= math.fsum(map(abs, sample.turn_rewards)) * 2.0**-40:  # 0.1 + 0.2 − 0.3
        total = 0.0
    largest = max(map(abs, sample.turn_rewards), default=0.0)
    is_sum = math.isclose(total, sample.reward, rel_tol=1e-6, abs_tol=1e-6 * largest)
    return total if is_sum else sample.reward


def rewards_of_turns(groups: Sequence[PromptGroup], batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
    """Return (reward of each turn, in float64, flat position of its last sampled token); (None, None) without any.

    Turn rewards of a group are used if each of its samples has one per turn, or per action in a simulator: siblings are
    compared turn by turn. Other groups learn from the rewards of whole episodes. A group is on one rank, so the number
    of ranks changes nothing.
    """
    rewards: list[float] = []
    ends: list[int] = []  # how many tokens were sampled before the turn's end, over the whole batch
    num_sampled = batch.layout.sampled_per_episode.tolist()
    position = episode = 0
    for group in groups:
        lengths = [rewarded_lengths(sample) for sample in group.samples]
        is_used = all(lengths)
        for sample, own in zip(group.samples, lengths, strict=True):
            if is_used:
                rewards += sample.turn_rewards
                ends += [position + end for end in itertools.accumulate(own)]
            position += num_sampled[episode]
            episode += 1
    if not rewards:
        return None, None
    sampled = batch.mask.nonzero()[:, 0]
    return torch.tensor(rewards, dtype=torch.float64), sampled[torch.tensor(ends) - 1]


def starts_of_steps(groups: Sequence[PromptGroup], batch: MicroBatch, time_step: str) -> Tensor | None:
    """Return the first tokens of steps, of time or of ratios: [num_tokens] bool; None where every token is one."""
    if time_step == "token":
        return None
    lengths = {sample.episode.action_length for group in groups for sample in group.samples}
    assert time_step == "chunk" or len(lengths) <= 1, f"actions of {lengths} tokens in one run"
    return step_starts(batch.layout, None if time_step == "chunk" else next(iter(lengths), 1))


def bootstrap_values(groups: Sequence[PromptGroup], batch: MicroBatch, values: Tensor) -> Tensor | None:
    """Return the critic's value of what follows each episode that was cut off, 0 for others: [num_episodes].

    It is the value at the last token of the episode's last segment. None: no episode has such a segment.
    """
    has_bootstrap = [sample.episode.has_bootstrap for group in groups for sample in group.samples]
    if not any(has_bootstrap):
        return None
    layout = batch.layout
    last = torch.zeros(layout.num_episodes, dtype=torch.int64)
    last = last.scatter_reduce(0, layout.segment_episode, layout.offsets[1:] - 1, "amax")
    return torch.where(torch.tensor(has_bootstrap), values[last], 0.0)


def with_bootstraps(groups: Sequence[PromptGroup], batch: MicroBatch) -> MicroBatch:
    """Return the batch with a mask that also has the tokens at which `bootstrap_values` reads values.

    A model computes values under the mask alone, and nothing was sampled in a segment that is there for the critic.
    """
    is_bootstrap = torch.tensor(_bootstraps(groups), dtype=torch.bool)
    mask = batch.mask.clone()
    mask[batch.offsets[1:][is_bootstrap] - 1] = True
    return replace(batch, mask=mask)


def without_bootstraps(groups: Sequence[PromptGroup], batch: MicroBatch) -> MicroBatch:
    """Return the batch without segments that were there for the critic alone."""
    is_bootstrap = _bootstraps(groups)
    return (
        take(batch, [index for index, is_one in enumerate(is_bootstrap) if not is_one]) if any(is_bootstrap) else batch
    )


def _bootstraps(groups: Sequence[PromptGroup]) -> list[bool]:
    """Tell of each segment, in flat order, whether it is there for the critic alone."""
    return [
        sample.episode.has_bootstrap and at == len(sample.episode.segments) - 1
        for group in groups
        for sample in group.samples
        for at in range(len(sample.episode.segments))
    ]


def with_advantages(
    groups: Sequence[PromptGroup],
    batch: MicroBatch,
    settings: AdvantageSettings,
    add_up: Callable[[Moments], Moments],
    values: Tensor | None = None,
) -> MicroBatch:
    """Add an advantage for each token to a batch, which has log-probs of actor and reference if the KL needs them.

    With `values` of a critic, [num_tokens], add the returns too.
    """
    if not settings.has_rewards:
        return with_fields(batch, {ADVANTAGES: _teachers_advantages(batch, settings)})
    kl = None
    if settings.kl_in_reward:
        kl = estimate_kl(
            batch.fields[OLD_LOG_PROBS], batch.fields[REFERENCE_LOG_PROBS], batch.mask, settings.kl_estimator
        )
    group_ids = torch.tensor([index for index, group in enumerate(groups) for _ in group.samples], dtype=torch.int64)
    totals = shaped_rewards(groups, batch, settings)
    turn_rewards, turns = rewards_of_turns(groups, batch)
    rewards = totals if turns is None else _without_turns(groups, batch, totals, turns)
    estimator = settings.estimator
    starts = starts_of_steps(groups, batch, settings.time_step)
    advantages = compute_advantages(
        user_function(estimator) if is_user_function(estimator) else estimator,
        batch.layout,
        rewards.to(torch.float32),
        groups=group_ids,
        values=values,
        log_probs=batch.fields[ROLLOUT_LOG_PROBS],
        turn_rewards=turn_rewards,
        turns=turns,
        totals=totals.to(torch.float32),
        parts=parts_of(groups, dict(settings.reward_parts), is_needed=settings.needs_parts),
        part_weights=dict(settings.reward_parts),
        turn_credit=settings.turn_credit,
        kl=kl,
        kl_coefficient=settings.kl_in_reward,
        reward_clip=settings.reward_clip,
        gamma=settings.gamma,
        lam=settings.gae_lambda,
        divide_by_std=settings.divide_by_std,
        over_batch=settings.over_batch,
        starts=starts,
        bootstrap=None if values is None else bootstrap_values(groups, batch, values),
        add_up=add_up,
    )
    learned = {} if values is None else {RETURNS: advantages.returns}
    shared = starts_of_steps(groups, batch, settings.ratio_step or settings.time_step)
    if shared is not None:
        learned[RATIO_STARTS] = shared.to(torch.float32)
    of_tokens = advantages.advantages
    if settings.distill_coefficient:
        teacher = distillation_advantages(batch.fields[OLD_LOG_PROBS], batch.fields[REFERENCE_LOG_PROBS], batch.mask)
        if shared is not None:
            # Tokens that share a ratio need one advantage: the mean descends the KL of all of them together.
            teacher = mean_on_tokens(teacher, shared, batch.mask)
        of_tokens = of_tokens + settings.distill_coefficient * teacher
    return with_fields(batch, {ADVANTAGES: of_tokens, **learned})


def _teachers_advantages(batch: MicroBatch, settings: AdvantageSettings) -> Tensor:
    """Return the advantages of tokens that nothing scores but a teacher: 0 if it does so by distributions alone."""
    if not settings.distill_coefficient:
        return torch.zeros(batch.num_tokens)
    teacher = distillation_advantages(batch.fields[OLD_LOG_PROBS], batch.fields[REFERENCE_LOG_PROBS], batch.mask)
    return settings.distill_coefficient * teacher


def parts_of(groups: Sequence[PromptGroup], names: Iterable[str], *, is_needed: bool) -> dict[str, Tensor]:
    """Return each of the named rewards of all samples, NaN where a sample has none: [num_episodes] float64.

    is_needed: a sample without any of them is an error.
    """
    names = list(names)
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        if is_needed and not any(name in sample.extra for name in names):
            raise RewardError(
                f"sample {sample.episode.key} has none of the rewards {', '.join(names)}, only"
                f" {', '.join(sample.extra) or 'their sum'}: name in reward.parts what is to be compared apart"
            )
    columns = ([sample.extra.get(name, math.nan) for sample in samples] for name in names)
    return {name: torch.tensor(column, dtype=torch.float64) for name, column in zip(names, columns, strict=True)}


def _without_turns(groups: Sequence[PromptGroup], batch: MicroBatch, totals: Tensor, turns: Tensor) -> Tensor:
    """Return rewards of episodes without those of turns, which end at these tokens: [num_episodes].

    Turn rewards go to the ends of their turns; penalties stay on the episode's last token. Subtracting the former from
    the sum and adding them again would round, and equal rewards would differ.
    """
    samples = [sample for group in groups for sample in group.samples]
    has_turns = torch.zeros(len(samples), dtype=torch.bool)
    has_turns[batch.layout.token_episode[turns]] = True
    of_turns = torch.tensor([math.fsum(sample.turn_rewards) for sample in samples], dtype=torch.float64)
    return torch.where(has_turns, totals - of_turns, totals)


def without_truncated(groups: Sequence[PromptGroup], batch: MicroBatch) -> MicroBatch:
    """Return the batch with the tokens of truncated episodes masked. Their advantages were computed before."""
    truncated = torch.tensor([sample.episode.is_truncated for group in groups for sample in group.samples])
    return replace(batch, mask=mask_truncated(batch.layout, truncated))


def with_fields(batch: MicroBatch, fields: Mapping[str, Tensor]) -> MicroBatch:
    return replace(batch, fields={**batch.fields, **fields})


def steps_of(shares: Sequence[Share]) -> dict[str, int]:
    """Return the optimizer step of each sample, by sample id."""
    return {
        str(sample.episode.key): step
        for share in shares
        for group, steps in zip(share.groups, share.steps, strict=True)
        for sample, step in zip(group.samples, steps, strict=True)
    }


def groups_of(shares: Sequence[Share]) -> list[PromptGroup]:
    """Return the groups of a rank in their order, whichever hosts they come from."""
    if len(shares) == 1:
        return list(shares[0].groups)
    placed = {at: group for share in shares for at, group in zip(share.positions, share.groups, strict=True)}
    return [placed[at] for at in sorted(placed)]


def cut_into_steps(batch: MicroBatch, sample_steps: Mapping[str, int], num_steps: int) -> list[MicroBatch | None]:
    """Cut a batch into one per optimizer step, `None` where this rank has no sample in it."""
    segments: list[list[int]] = [[] for _ in range(num_steps)]
    for segment, name in enumerate(batch.sample_ids):
        segments[sample_steps[name]].append(segment)
    return [take(batch, members) if members else None for members in segments]


def totals_of(steps: Sequence[MicroBatch | None]) -> list[StepTotals]:
    """Return this rank's part of the totals of each optimizer step."""
    return [StepTotals(0, 0) if batch is None else step_totals(batch.layout) for batch in steps]


def weighted(batch: MicroBatch, how: Aggregation, totals: StepTotals, max_length: int | None = None) -> MicroBatch:
    """Return the batch with the weight of each token in the step's loss."""
    return replace(batch, weights=loss_weights(batch.layout, how, totals=totals, max_length=max_length))
