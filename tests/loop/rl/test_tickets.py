"""Tickets: what a host has lost begins again under the version that is served then, and its age counts from there."""

import pytest
from phase_fakes import FakeArrivals, facts_of

from hotseat.loop.rl.collect import GroupFilter
from hotseat.loop.rl.pacer import Awaited, Pace
from hotseat.loop.rl.tickets import Tickets


@pytest.fixture
def tickets():
    """Two groups a step, staleness 1: four begin under version 0, two are trained, and version 1 is served."""
    prompts = iter(range(100))
    pace = Pace(groups_per_step=2, staleness=1, queue=1, order="arrival", num_groups=8)
    keep_all = GroupFilter(min_samples=1, low=None, high=None, max_failed_fraction=1.0)
    made = Tickets(pace, keep_all, lambda count: [(0, next(prompts)) for _ in range(count)], FakeArrivals())
    begin(made)
    arrive(made, 2, 3)
    made.take(1)
    made.trained()
    return made


def begin(tickets: Tickets) -> None:
    """Have a host take and sample everything."""
    jobs = tickets.admit()
    tickets.begin(jobs, jobs)


def arrive(tickets: Tickets, *prompts: int) -> None:
    tickets.arrive([facts_of((0, prompt), [1.0, 0.0]) for prompt in prompts])


def test_groups_that_went_on_have_to_be_in_the_next_batch(tickets):
    begin(tickets)
    arrive(tickets, 4, 5)
    assert tickets.pacer.batch() == Awaited((0, 1), at_least=2)
    assert tickets.num_awaited == 2


def test_groups_that_were_begun_again_may_come_later(tickets):
    tickets.begin_again()
    jobs = tickets.admit()
    assert jobs == [(0, 0), (0, 1), (0, 4), (0, 5)]
    tickets.begin(jobs, jobs)
    assert set(tickets.pacer.in_flight.values()) == {1}
    assert tickets.num_begun_again == 2
    arrive(tickets, 4, 5)
    assert tickets.pacer.batch() == (4, 5)


def test_what_a_host_has_finished_meanwhile_is_as_old_as_it_was(tickets):
    tickets.begin_again()
    jobs = tickets.admit()
    tickets.begin(jobs, [key for key in jobs if key != (0, 1)])
    assert tickets.pacer.in_flight == {0: 1, 1: 0, 4: 1, 5: 1}
    assert tickets.num_begun_again == 1
    tickets.begin_again()
    tickets.begin(tickets.admit(), [])  # they are all in progress
    assert tickets.num_begun_again == 1


def test_what_no_host_has_taken_is_to_be_begun_still(tickets):
    tickets.begin_again()
    tickets.admit()
    tickets.begin([(0, 0), (0, 4)], [(0, 4)])  # the other host died
    assert tickets.admit() == [(0, 1), (0, 5)]
    tickets.begin([(0, 1), (0, 5)], [(0, 1), (0, 5)])
    assert tickets.admit() == []
    assert tickets.num_begun_again == 1  # (0, 1); hosts begin the last two for the first time
