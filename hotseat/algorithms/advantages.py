"""Advantages, computed from rewards.

An episode's reward is compared with its group (a baseline per episode), what is left is placed on tokens, and the
tokens' returns are their advantages; GAE uses a critic instead of a group. Time steps are the tokens that the policy
sampled, in order across the segments of an episode, or runs of them (`time_steps.py`). Tokens that the environment
inserted are no time steps: nothing is discounted across them. (OpenRLHF discounts across them.)

`registry/estimators.py` lists the estimators with their formulas. Where turns have rewards, what they compare is what
each turn is credited with: see `compute_advantages`, which does the whole computation.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hotseat.algorithms.shaping import clip_rewards
from hotseat.algorithms.time_steps import sampled_steps, steps_of_tokens, sum_per_step
from hotseat.algorithms.token_masks import floating, sampled_only
from hotseat.algorithms.turns import TurnCredit, TurnTable, checked_turns, ends_of_steps, within_turns, without_rounding
from hotseat.errors import RewardError, UserError
from hotseat.extensions import load
from hotseat.registry.estimators import ESTIMATORS, USER_ESTIMATOR, EstimatorEntry, estimator_entry
from hotseat.registry.lookup import names_that
from hotseat.types import TokenLayout

# ------------------------------------------------------------------------------------------------- rewards on tokens


def place_rewards(
    layout: TokenLayout,
    rewards: Tensor,
    *,
    turn_rewards: Tensor | None = None,
    turns: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> Tensor:
    """[num_tokens]: an episode's reward on its last sampled token, a turn's on the turn's last, −β·KL on all of them.

    `rewards` is [num_episodes]; an episode without a sampled token has no place for its reward, which is then not
    read. `turn_rewards` is [num_turns], in the order of `turns`, the flat position of each turn's last sampled token;
    by default `turn_ends(layout)`, which cannot tell turns apart if nothing was inserted between them.
    """
    device, episode = layout.mask.device, layout.token_episode
    sampled = torch.nonzero(layout.mask).squeeze(1)
    last = torch.full((layout.num_episodes,), -1, dtype=torch.int64, device=device)
    last = last.scatter_reduce(0, episode[sampled], sampled, "amax")
    has_token = last >= 0

    rewards = floating(rewards).to(device)
    assert rewards.shape == (layout.num_episodes,), f"{tuple(rewards.shape)} rewards, {layout.num_episodes} episodes"
    placed = rewards.new_zeros(layout.num_tokens).index_add(0, last[has_token], rewards[has_token])
    if turn_rewards is not None:
        turn_rewards = floating(turn_rewards).to(placed)
        placed = placed.index_add(0, checked_turns(layout, turn_rewards, turns), turn_rewards)
    if kl_coefficient:
        if kl is None:
            raise UserError(
                f"the KL coefficient is {kl_coefficient} but no KL was given: pass the estimate of each token, or 0"
            )
        placed = placed - kl_coefficient * sampled_only(kl, layout.mask)
    return placed


# --------------------------------------------------------------------------------------------- returns and advantages


def discounted_returns(
    layout: TokenLayout, token_rewards: Tensor, *, gamma: float, starts: Tensor | None = None
) -> Tensor:
    """G_t = r_t + γ·G_{t+1} over the sampled tokens of each episode, 0 elsewhere. [num_tokens] in and out.

    starts: first tokens of longer steps of time, as `step_starts` returns them; a step's tokens share its return.
    """
    assert token_rewards.shape == layout.mask.shape
    steps = _Steps(layout, starts)
    return steps.on_tokens(_decayed_sum(steps.sums(token_rewards), steps.episode, gamma))


def gae(
    layout: TokenLayout,
    token_rewards: Tensor,
    values: Tensor,
    *,
    gamma: float,
    lam: float,
    starts: Tensor | None = None,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(A, A + V) with A_t = δ_t + γλ·A_{t+1} and δ_t = r_t + γ·V_{t+1} − V_t. [num_tokens] in and out.

    V_{t+1} is the value at the next sampled token of the episode. After its last one it is `bootstrap`,
    [num_episodes], the value of what follows an episode that was cut off; without it 0: an episode that ran into its
    length limit ends there too. Schulman et al., "High-Dimensional Continuous Control Using GAE", 2015.

    starts: first tokens of longer steps of time, as `step_starts` returns them. V is then the value at a step's first
    token, r the sum of its rewards; its tokens share the advantage, and the first of them has the return.
    """
    assert token_rewards.shape == values.shape == layout.mask.shape
    steps = _Steps(layout, starts)
    current = floating(values)[steps.first]
    following = _following(current, steps.episode, bootstrap)
    deltas = steps.sums(token_rewards) + gamma * following - current
    advantages = _decayed_sum(deltas, steps.episode, gamma * lam)
    returns = advantages.new_zeros(layout.num_tokens).index_copy(0, steps.first, advantages + current)
    return steps.on_tokens(advantages), returns


def _following(current: Tensor, episode: Tensor, bootstrap: Tensor | None) -> Tensor:
    """Return the value at the next step of the same episode; past its end `bootstrap`, or 0. [num_steps] in and out."""
    following = _later(current, episode, 1)
    if bootstrap is None or not len(episode):
        return following
    is_last = torch.ones_like(episode, dtype=torch.bool)
    is_last[:-1] = episode[1:] != episode[:-1]
    return torch.where(is_last, floating(bootstrap).to(following)[episode], following)


class _Steps:
    """Steps of time: of one sampled token each, or longer ones that begin at `starts`."""

    def __init__(self, layout: TokenLayout, starts: Tensor | None):
        starts = layout.mask if starts is None else starts
        self.first = torch.nonzero(starts).squeeze(1)  # [num_steps]
        self.episode = layout.token_episode[self.first]  # [num_steps]
        self._steps = steps_of_tokens(starts, layout.mask)

    def sums(self, token_rewards: Tensor) -> Tensor:
        """[num_tokens] to [num_steps]."""
        return sum_per_step(floating(token_rewards), self._steps, len(self.first))

    def on_tokens(self, values: Tensor) -> Tensor:
        """[num_steps] to [num_tokens], 0 where not sampled."""
        if not len(values):
            return values.new_zeros(len(self._steps))
        return torch.where(self._steps >= 0, values[self._steps.clamp(min=0)], 0.0)


def _later(values: Tensor, episode: Tensor, steps: int) -> Tensor:
    """The value `steps` time steps later in the same episode, 0 past its end. [num_sampled] in and out."""
    later = torch.zeros_like(values)
    later[:-steps] = torch.where(episode[steps:] == episode[:-steps], values[steps:], 0.0)
    return later


def _decayed_sum(values: Tensor, episode: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay·y_{t+1} within each episode. [num_sampled] in and out.

    By doubling: y first sums 1 step, then 2, 4, 8, ... so an episode of T steps takes log2(T) passes and no padding.
    """
    longest = int(torch.bincount(episode).max()) if len(episode) else 0
    span = 1
    while span < longest:
        values = values + decay**span * _later(values, episode, span)
        span *= 2
    return values


# ------------------------------------------------------------------------------------------ normalisation over a batch


@dataclass(frozen=True)
class Moments:
    """Sums that ranks add up, so that each can normalise its own tokens by the whole batch."""

    count: int
    total: float
    total_squares: float

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.count + other.count, self.total + other.total, self.total_squares + other.total_squares)


def moments(advantages: Tensor, mask: Tensor) -> Moments:
    """Count, sum and sum of squares of the sampled tokens, in float64."""
    values = sampled_only(advantages, mask).to(torch.float64)
    return Moments(int(mask.sum()), float(values.sum()), float(values.square().sum()))


def normalise_by(advantages: Tensor, mask: Tensor, batch: Moments, *, with_std: bool = True) -> Tensor:
    """(A − μ) / sqrt(max(σ², 1e-8)) with the batch's mean and (population) variance; A − μ without the std.

    OpenRLHF's form, for gae, reinforce and reinforce_baseline. [num_tokens] in and out, 0 where not sampled.
    """
    values = sampled_only(advantages, mask)
    mean = batch.total / max(batch.count, 1)
    variance = batch.total_squares / max(batch.count, 1) - mean**2
    scale = max(variance, 1e-8) ** -0.5 if with_std else 1.0
    return sampled_only((values.to(torch.float64) - mean) * scale, mask).to(values.dtype)


# --------------------------------------------------------------------------------------------------------- estimators


@dataclass(frozen=True)
class Advantages:
    """Advantages and returns per token, detached, 0 where the policy did not sample."""

    advantages: Tensor  # [num_tokens]
    returns: Tensor  # [num_tokens] the critic's targets; never normalised


@torch.no_grad()
def compute_advantages(
    estimator: str | Callable[..., Tensor],
    layout: TokenLayout,
    rewards: Tensor,
    *,
    groups: Tensor | None = None,
    values: Tensor | None = None,
    log_probs: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turns: Tensor | None = None,
    totals: Tensor | None = None,
    parts: Mapping[str, Tensor] | None = None,
    part_weights: Mapping[str, float] | None = None,
    turn_credit: TurnCredit = "to_go",
    kl: Tensor | None = None,
    kl_coefficient: float = 0.0,
    reward_clip: tuple[float, float] | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    divide_by_std: bool = True,
    over_batch: bool | None = None,
    eps: float = 1e-9,
    starts: Tensor | None = None,
    bootstrap: Tensor | None = None,
    add_up: Callable[[Moments], Moments] = lambda local: local,
) -> Advantages:
    """Compute advantages and returns of every token by an estimator of the table, or by a function.

    The order is: baseline, clipping to `reward_clip`, placing on tokens with −kl_coefficient·kl, returns or GAE,
    normalisation. `rewards` and `groups` are [num_episodes]; `values` (for gae) and `kl` are [num_tokens]; turn
    rewards are as in `place_rewards`. `divide_by_std=False` is OpenRLHF's no_advantage_std_norm: no estimator divides
    by a standard deviation then. `over_batch`: whether to normalise over the batch; None: as the table says.

    parts, part_weights: the rewards that make up the total, by name, [num_episodes] each, with their weights, for an
    estimator that compares them apart: see `parts_normalised`. Its result is normalised over the episodes of the step,
    unless `over_batch` says otherwise: true is over its tokens, false not at all.

    With several ranks, each has whole groups, and `add_up` turns this rank's moments into the sum over all.

    starts, bootstrap: steps of time longer than a token, and the values after episodes that were cut off, as in `gae`.

    An episode without a sampled token counts in no baseline: nothing that the policy did is compared with it.

    Turn rewards are added to `rewards`. With r_ik the k-th turn reward of episode i, 0 if it ended earlier, and q_i its
    `rewards`, the rewards to go from that turn are R_ik = Σ_{j≥k} r_ij + q_i. `turn_credit` says what the k-th turn is
    credited with, and an estimator that compares groups compares it with the same of all siblings:

        to_go   R_ik, also for gae and reinforce
        own     r_ik, and R_ik for the last turn of an episode; not for estimators that discount
        sum     R_i1, as if there were no turn rewards

    For x_i, any one of these, dr_grpo and reinforce_baseline have x_i − mean(x), rloo (x_i − mean(x)) · n / (n − 1),
    group_norm (x_i − mean(x)) / (std(x) + eps). The deviation is that of what is divided, so group_norm is never beyond
    ±(n − 1) / √n. Equal x have advantages of exactly 0. With longer steps of time (`starts`), `own` credits a step with
    all turns that it has tokens of. `totals` are R_i1, exactly, added up here if they are not given.

    `reward_clip` bounds each turn reward less its baseline, and for group_norm what is credited.

    A function takes the place of the baseline: see `call_estimator`. It compares whole episodes, by their totals.
    """
    facts = _facts(estimator, gamma, lam)
    function: Callable[..., Tensor] | None = None if isinstance(estimator, str) else estimator
    if facts.compare is not None:
        function = load(facts.compare)
    rewards = floating(rewards).to(layout.mask.device)
    alive = layout.sampled_per_episode > 0
    _refuse_failed("episode", torch.where(alive, rewards, 0.0))
    if turn_credit == "own" and not facts.credits_own_turns:
        name = estimator if isinstance(estimator, str) else "of your own"
        raise UserError(
            f"estimator {name!r} cannot credit turns with their own rewards alone: use"
            f" {', '.join(names_that(ESTIMATORS, 'credits_own_turns'))}, or turn_credit to_go"
        )
    if function is not None and groups is None:
        raise UserError(f"estimator {estimator!r} compares an episode with its group: pass groups")
    if turn_rewards is not None:
        turn_rewards = turn_rewards.to(layout.mask.device)
        turns = checked_turns(layout, turn_rewards, turns)
        _refuse_failed("turn", turn_rewards)
        if totals is None:
            totals = rewards.double().index_add(0, layout.token_episode[turns], turn_rewards.double())
            magnitudes = rewards.double().abs().index_add(0, layout.token_episode[turns], turn_rewards.double().abs())
            totals = without_rounding(totals, magnitudes)
        totals = totals.to(rewards)
        if turn_credit == "sum" or facts.compares_episodes:
            rewards, turn_rewards = totals, None
    clip = partial(clip_rewards, low=reward_clip[0], high=reward_clip[1]) if reward_clip else floating
    credits = None  # [num_sampled]
    if function is not None and groups is not None:
        divides = facts.normalisation == "group" and divide_by_std
        if facts.normalisation in ("group", "episodes"):
            function = partial(function, eps=eps, with_std=divide_by_std)
        groups = groups.to(rewards.device)
        compare = partial(_compared, function, groups, alive, rewards.dtype)
        if facts.compares_episodes:
            by_part = {"parts": parts or {}, "part_weights": part_weights or {}}
            rewards = _compared_episodes(function, layout, rewards, groups, log_probs, by_part)
            if facts.normalisation == "episodes" and over_batch is None:
                rewards = normalise_by(rewards, alive, add_up(moments(rewards, alive)), with_std=divide_by_std)
        elif turn_rewards is None or turns is None:
            rewards = compare(rewards.unsqueeze(1)).squeeze(1)
        else:
            assert totals is not None
            table = TurnTable(layout, rewards, totals, turn_rewards, turns)
            credits = table.credits(compare, clip, clips_sums=divides, credit=turn_credit, starts=starts)
            rewards, turn_rewards = torch.zeros_like(rewards), None
    token_rewards = place_rewards(
        layout,
        clip(rewards),
        turn_rewards=None if turn_rewards is None else clip(turn_rewards),
        turns=turns,
        kl=kl,
        kl_coefficient=kl_coefficient,
    )
    returns_of = load(facts.returns)
    if facts.needs_critic:
        if values is None:
            raise UserError(f"estimator {estimator!r} needs a critic: pass its values, or choose one without")
        advantages, returns = returns_of(
            layout, token_rewards, values, gamma=gamma, lam=lam, starts=starts, bootstrap=bootstrap
        )
    else:
        advantages = returns_of(layout, token_rewards, gamma=gamma, starts=starts)
        if credits is not None:
            if turn_credit == "own":
                advantages = within_turns(layout, advantages, ends_of_steps(layout, turns, starts))
            advantages = advantages.index_add(0, table.sampled, credits)
        returns = advantages
    if facts.normalisation == "batch" if over_batch is None else over_batch:
        batch = add_up(moments(advantages, layout.mask))
        advantages = normalise_by(advantages, layout.mask, batch, with_std=divide_by_std)
    return Advantages(advantages, returns)


def call_estimator(
    function: Callable[..., Tensor],
    rewards: Tensor,
    groups: Tensor,
    lengths: Tensor,
    log_probs: Tensor | None,
    parts: Mapping[str, Tensor] = MappingProxyType({}),
    part_weights: Mapping[str, float] = MappingProxyType({}),
) -> Tensor:
    """Call an estimator of whole episodes, such as a user's. [num_episodes] in and out.

    What it returns takes the place of rewards less a baseline.

    It gets `rewards` and `groups` by position, and by keyword those of the following that its parameters name:

        lengths     [num_episodes] int64: how many tokens the policy sampled in each episode
        log_probs   [sum of lengths]: the engine's log-prob of each of them, episode after episode
        parts       the rewards that make up the total, by name: [num_episodes] each, NaN where one does not apply
        part_weights  the weight of each of them in the total
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # a function that is not written in Python may have no signature
        parameters = []
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
    further = {"lengths": lengths, "log_probs": log_probs, "parts": parts, "part_weights": part_weights}
    named = {name: value for name, value in further.items() if takes_all or name in names}
    if "log_probs" in names and log_probs is None:
        raise UserError("the estimator takes log_probs, and there are none: pass those of the engine")
    return function(rewards, groups, **named)


def _compared_episodes(
    function: Callable[..., Tensor],
    layout: TokenLayout,
    rewards: Tensor,
    groups: Tensor,
    log_probs: Tensor | None,
    given: Mapping[str, Any],
) -> Tensor:
    """Return what `call_estimator` makes of the rewards of episodes with sampled tokens; 0 for other episodes."""
    lengths = layout.sampled_per_episode
    alive = lengths > 0
    if not alive.any():
        return torch.zeros_like(rewards)
    if log_probs is not None:
        sampled, episode = sampled_steps(layout)
        log_probs = floating(log_probs)[sampled[episode.argsort(stable=True)]]
    parts = {name: values.to(alive.device)[alive] for name, values in given["parts"].items()}
    compared = call_estimator(
        function, rewards[alive], groups[alive], lengths[alive], log_probs, parts, given["part_weights"]
    )
    if compared.shape != rewards[alive].shape or not compared.isfinite().all():
        raise UserError(
            f"the estimator returned the shape {list(compared.shape)}, {int(compared.isfinite().sum())} numbers finite,"
            f" for {int(alive.sum())} episodes: it has to return a finite number per episode"
        )
    return torch.zeros_like(rewards).masked_scatter(alive, compared.to(rewards))


def _facts(estimator: str | Callable[..., Tensor], gamma: float, lam: float) -> EstimatorEntry:
    if not isinstance(estimator, str):
        return USER_ESTIMATOR
    facts = estimator_entry(estimator)
    if gamma != 1 and not facts.discounts:
        others = " or ".join(names_that(ESTIMATORS, "discounts"))
        raise UserError(f"gamma {gamma} has no effect with estimator {estimator!r}: set it to 1, or use {others}")
    if lam != 1 and not facts.needs_critic:
        others = " or ".join(names_that(ESTIMATORS, "needs_critic"))
        raise UserError(f"lambda {lam} has no effect with estimator {estimator!r}: set it to 1, or use {others}")
    return facts


def _refuse_failed(whose: str, rewards: Tensor) -> None:
    failed = torch.nonzero(~rewards.isfinite()).squeeze(1)
    if len(failed):
        first = int(failed[0])
        raise RewardError(
            f"the reward of {whose} {first} is {float(rewards[first])} ({len(failed)} such): a reward that failed is"
            " not a number to learn from; drop the sample before advantages are computed"
        )


def _compared(
    function: Callable[..., Tensor], groups: Tensor, alive: Tensor, dtype: torch.dtype, table: Tensor
) -> Tensor:
    """Compare each column of a table, [num_episodes, columns], with its group; 0 for episodes without sampled tokens.

    dtype: of rewards. Sums are rounded to it, so that sums in another order are equal.
    """
    result = torch.zeros_like(table, dtype=dtype)
    result[alive] = function(table.to(dtype)[alive], groups[alive])
    return result
