"""Leases: a device is passed on when its lease was ended; kept by the dead until their memory is seen free."""

from __future__ import annotations

import pytest

from hotseat.cluster import DeviceMemory, Holder, Leases
from hotseat.errors import DeadlineError

GIB = 1 << 30
ACTOR = Holder("actor", 0, pid=11, started=1)
ENGINE = Holder("rollout", 0, pid=22, started=2)
CRITIC = Holder("critic", 0, pid=33, started=3)


class FakeTime:
    """A clock that moves only while somebody waits; `then` holds what happens at which second."""

    def __init__(self):
        self.now = 100.0
        self.then: list[tuple[float, object]] = []

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.then if event[0] <= self.now]
        self.then = [event for event in self.then if event[0] > self.now]
        for _, act in due:
            act()


def make(**options) -> tuple[Leases, FakeTime]:
    fake = FakeTime()
    return Leases(clock=fake.clock, sleep=fake.sleep, poll_s=1.0, **options), fake


def holders(leases: Leases, device: int) -> tuple[Holder, ...]:
    return leases._devices[device].holders


def test_a_free_device_is_granted_at_once():
    leases, _ = make()
    lease = leases.acquire("rollout", {ENGINE: [0, 1]}, timeout_s=5)
    assert lease.devices == (0, 1)
    assert holders(leases, 0) == (ENGINE,)


def test_a_device_is_passed_on_when_its_lease_was_ended():
    leases, fake = make()
    first = leases.acquire("prepare", {ACTOR: [0], CRITIC: [0]}, timeout_s=5)
    fake.then = [(107.0, lambda: leases.end(first))]
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=60)
    assert fake.now == 107.0
    assert holders(leases, 0) == (ENGINE,)


def test_the_memory_is_measured_before_a_device_is_passed_on():
    measured: list[int] = []

    def measure(device: int) -> DeviceMemory:
        measured.append(device)
        return DeviceMemory(used=7 * GIB, total=80 * GIB)

    leases, _ = make(measure=measure)
    lease = leases.acquire("rollout", {ENGINE: [3]}, timeout_s=5)
    leases.end(lease)
    measured.clear()
    leases.acquire("update", {ACTOR: [3]}, timeout_s=5)
    assert measured == [3]


def test_a_wait_that_runs_out_names_holder_device_phase_and_since_when():
    leases, fake = make()
    leases.acquire("rollout", {ENGINE: [0, 1]}, timeout_s=5)
    fake.now += 12.5
    with pytest.raises(DeadlineError) as caught:
        leases.acquire("update", {ACTOR: [1]}, timeout_s=30)
    assert str(caught.value) == (
        "phase 'update' waited 30.0 s for device 1: held by rollout[0] (pid 22) for phase 'rollout' since 42.5 s ago"
    )


def test_a_dead_holder_keeps_the_device_until_its_process_is_gone_and_the_memory_free():
    gone: set[Holder] = set()
    used = {0: 1 * GIB}
    leases, fake = make(is_gone=gone.__contains__, measure=lambda device: DeviceMemory(used[device], 80 * GIB))
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    used[0] = 60 * GIB
    fake.then = [(110.0, lambda: gone.add(ENGINE)), (120.0, lambda: used.update({0: 1 * GIB}))]
    leases.acquire("update", {ACTOR: [0]}, timeout_s=60)
    assert fake.now == 120.0
    assert holders(leases, 0) == (ACTOR,)


def test_memory_that_a_dead_holder_left_behind_is_named():
    used = {0: 1 * GIB}
    leases, _ = make(is_gone=lambda holder: True, measure=lambda device: DeviceMemory(used[device]))
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    used[0] = 60 * GIB
    with pytest.raises(DeadlineError) as caught:
        leases.acquire("update", {ACTOR: [0]}, timeout_s=9)
    text = str(caught.value)
    assert "device 0: rollout[0] (pid 22), which held it for phase 'rollout' since 9.0 s ago, died" in text
    assert f"but {60 * GIB} bytes are in use; {GIB} were when the phase began" in text


def test_a_dead_holder_that_asks_again_gets_the_device_so_that_the_next_call_to_it_reports_the_death():
    gone: set[Holder] = set()
    leases, _ = make(is_gone=gone.__contains__)
    leases.acquire("update", {ACTOR: [0]}, timeout_s=5)
    gone.add(ACTOR)
    leases.acquire("sync", {ACTOR: [0], ENGINE: [0]}, timeout_s=5)
    assert holders(leases, 0) == (ACTOR, ENGINE)


def test_without_a_measurement_a_dead_holder_is_released_when_its_process_is_gone():
    gone: set[Holder] = set()
    leases, fake = make(is_gone=gone.__contains__)
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    fake.then = [(105.0, lambda: gone.add(ENGINE))]
    leases.acquire("update", {ACTOR: [0]}, timeout_s=60)
    assert fake.now == 105.0


def test_a_failing_measurement_does_not_block_the_queue():
    broken = [True]

    def measure(device: int) -> None:
        if broken[0]:
            raise OSError("no driver")

    leases, _ = make(measure=measure)
    with pytest.raises(OSError, match="no driver"):
        leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    broken[0] = False
    leases.acquire("update", {ACTOR: [0]}, timeout_s=5)


def test_nobody_is_asked_about_thousands_of_holders_whose_devices_cannot_be_measured():
    asked = []
    leases, _ = make(is_gone=lambda holder: bool(asked.append(holder)))
    ranks = {Holder("actor", rank, pid=rank, started=1, node=rank // 8): [rank] for rank in range(2048)}
    for phase in ("prepare", "update", "sync"):
        leases.end(leases.acquire(phase, ranks, timeout_s=5))
    assert asked == []
    assert holders(leases, 7) == ()
