"""Leases: first come, first served; passed on after a report and a measurement; kept by the dead until seen gone."""

from __future__ import annotations

import threading
import time

import pytest
from cluster_workers import wait_until

from hotseat.cluster import DeviceMemory, Holder, LeaseError, Leases
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

    def wait(self, changed: threading.Condition, seconds: float) -> None:
        self.now += seconds
        due = [event for event in self.then if event[0] <= self.now]
        self.then = [event for event in self.then if event[0] > self.now]
        for _, act in due:
            changed.release()
            try:
                act()
            finally:
                changed.acquire()


def make(**options) -> tuple[Leases, FakeTime]:
    fake = FakeTime()
    return Leases(clock=fake.clock, wait=fake.wait, poll_s=1.0, **options), fake


def test_a_free_device_is_granted_at_once():
    leases, _ = make()
    lease = leases.acquire("rollout", {ENGINE: [0, 1]}, timeout_s=5)
    assert lease.devices == (0, 1)
    assert leases.holders(0) == (ENGINE,)


def test_a_device_is_passed_on_after_the_last_holder_reported():
    leases, fake = make()
    first = leases.acquire("prepare", {ACTOR: [0], CRITIC: [0]}, timeout_s=5)
    fake.then = [(102.0, lambda: first.report(ACTOR, 3 * GIB)), (107.0, lambda: first.report(CRITIC, {0: 2 * GIB}))]
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=60)
    assert fake.now == 107.0
    assert leases.holders(0) == (ENGINE,)


def test_the_memory_is_measured_before_a_device_is_passed_on():
    measured: list[int] = []

    def measure(device: int) -> DeviceMemory:
        measured.append(device)
        return DeviceMemory(used=7 * GIB, total=80 * GIB)

    leases, _ = make(measure=measure)
    lease = leases.acquire("rollout", {ENGINE: [3]}, timeout_s=5)
    lease.report(ENGINE, GIB)
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


def test_who_gave_up_waiting_is_not_in_the_way():
    leases, _ = make()
    first = leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    with pytest.raises(DeadlineError):
        leases.acquire("update", {ACTOR: [0]}, timeout_s=3)
    first.report(ENGINE)
    assert leases.acquire("prepare", {CRITIC: [0]}, timeout_s=5).phase == "prepare"


def test_a_dead_holder_keeps_the_device_until_its_process_is_gone_and_the_memory_free():
    gone: set[Holder] = set()
    used = {0: 1 * GIB}
    leases, fake = make(is_gone=gone.__contains__, measure=lambda device: DeviceMemory(used[device], 80 * GIB))
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    used[0] = 60 * GIB
    fake.then = [(110.0, lambda: gone.add(ENGINE)), (120.0, lambda: used.update({0: 1 * GIB}))]
    leases.acquire("update", {ACTOR: [0]}, timeout_s=60)
    assert fake.now == 120.0
    assert leases.holders(0) == (ACTOR,)


def test_memory_that_a_dead_holder_left_behind_is_named():
    used = {0: 1 * GIB}
    leases, _ = make(is_gone=lambda holder: True, measure=lambda device: DeviceMemory(used[device]))
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    used[0] = 60 * GIB
    with pytest.raises(DeadlineError) as caught:
        leases.acquire("update", {ACTOR: [0]}, timeout_s=9)
    text = str(caught.value)
    assert "rollout[0] (pid 22) of phase 'rollout' died" in text
    assert f"but {60 * GIB} bytes are in use; {GIB} were when it began" in text


def test_a_dead_holder_that_asks_again_gets_the_device_so_that_the_next_call_to_it_reports_the_death():
    gone: set[Holder] = set()
    leases, _ = make(is_gone=gone.__contains__)
    leases.acquire("update", {ACTOR: [0]}, timeout_s=5)
    gone.add(ACTOR)
    leases.acquire("sync", {ACTOR: [0], ENGINE: [0]}, timeout_s=5)
    assert leases.holders(0) == (ACTOR, ENGINE)


def test_without_a_measurement_a_dead_holder_is_released_when_its_process_is_gone():
    gone: set[Holder] = set()
    leases, fake = make(is_gone=gone.__contains__)
    leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5)
    fake.then = [(105.0, lambda: gone.add(ENGINE))]
    leases.acquire("update", {ACTOR: [0]}, timeout_s=60)
    assert fake.now == 105.0


def test_first_come_first_served_and_nobody_takes_half():
    """B waits for both devices; C asks later for the free one and has to wait for B, D shares none and need not."""
    leases = Leases(poll_s=0.01)
    first = leases.acquire("a", {ENGINE: [0]}, timeout_s=5)
    order: list[str] = []

    def take(phase: str, holder: Holder, devices: list[int]) -> threading.Thread:
        def run() -> None:
            lease = leases.acquire(phase, {holder: devices}, timeout_s=60)
            order.append(phase)
            lease.report(holder)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    def num_waiting() -> int:
        with leases._changed:
            return len(leases._queue)

    threads = [take("b", ACTOR, [0, 1])]
    wait_until(lambda: num_waiting() == 1)
    threads.append(take("c", CRITIC, [1]))
    wait_until(lambda: num_waiting() == 2)
    threads.append(take("d", Holder("env", 0), [2]))
    wait_until(lambda: order)
    time.sleep(0.1)
    assert order == ["d"]
    first.report(ENGINE)
    for thread in threads:
        thread.join(60)
    assert order == ["d", "b", "c"]


def test_the_error_of_a_late_lease_names_the_phase_before_it():
    leases, fake = make()
    leases.acquire("a", {ENGINE: [0]}, timeout_s=5)
    seen: list[str] = []

    def second() -> None:
        with pytest.raises(DeadlineError) as caught:
            leases.acquire("c", {CRITIC: [1]}, timeout_s=2)
        seen.append(str(caught.value))

    fake.then = [(103.0, second)]
    with pytest.raises(DeadlineError):
        leases.acquire("b", {ACTOR: [0, 1]}, timeout_s=30)
    assert seen == ["phase 'c' waited 2.0 s for device 1: phase 'b' asked 5.0 s ago and comes first"]


def test_a_lease_is_not_taken_twice():
    leases, _ = make()
    lease = leases.acquire("rollout", {ENGINE: [0, 1]}, timeout_s=5)
    with pytest.raises(
        LeaseError, match=r"rollout\[0\] \(pid 22\) asks for device 1 for phase 'sync' but already holds"
    ):
        leases.acquire("sync", {ENGINE: [1]}, timeout_s=5)
    lease.report(ENGINE)
    leases.acquire("sync", {ENGINE: [1]}, timeout_s=5)


def test_a_holder_that_waits_does_not_ask_again():
    leases, fake = make()
    leases.acquire("a", {ENGINE: [0]}, timeout_s=5)

    def again() -> None:
        with pytest.raises(LeaseError, match="already waits for"):
            leases.acquire("c", {ACTOR: [0]}, timeout_s=1)

    fake.then = [(102.0, again)]
    with pytest.raises(DeadlineError):
        leases.acquire("b", {ACTOR: [0]}, timeout_s=4)


def test_reports_that_do_not_fit_are_refused():
    leases, _ = make()
    lease = leases.acquire("rollout", {ENGINE: [0, 1]}, timeout_s=5)
    with pytest.raises(LeaseError, match=r"whose holders are rollout\[0\]"):
        lease.report(ACTOR)
    with pytest.raises(LeaseError, match="reports device 7 but holds devices 0, 1"):
        lease.report(ENGINE, {7: 1})
    with pytest.raises(LeaseError, match="report bytes for each"):
        lease.report(ENGINE, 5)
    lease.report(ENGINE, {0: 1, 1: 2})
    with pytest.raises(LeaseError, match="which it gave back before"):
        lease.report(ENGINE)
    with pytest.raises(LeaseError, match="asks for no device"):
        leases.acquire("idle", {ENGINE: []}, timeout_s=5)


def test_a_phase_that_ends_without_reports_is_an_error():
    leases, _ = make()
    ended = pytest.raises(LeaseError, match=r"phase 'rollout' ended, but rollout\[0\] \(pid 22\) did not report")
    with ended, leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5):
        pass


def test_after_an_error_the_devices_stay_with_their_holders():
    leases, _ = make()
    with pytest.raises(RuntimeError, match="boom"), leases.acquire("rollout", {ENGINE: [0]}, timeout_s=5):
        raise RuntimeError("boom")
    assert leases.holders(0) == (ENGINE,)
    with pytest.raises(DeadlineError, match="held by rollout"):
        leases.acquire("update", {ACTOR: [0]}, timeout_s=3)


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
