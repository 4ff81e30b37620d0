"""Seconds of turns in the policy and outside of it, worked by hand."""

import pytest

from hotseat.loop.workers.turn_times import MAX_TURNS, TurnTime, TurnTimes, turn_metrics
from hotseat.types import EpisodeFacts, TurnFacts


def test_seconds_in_the_policy_and_outside_are_counted_turn_by_turn():
    two = EpisodeFacts((TurnFacts(1.0, 3.0), TurnFacts(3.5, 4.0)), took_s=6.0)
    one = EpisodeFacts((TurnFacts(2.0, 2.25),), took_s=2.5)
    metrics = turn_metrics([TurnTimes.of([two, None]), TurnTimes(), TurnTimes.of([one])])
    assert metrics == pytest.approx(
        {
            "turns/number": 1.5,
            "turns/policy_s": (2.0 + 0.5 + 0.25) / 3,
            "turns/outside_s": (1.0 + 0.5 + 2.0 + 2.0 + 0.25) / 3,
            "turns/policy_s/1": (2.0 + 0.25) / 2,
            "turns/outside_s/1": (1.0 + 2.0) / 2,
            "turns/policy_s/2": 0.5,
            "turns/outside_s/2": 0.5,
            "turns/outside_s/end": (2.0 + 0.25) / 2,
        }
    )


def test_requests_that_overlap_have_no_time_outside():
    # In the order of segments, not of time; the third was asked for after the first and before the second answer.
    facts = EpisodeFacts((TurnFacts(2.0, 5.0), TurnFacts(0.5, 2.0), TurnFacts(2.5, 3.0)), took_s=5.0)
    times = TurnTimes.of([facts])
    assert times.turns == (TurnTime(1, 1.5, 0.5), TurnTime(1, 3.0, 0.0), TurnTime(1, 0.5, 0.0))
    assert times.end == TurnTime(1, 0.0, 0.0)


def test_turns_after_many_are_counted_together():
    facts = EpisodeFacts(tuple(TurnFacts(at + 0.25, at + 1.0) for at in range(MAX_TURNS + 2)), took_s=MAX_TURNS + 2.0)
    times = TurnTimes.of([facts])
    assert len(times.turns) == MAX_TURNS
    assert times.later == TurnTime(2, 1.5, 0.5)
    assert times.every_turn == TurnTime(MAX_TURNS + 2, 0.75 * (MAX_TURNS + 2), 0.25 * (MAX_TURNS + 2))


def test_without_turns_there_are_no_metrics():
    assert turn_metrics([]) == turn_metrics([TurnTimes.of([None, EpisodeFacts()])]) == {}
