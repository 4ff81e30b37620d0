"""Predicted times of steps, worked by hand."""

import pytest

from hotseat.loop.rl.forecast import GroupCost, step_times
from hotseat.loop.rl.pacer import Pace


def costs(*seconds):
    """Groups of one episode each."""
    return [GroupCost((each,)) for each in seconds]


def test_without_overlap_a_step_is_its_slowest_group_and_its_training():
    pace = Pace(groups_per_step=2, staleness=0, queue=0, order="prompt", num_groups=6)
    assert step_times(pace, costs(1, 3, 2, 2, 5, 1), num_places=2, training_s=10) == [13, 25, 40]


def test_a_group_without_a_place_begins_after_another():
    pace = Pace(groups_per_step=2, staleness=0, queue=0, order="prompt", num_groups=2)
    assert step_times(pace, costs(1, 3), num_places=1, training_s=10) == [14]


def test_one_step_off_the_next_batch_is_sampled_during_training():
    pace = Pace(groups_per_step=2, staleness=1, queue=0, order="prompt", num_groups=6)
    # The first batch is there at 3, trained until 13. The second began at 3, is there at 5, and waits.
    assert step_times(pace, costs(1, 3, 2, 2, 15, 1), num_places=2, training_s=10) == [13, 23, 38]


def test_by_arrival_a_slow_group_holds_up_no_batch_before_it_is_due():
    groups = costs(1, 9, 1, 1, 1, 1, 1, 1)
    by_arrival = Pace(groups_per_step=2, staleness=1, queue=1, order="arrival", num_groups=8)
    in_order = Pace(groups_per_step=2, staleness=1, queue=1, order="prompt", num_groups=8)
    # Tickets 0 and 2 make up the first batch at 1; 1 and 3 are due in the second, and 1 is there at 9.
    assert step_times(by_arrival, groups, num_places=4, training_s=2) == [3, 11, 13, 15]
    assert step_times(in_order, groups, num_places=4, training_s=2) == [11, 13, 15, 17]


@pytest.mark.parametrize("order", ["prompt", "arrival"])
def test_a_push_that_waits_is_not_faster(order):
    pace = Pace(groups_per_step=2, staleness=2, queue=2, order=order, num_groups=40)
    groups = costs(*(1 + number * 7 % 11 for number in range(40)))
    waits = step_times(pace, groups, num_places=4, training_s=3, waits=True)
    goes_on = step_times(pace, groups, num_places=4, training_s=3)
    assert waits[-1] >= goes_on[-1]


def test_a_group_arrives_after_its_slowest_episode_and_its_rewards():
    pace = Pace(groups_per_step=1, staleness=0, queue=0, order="prompt", num_groups=2)
    groups = [GroupCost((2, 5, 4), scoring_s=1), GroupCost((3, 3, 3))]
    assert step_times(pace, groups, num_places=3, training_s=10) == [16, 29]
    # On two places the third episode begins at 2 and ends at 6; then all of the second group on two.
    assert step_times(pace, groups, num_places=2, training_s=10) == [17, 33]


def test_the_next_group_replaces_a_dropped_one_at_once():
    pace = Pace(groups_per_step=2, staleness=0, queue=0, order="prompt", num_groups=2)
    groups = [GroupCost((4,)), GroupCost((1,), is_dropped=True), GroupCost((2,))]
    assert step_times(pace, groups, num_places=2, training_s=10) == [14]


def test_on_shared_devices_an_open_group_stands_still_during_training():
    pace = Pace(groups_per_step=1, staleness=1, queue=1, order="arrival", num_groups=3)
    # Ticket 0 takes 1 and is trained until 11. Ticket 1 has 6 of its 7 left then, is due next, and trained until 27.
    # Ticket 2 has been there since 13.
    assert step_times(pace, costs(1, 7, 2), num_places=2, training_s=10, is_shared=True) == [11, 27, 37]
    beside = Pace(groups_per_step=1, staleness=0, queue=0, order="prompt", num_groups=3)
    assert step_times(beside, costs(1, 7, 2), num_places=2, training_s=10, is_shared=True) == [11, 28, 40]
