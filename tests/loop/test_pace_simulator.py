"""Predicted times of steps, worked by hand."""

import pytest

from hotseat.loop.rl.pace_simulator import step_times
from hotseat.loop.rl.pacer import Pace


def test_without_overlap_a_step_is_its_slowest_group_and_its_training():
    pace = Pace(groups_per_step=2, staleness=0, queue=0, order="prompt", num_groups=6)
    assert step_times(pace, [1, 3, 2, 2, 5, 1], num_places=2, training_s=10) == [13, 25, 40]


def test_a_group_without_a_place_begins_after_another():
    pace = Pace(groups_per_step=2, staleness=0, queue=0, order="prompt", num_groups=2)
    assert step_times(pace, [1, 3], num_places=1, training_s=10) == [14]


def test_one_step_off_the_next_batch_is_sampled_during_training():
    pace = Pace(groups_per_step=2, staleness=1, queue=0, order="prompt", num_groups=6)
    # The first batch is there at 3, trained until 13. The second began at 3, is there at 5, and waits.
    assert step_times(pace, [1, 3, 2, 2, 15, 1], num_places=2, training_s=10) == [13, 23, 38]


def test_by_arrival_a_slow_group_holds_up_no_batch_before_it_is_due():
    durations = [1, 9, 1, 1, 1, 1, 1, 1]
    by_arrival = Pace(groups_per_step=2, staleness=1, queue=1, order="arrival", num_groups=8)
    in_order = Pace(groups_per_step=2, staleness=1, queue=1, order="prompt", num_groups=8)
    # Tickets 0 and 2 make up the first batch at 1; 1 and 3 are due in the second, and 1 is there at 9.
    assert step_times(by_arrival, durations, num_places=4, training_s=2) == [3, 11, 13, 15]
    assert step_times(in_order, durations, num_places=4, training_s=2) == [11, 13, 15, 17]


@pytest.mark.parametrize("order", ["prompt", "arrival"])
def test_a_push_that_waits_is_not_faster(order):
    pace = Pace(groups_per_step=2, staleness=2, queue=2, order=order, num_groups=40)
    durations = [1 + number * 7 % 11 for number in range(40)]
    waits = step_times(pace, durations, num_places=4, training_s=3, waits=True)
    goes_on = step_times(pace, durations, num_places=4, training_s=3)
    assert waits[-1] >= goes_on[-1]
