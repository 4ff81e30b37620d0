"""The pacer: bounds, deadlines, and that nobody waits for ever, over random schedules and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hotseat.loop.rl.pacer import Awaited, Order, Pace, Pacer


def pacer(per_step: int = 2, staleness: int = 1, queue: int = 1, order: Order = "prompt", steps: int = 10) -> Pacer:
    return Pacer(Pace(per_step, staleness, queue, order, per_step * steps))


def arrive(pacer: Pacer, numbers: Sequence[int]) -> None:
    for number in numbers:
        pacer.arrive(number)


def test_without_staleness_a_batch_is_let_in_after_the_one_before_it_was_trained() -> None:
    paced = pacer(staleness=0, queue=0)
    assert paced.admit() == [0, 1]
    arrive(paced, [1, 0])
    assert paced.batch() == (0, 1)
    paced.take((0, 1))
    assert paced.admit() == []
    paced.trained()
    assert paced.admit() == [2, 3]


def test_a_queue_shorter_than_the_staleness_lets_the_next_batch_in_when_training_takes_one() -> None:
    paced = pacer(staleness=1, queue=0)
    assert paced.admit() == [0, 1]
    arrive(paced, [0, 1])
    assert paced.admit() == []
    paced.take((0, 1))
    assert paced.admit() == [2, 3]
    assert paced.in_flight[2] == 0


def test_in_prompt_order_a_batch_waits_for_its_own_tickets() -> None:
    paced = pacer()
    assert paced.admit() == [0, 1, 2, 3]
    assert paced.batch() == Awaited((0, 1), at_least=2)
    arrive(paced, [1, 2, 3])
    assert paced.batch() == Awaited((0,), at_least=1)
    paced.arrive(0)
    assert paced.batch() == (0, 1)


def test_in_order_of_arrival_a_batch_is_made_of_the_first_that_came() -> None:
    paced = pacer(order="arrival")
    paced.admit()
    assert paced.batch() == Awaited((0, 1, 2, 3), at_least=2)
    arrive(paced, [3])
    assert paced.batch() == Awaited((0, 1, 2), at_least=1)
    arrive(paced, [1])
    assert paced.batch() == (1, 3)


def test_tickets_that_are_due_are_waited_for() -> None:
    paced = pacer(order="arrival")
    paced.admit()
    arrive(paced, [3, 1])
    paced.take((1, 3))
    assert paced.admit() == []  # four of four are in flight, waiting or in training
    paced.trained()
    assert paced.admit() == [4, 5]
    arrive(paced, [4, 5])
    # Version 1 is the last that may learn from what began under version 0.
    assert paced.batch() == Awaited((0, 2), at_least=2)
    arrive(paced, [2])
    assert paced.batch() == Awaited((0,), at_least=1)
    arrive(paced, [0])
    assert paced.batch() == (0, 2)


def test_a_dropped_group_is_replaced_by_the_next_prompt_at_once() -> None:
    paced = pacer(staleness=0, queue=0)
    paced.admit()
    paced.drop(0)
    assert paced.admit() == [2]
    arrive(paced, [1])
    assert paced.batch() == Awaited((2,), at_least=1)
    arrive(paced, [2])
    assert paced.batch() == (1, 2)


def test_no_ticket_begins_that_the_run_does_not_need() -> None:
    paced = pacer(staleness=4, queue=4, steps=2)
    assert paced.admit() == [0, 1, 2, 3]
    arrive(paced, [0, 1])
    paced.take((0, 1))
    paced.trained()
    assert paced.admit() == []


def test_a_ticket_that_begins_again_belongs_to_the_version_of_now() -> None:
    paced = pacer(order="arrival")
    paced.admit()
    arrive(paced, [0, 1])
    paced.take((0, 1))
    paced.trained()
    paced.begin_again([2])
    assert paced.in_flight[2] == 1
    assert paced.in_flight[3] == 0


def play(seed: int, num_steps: int = 12) -> Pacer:
    """Run a whole schedule: arrivals at random, updates that take random times, drops, deaths and resumes."""
    rng = random.Random(seed)
    per_step, staleness = rng.randint(1, 5), rng.randint(0, 4)
    order: Order = rng.choice(["prompt", "arrival"])
    pace = Pace(per_step, staleness, rng.randint(0, staleness), order, per_step * num_steps)
    paced = Pacer(pace)
    fates: dict[int, str] = {}
    num_drops = 0
    num_awaited = 0  # arrivals without which there is no batch
    chance_of_drop = rng.choice([0.0, 0.0, 0.3])
    while paced.version < num_steps:
        paced.admit()
        held = len(paced.in_flight) + len(paced.waiting)
        assert held + len(paced.training) <= per_step * (1 + staleness)
        assert held <= per_step * (1 + pace.queue)
        chosen = paced.batch() if not paced.training else None
        in_flight = list(paced.in_flight)
        is_ending = bool(paced.training) and (not in_flight or rng.random() < 0.3)
        if isinstance(chosen, Awaited):
            assert max(1, num_awaited) <= chosen.at_least <= len(chosen.numbers)
            num_awaited = chosen.at_least
        elif chosen is not None:
            assert num_awaited <= 0
        if is_ending:
            num_awaited = 0
            fates |= dict.fromkeys(paced.training, "trained")
            paced.trained()
        elif isinstance(chosen, tuple) and rng.random() < 0.7:
            assert len(chosen) == per_step
            assert all(paced.version - paced.waiting[number] <= staleness for number in chosen)
            assert not fates.keys() & set(chosen)
            paced.take(chosen)
        elif in_flight:
            if isinstance(chosen, Awaited):
                assert chosen.numbers
                assert set(chosen.numbers) <= set(in_flight)
            number = in_flight[int(rng.random() ** 2 * len(in_flight))]
            num_awaited -= 1
            if rng.random() < chance_of_drop:
                paced.drop(number)
                fates[number] = "dropped"
                num_drops += 1
            else:
                paced.arrive(number)
        else:
            assert isinstance(chosen, tuple), "nothing in flight, and no batch: stuck"
        if rng.random() < 0.02 and not paced.training:
            paced = Pacer.restored(pace, paced.state())
            paced.begin_again(list(paced.in_flight))
            num_awaited = 0
    assert paced.num_trained == per_step * num_steps
    assert not paced.in_flight
    assert not paced.waiting
    assert not paced.training
    assert len(fates) == paced.num_issued == paced.num_trained + num_drops
    return paced


def test_over_random_schedules_no_sample_is_too_old_none_is_lost_and_nobody_is_stuck() -> None:
    for seed in range(1_000):
        play(seed)


@pytest.mark.long
def test_over_a_hundred_thousand_random_schedules() -> None:
    for seed in range(100_000):
        play(seed)
