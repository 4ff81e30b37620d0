"""Seconds that episodes spend in the policy and outside of it, turn by turn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hotseat.types import EpisodeFacts

MAX_TURNS = 16  # of an episode that have metrics of their own


@dataclass(frozen=True)
class TurnTime:
    """Seconds of several samples in a turn. outside_s: before its request, in the agent, its tools, or a program."""

    num_samples: int = 0
    policy_s: float = 0.0
    outside_s: float = 0.0


@dataclass(frozen=True)
class TurnTimes:
    """Seconds of samples by the number of the turn, of later turns together, and after the last answer of each sample.

    Requests of an episode that overlap count in full as time in the policy, and with nothing as time outside.
    """

    turns: tuple[TurnTime, ...] = ()
    later: TurnTime = TurnTime()
    end: TurnTime = TurnTime()

    @classmethod
    def of(cls, episodes: Iterable[EpisodeFacts | None]) -> TurnTimes:
        turns: list[list[TurnTime]] = []
        ends: list[TurnTime] = []
        for facts in episodes:
            if facts is None or not facts.turns:
                continue
            answered_s = 0.0
            for at, turn in enumerate(sorted(facts.turns, key=lambda turn: turn.asked_s)):
                if at == len(turns):
                    turns.append([])
                outside_s = max(0.0, turn.asked_s - answered_s)
                turns[at].append(TurnTime(1, turn.answered_s - turn.asked_s, outside_s))
                answered_s = max(answered_s, turn.answered_s)
            ends.append(TurnTime(1, 0.0, max(0.0, facts.took_s - answered_s)))
        later = [time for each in turns[MAX_TURNS:] for time in each]
        return cls(tuple(map(_sum, turns[:MAX_TURNS])), _sum(later), _sum(ends))

    @property
    def every_turn(self) -> TurnTime:
        return _sum([*self.turns, self.later])


def turn_metrics(groups: Sequence[TurnTimes]) -> dict[str, float]:
    """Return means over turns, over the samples that have a turn of a number, and over episodes; none without turns."""
    every, end = _sum([times.every_turn for times in groups]), _sum([times.end for times in groups])
    if not every.num_samples:
        return {}
    metrics = {
        "turns/number": every.num_samples / end.num_samples,
        "turns/policy_s": every.policy_s / every.num_samples,
        "turns/outside_s": (every.outside_s + end.outside_s) / every.num_samples,
    }
    for at in range(max(len(times.turns) for times in groups)):
        turn = _sum([times.turns[at] for times in groups if at < len(times.turns)])
        metrics[f"turns/policy_s/{at + 1}"] = turn.policy_s / turn.num_samples
        metrics[f"turns/outside_s/{at + 1}"] = turn.outside_s / turn.num_samples
    return metrics | {"turns/outside_s/end": end.outside_s / end.num_samples}


def _sum(times: Sequence[TurnTime]) -> TurnTime:
    return TurnTime(
        sum(each.num_samples for each in times),
        sum(each.policy_s for each in times),
        sum(each.outside_s for each in times),
    )
