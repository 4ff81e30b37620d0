"""Turns on the devices: who puts what aside, who brings what back, and whose the lease is."""

import pytest

from hotseat.cluster.lease import Holder
from hotseat.config import loads
from hotseat.errors import DeadlineError, PlacementError
from hotseat.loop.planning import make_plan
from hotseat.loop.seats import Seats
from hotseat.types import Moved


class FakeGroup:
    """Records what it is asked; every part has 100 bytes."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size
        self.calls: list[tuple] = []

    def holders(self):
        return tuple(Holder(self.name, rank, pid=100 + rank) for rank in range(self.size))

    def call(self, method, *args, ranks, timeout_s):
        self.calls.append((method, *args, tuple(ranks)))
        return [Moved(100 * len(args[0]), 100, 1.0)]

    def taken(self):
        calls, self.calls = self.calls, []
        return calls


COLOCATED = """
cluster: {component_placement: {actor: 0, rollout: "@actor"}}
actor: {enable_offload: true}
rollout: {enable_offload: true}
"""


def make_seats(text: str, inventory: str, **options):
    plan = make_plan(loads(text), inventory)
    groups = {role.name: FakeGroup(role.name, len(role.processes)) for role in plan.roles}
    return Seats(plan, groups, timeout_s=5.0, **options), groups


def test_roles_that_always_leave_take_turns():
    seats, groups = make_seats(COLOCATED, "1x1")
    with seats.turn("rollout", "rollout"):
        pass
    # Everything starts on the device; the actor makes room for the rollout.
    assert groups["actor"].taken() == [("put_aside", ["weights", "gradients", "optimizer"], True, (0,))]
    assert groups["rollout"].taken() == []
    with seats.turn("update", "actor"):
        pass
    # The engine's weights come back by the next push: no copy is kept.
    assert groups["rollout"].taken() == [("put_aside", ["weights", "kv_cache"], False, (0,))]
    [(method, parts, ranks)] = groups["actor"].taken()
    assert (method, sorted(parts), ranks) == ("bring_back", ["gradients", "optimizer", "weights"], (0,))
    with seats.turn("sync", "actor"):
        pass
    assert groups["rollout"].taken() == [("bring_back", ["weights"], (0,))]
    assert sorted(groups["actor"].taken()[0][1]) == ["gradients", "optimizer"]
    with seats.turn("rollout", "rollout"):
        pass
    assert groups["actor"].taken() == [("put_aside", ["weights"], True, (0,))]
    assert groups["rollout"].taken() == [("bring_back", ["kv_cache"], (0,))]
    seats.close()


def test_where_all_fits_nothing_moves():
    seats, groups = make_seats("cluster: {component_placement: {actor: 0, rollout: '@actor'}}", "1x1")
    for phase, role in [("rollout", "rollout"), ("prepare", "actor"), ("update", "actor"), ("sync", "actor")] * 2:
        with seats.turn(phase, role):
            pass
    assert groups["actor"].calls == groups["rollout"].calls == []
    assert not seats.moves


def test_hand_overs_say_who_gave_up_how_much():
    seats, _ = make_seats(COLOCATED, "1x1")
    with seats.turn("rollout", "rollout"):
        pass
    with seats.turn("update", "actor"):
        pass
    first, second = seats.log()
    assert (first.from_phase, first.to_phase) == (None, "rollout")
    assert (second.from_phase, second.to_phase, second.bytes_given_up) == ("rollout", "update", 200)
    assert [(move.role, move.is_leaving) for move in seats.moves][:1] == [("actor", True)]


def test_only_the_ranks_that_share_a_device_move():
    text = """
cluster: {component_placement: {actor: 0-1, rollout: 1}}
rollout: {enable_offload: true}
actor: {enable_offload: true}
"""
    seats, groups = make_seats(text, "1x2")
    with seats.turn("rollout", "rollout"):
        pass
    assert [call[-1] for call in groups["actor"].taken()] == [(0,), (1,)]
    with seats.turn("update", "actor"):
        pass
    assert [call[-1] for call in groups["rollout"].taken()] == [(0,)]


def test_a_phase_that_the_flow_does_not_have_is_named():
    seats, _ = make_seats(COLOCATED, "1x1")
    found = "no phase 'prepare' in which reference works; it has rollout: rollout"
    with pytest.raises(PlacementError, match=found), seats.turn("prepare", "reference"):
        pass


def test_a_device_that_is_not_given_back_is_waited_for_and_the_holder_named():
    seats, _ = make_seats(COLOCATED, "1x1")
    seats._timeout_s = 0.2
    with seats.turn("rollout", "rollout"):
        pass
    seats._lease = None  # the holder never reports
    found = r"phase 'update' waited .* rollout\[0\]"
    with pytest.raises(DeadlineError, match=found), seats.turn("update", "actor"):
        pass
