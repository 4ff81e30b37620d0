"""Turns of an episode: where they end, and what each is credited with of the rewards of turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from hotseat.algorithms.time_steps import sampled_steps
from hotseat.errors import UserError
from hotseat.types import TokenLayout

TurnCredit = Literal["to_go", "own", "sum"]


def turn_ends(layout: TokenLayout) -> Tensor:
    """[num_turns] int64, ascending: the last token of each unbroken run of sampled tokens in a segment."""
    mask = layout.mask
    goes_on = torch.zeros_like(mask)
    goes_on[:-1] = mask[1:] & (layout.token_segment[1:] == layout.token_segment[:-1])
    return torch.nonzero(mask & ~goes_on).squeeze(1)


def checked_turns(layout: TokenLayout, turn_rewards: Tensor, turns: Tensor | None) -> Tensor:
    """Return the last token of each turn, checked against the number of turn rewards."""
    ends = turn_ends(layout) if turns is None else turns.to(layout.mask.device)
    if ends.shape != turn_rewards.shape:
        raise UserError(
            f"{turn_rewards.numel()} turn rewards for {ends.numel()} turns: give one per turn, in order; an agent whose"
            " turns have no inserted tokens between them must say where they end"
        )
    if not bool(layout.mask[ends].all()) or not bool((ends[1:] > ends[:-1]).all()):
        raise UserError(
            f"turns end at tokens {ends.tolist()}: name the last token that the policy sampled in each turn, in order"
        )
    return ends


def ends_of_steps(layout: TokenLayout, turns: Tensor, starts: Tensor | None) -> Tensor:
    """Leave out the turns that end inside a step of time, which its tokens share with the next turn."""
    if starts is None:
        return turns
    sampled, episode = sampled_steps(layout)
    after = torch.searchsorted(sampled, turns) + 1
    following = after.clamp(max=len(sampled) - 1)
    is_inside = (
        (after < len(sampled)) & (episode[following] == layout.token_episode[turns]) & ~starts[sampled[following]]
    )
    return turns[~is_inside]


def within_turns(layout: TokenLayout, returns: Tensor, turns: Tensor) -> Tensor:
    """Take from the returns of a turn's tokens what comes after the turn: G_t − G_s, s the next turn's first token.

    `returns` is [num_tokens], undiscounted; `turns` is as in `place_rewards`. Tokens after all turns keep theirs.
    """
    if not len(turns):
        return returns
    sampled = torch.nonzero(layout.mask).squeeze(1)
    episode = layout.token_episode[sampled]
    turn = torch.searchsorted(turns, sampled)
    end = turns[turn.clamp(max=len(turns) - 1)]
    after = torch.searchsorted(sampled, end) + 1
    following = sampled[after.clamp(max=len(sampled) - 1)]
    is_followed = (
        (turn < len(turns))
        & (layout.token_episode[end] == episode)
        & (after < len(sampled))
        & (layout.token_episode[following] == episode)
    )
    later = torch.where(is_followed, returns[following], torch.zeros_like(returns[following]))
    return returns.index_add(0, sampled, -later)


class TurnTable:
    """Rewards of turns and sums of them, [num_episodes, most turns + 1] in float64.

    A row has the turns of an episode in order, 0 for turns that it did not have, and in the last column the part of its
    reward that belongs to no turn. A window is a range of columns, which a turn's tokens are credited with.
    """

    def __init__(self, layout: TokenLayout, rewards: Tensor, totals: Tensor, turn_rewards: Tensor, turns: Tensor):
        """`rewards` are without those of turns, `totals` with them: whole rows are not added up again."""
        episode = layout.token_episode[turns]
        self.num_turns = torch.bincount(episode, minlength=layout.num_episodes)  # [num_episodes]
        first_turn = self.num_turns.cumsum(0) - self.num_turns
        by_turn = rewards.new_zeros(layout.num_episodes, int(self.num_turns.max()) if len(turns) else 0).double()
        by_turn[episode, torch.arange(len(turns), device=turns.device) - first_turn[episode]] = turn_rewards.double()
        self.columns = torch.cat([by_turn, rewards.double().unsqueeze(1)], dim=1)
        self.totals = totals.double().unsqueeze(1)
        self.sampled, self.episode = sampled_steps(layout)  # [num_sampled] each
        self._turn = torch.searchsorted(turns, self.sampled) - first_turn[self.episode]  # [num_sampled]

    def windows(self, credit: TurnCredit, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the first and last column of each sampled token's window: [num_sampled] each.

        Tokens of one step of time have one window, with all turns of the step. The window of an episode's last turn
        extends to the last column: what siblings got in later turns is compared with the nothing that it got.
        """
        first = last = self._turn
        if starts is not None and len(first):
            step = starts[self.sampled].to(torch.int64).cumsum(0) - 1
            first, last = (
                torch.zeros_like(step).scatter_reduce(0, step, self._turn, how, include_self=False)[step]
                for how in ("amin", "amax")
            )
        end = self.columns.shape[1] - 1
        if credit == "to_go":
            return first, torch.full_like(last, end)
        final = torch.zeros_like(self.num_turns).scatter_reduce(0, self.episode, last, "amax")
        return first, torch.where(last == final[self.episode], end, last)

    def credits(
        self,
        compare: Callable[[Tensor], Tensor],
        clip: Callable[[Tensor], Tensor],
        *,
        clips_sums: bool,
        credit: TurnCredit,
        starts: Tensor | None,
    ) -> Tensor:
        """[num_sampled]: the sum over each token's window, compared with the same window of its siblings.

        `compare` takes [num_episodes, columns] and subtracts the baseline of each column. It gets sums, not their
        parts: equal sums have a credit of exactly 0, and a deviation is that of what it divides. `clip` is applied to
        the sums less their baselines, or to the rewards of turns less theirs (not `clips_sums`).
        """
        first, last = self.windows(credit, starts)
        width = self.columns.shape[1]
        windows, window = torch.unique(first * width + last, return_inverse=True)
        first, last = windows // width, windows % width
        is_whole = (first == 0) & (last == width - 1)
        parts = self.columns.abs().sum(1, keepdim=True)
        sums = without_rounding(_window_sums(self.columns, first, last), parts)
        sums = torch.where(is_whole, self.totals, sums)
        credits = compare(sums)  # [num_episodes, num_windows]
        if clips_sums:
            credits = clip(credits)
        else:
            credits = credits + _window_sums(self._excess(compare, clip), first, last).to(credits.dtype)
        return credits[self.episode, window]

    def _excess(self, compare: Callable[[Tensor], Tensor], clip: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what clipping adds to each column, 0 where it changes nothing.

        The turns that an episode did not have are clipped together with what belongs to no turn.
        """
        turn, num_turns = torch.arange(self.columns.shape[1], device=self.columns.device), self.num_turns.unsqueeze(1)
        parts = torch.where(turn < num_turns, compare(self.columns), 0.0)
        parts[:, -1:] = compare(_to_go(self.columns)).gather(1, num_turns)
        return (clip(parts) - parts).double()


def without_rounding(sums: Tensor, parts: Tensor) -> Tensor:
    """Return sums, exactly 0 where nothing but rounding is left: 0.1 + 0.2 − 0.3. `parts`: sums of magnitudes."""
    return torch.where(sums.abs() > parts * 2.0**-40, sums, 0.0)


def _to_go(columns: Tensor) -> Tensor:
    """Return each column added to all after it."""
    return columns.flip(1).cumsum(1).flip(1)


def _window_sums(columns: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Add up the columns from `first` to `last`, [num_windows] each: [rows, num_windows]."""
    to_go = functional.pad(_to_go(columns), (0, 1))
    return torch.where(first == last, columns[:, first], to_go[:, first] - to_go[:, last + 1])
