"""The right to a device, held for a whole phase.

A phase requests all its devices at once, on behalf of its holders (processes). It gets them when no earlier phase that
shares a device with it holds or waits for one: first come, first served, and no two phases can each hold half of what
the other needs. Each holder reports, device by device, how many bytes it freed. A device is passed on only when its
last holder has reported and its memory has been measured. A holder that died keeps the device until its process is seen
gone and the memory is seen free.

    leases = Leases(is_gone=..., measure=...)
    lease = leases.acquire("rollout", {engine: [0, 1]}, timeout_s=60)
    ...
    lease.report(engine, {0: 3 << 30, 1: 3 << 30})

Nothing here knows Ray or CUDA: the two callables return who is gone and how much memory a device has in use. Memory
counts as free, after a death, when the device holds no more than it did when the dead holder's phase got it, within
`slack_bytes`; without a death, any measurement is enough.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hotseat.errors import DeadlineError, RunError


class LeaseError(RunError):
    """A holder requested a lease that it holds already, or returned one that it does not hold."""


@dataclass(frozen=True)
class Holder:
    """A process that can hold a device. Pid and start time together name it: pids are used again."""

    group: str
    rank: int
    pid: int | None = None
    started: int | None = None
    node: int = 0

    def __str__(self) -> str:
        return f"{self.group}[{self.rank}]" + (f" (pid {self.pid})" if self.pid is not None else "")


@dataclass(frozen=True)
class DeviceMemory:
    """Memory that was measured on a device, in bytes."""

    used: int
    total: int | None = None


class Lease:
    """A phase's right to its devices. `Leases.acquire` makes it; it ends when every holder has reported."""

    def __init__(self, leases: Leases, phase: str, holders: Mapping[Holder, tuple[int, ...]]):
        self.phase = phase
        self.holders = holders
        self.devices = tuple(sorted({device for devices in holders.values() for device in devices}))
        self._leases = leases
        self._asked_at = 0.0

    def report(self, holder: Holder, bytes_given_up: Mapping[int, int] | int = 0) -> None:
        """Record the bytes that `holder` gave up: one number for its only device; none for a missing device."""
        self._leases._report(self, holder, bytes_given_up)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an error it is unknown what the holders still have: the devices stay theirs until they report or end.
        if kind is None and (silent := self._leases._silent(self)):
            raise LeaseError(
                f"phase {self.phase!r} ended, but {_names(silent)} did not report what they gave up;"
                " call lease.report(holder, bytes) for each before the phase ends"
            )


@dataclass
class _Device:
    lease: Lease | None = None  # who has it
    reported: dict[Holder, int] = field(default_factory=dict)
    died: list[Holder] = field(default_factory=list)
    last_report_s: float = 0.0
    used_at_grant: int | None = None
    granted_s: float = 0.0


class Leases:
    """Grants leases on devices to phases. Thread-safe; lives in the driver, which asks for each phase.

    `measure(device)` returns the memory in use there, or None where it cannot be measured. `is_gone(holder)` tells
    whether its process no longer exists; it is called only for holders that have not reported, while a phase waits, and
    for those that ask for a device again.
    """

    def __init__(
        self,
        *,
        measure: Callable[[int], DeviceMemory | None] = lambda device: None,
        is_gone: Callable[[Holder], bool] = lambda holder: False,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Condition, float], object] = lambda changed, seconds: changed.wait(seconds),
        poll_s: float = 0.05,
        slack_bytes: int = 64 << 20,
    ):
        self._measure = measure
        self._is_gone = is_gone
        self._clock = clock
        self._wait = wait
        self._poll_s = poll_s
        self._slack_bytes = slack_bytes
        self._devices: dict[int, _Device] = {}
        self._queue: list[Lease] = []
        self._changed = threading.Condition()

    def acquire(
        self,
        phase: str,
        holders: Mapping[Holder, Iterable[int]],
        *,
        timeout_s: float,
    ) -> Lease:
        """Wait for every device of the phase."""
        lease = Lease(self, phase, {holder: tuple(devices) for holder, devices in holders.items()})
        if not lease.devices:
            raise LeaseError(f"phase {phase!r} asks for no device")
        with self._changed:
            self._refuse_twice(lease)
            lease._asked_at = self._clock()
            self._queue.append(lease)
            try:
                while not self._try_grant(lease):
                    waited = self._clock() - lease._asked_at
                    if waited >= timeout_s:
                        raise DeadlineError(f"phase {phase!r} waited {waited:.1f} s for {self._why(lease)}")
                    self._wait(self._changed, min(timeout_s - waited, self._poll_s))
            finally:
                self._queue.remove(lease)
                self._changed.notify_all()
        return lease

    def forget_use(self, devices: Iterable[int]) -> None:
        """Forget earlier measurements after a dead holder was replaced: they do not say what is free now."""
        with self._changed:
            for device in devices:
                if device in self._devices:
                    self._devices[device].used_at_grant = None
            self._changed.notify_all()

    def expect_use(self, num_bytes: Mapping[int, int]) -> None:
        """Expect more memory in use on devices: it came for the next phase before their holders left."""
        with self._changed:
            for device, more in num_bytes.items():
                state = self._devices.get(device)
                if state is not None and state.used_at_grant is not None:
                    state.used_at_grant += more

    def holders(self, device: int) -> tuple[Holder, ...]:
        """Return who has the device now and has not reported it."""
        with self._changed:
            state = self._devices.get(device)
            return self._waited_for(device) if state and state.lease else ()

    # --- granting -------------------------------------------------------------------------------------------------

    def _refuse_twice(self, lease: Lease) -> None:
        """Raise if a holder has a device of this lease already, unless it is gone: nobody can report for it."""
        for other in [*self._queue, *{id(s.lease): s.lease for s in self._devices.values() if s.lease}.values()]:
            for holder in lease.holders:
                shared = [
                    device
                    for device in lease.holders[holder]
                    if device in other.holders.get(holder, ())
                    and (other in self._queue or (holder in self._waited_for(device) and not self._is_gone(holder)))
                ]
                if shared:
                    doing = "already waits for" if other in self._queue else "already holds"
                    raise LeaseError(
                        f"{holder} asks for {_devices(shared)} for phase {lease.phase!r} but {doing} it for phase"
                        f" {other.phase!r}; a lease is not taken twice: report it first"
                    )

    def _try_grant(self, lease: Lease) -> bool:
        earlier = self._queue[: self._queue.index(lease)]
        if any(set(other.devices) & set(lease.devices) for other in earlier):
            return False
        # No device is granted before all can be: devices of a half-granted phase would be idle.
        measured = {}
        for device in lease.devices:
            settled, measured[device] = self._settled(device)
            if not settled:
                return False
        now = self._clock()
        for device in lease.devices:
            memory = measured[device]
            self._devices[device] = _Device(lease, used_at_grant=memory.used if memory else None, granted_s=now)
        return True

    def _waited_for(self, device: int) -> tuple[Holder, ...]:
        state = self._devices[device]
        if state.lease is None:
            return ()
        return tuple(
            holder
            for holder, devices in state.lease.holders.items()
            if device in devices and holder not in state.reported and holder not in state.died
        )

    def _settled(self, device: int) -> tuple[bool, DeviceMemory | None]:
        """Tell whether the device can be passed on, and what was measured on it just now."""
        state = self._devices.setdefault(device, _Device())
        for holder in self._waited_for(device):
            if not self._is_gone(holder):
                return False, None
            state.died.append(holder)
            state.last_report_s = self._clock()
        memory = self._measure(device)
        if memory is None:
            return True, None
        if state.died and state.used_at_grant is not None:
            return memory.used <= state.used_at_grant + self._slack_bytes, memory
        return True, memory

    # --- giving back ----------------------------------------------------------------------------------------------

    def _report(self, lease: Lease, holder: Holder, bytes_given_up: Mapping[int, int] | int) -> None:
        with self._changed:
            if holder not in lease.holders:
                raise LeaseError(
                    f"{holder} reports to phase {lease.phase!r}, whose holders are {_names(lease.holders)}"
                )
            mine = lease.holders[holder]
            if not isinstance(bytes_given_up, Mapping):
                if len(mine) > 1 and bytes_given_up:
                    raise LeaseError(f"{holder} holds {_devices(mine)}: report bytes for each, as a mapping")
                bytes_given_up = dict.fromkeys(mine, bytes_given_up)
            if foreign := sorted(set(bytes_given_up) - set(mine)):
                raise LeaseError(f"{holder} reports {_devices(foreign)} but holds {_devices(mine)}")
            for device in mine:
                state = self._devices.get(device)
                if state is None or state.lease is not lease or holder in state.reported or holder in state.died:
                    raise LeaseError(
                        f"{holder} reports {_devices([device])} for phase {lease.phase!r}, which it gave back before"
                    )
            for device in mine:
                state = self._devices[device]
                state.reported[holder] = bytes_given_up.get(device, 0)
                state.last_report_s = self._clock()
            self._changed.notify_all()

    def _silent(self, lease: Lease) -> list[Holder]:
        with self._changed:
            held = [d for d in lease.devices if d in self._devices and self._devices[d].lease is lease]
            return list(dict.fromkeys(holder for device in held for holder in self._waited_for(device)))

    # --- saying why -----------------------------------------------------------------------------------------------

    def _why(self, lease: Lease) -> str:
        now, reasons = self._clock(), []
        earlier = self._queue[: self._queue.index(lease)]
        for device in lease.devices:
            state = self._devices.get(device) or _Device()
            before = [other for other in earlier if device in other.devices]
            if state.lease and (silent := self._waited_for(device)):
                reasons.append(
                    f"device {device}: held by {_names(silent)} for phase {state.lease.phase!r} since"
                    f" {now - state.granted_s:.1f} s ago"
                )
            elif before:
                first = before[0]
                reasons.append(
                    f"device {device}: phase {first.phase!r} asked {now - first._asked_at:.1f} s ago and comes first"
                )
            elif state.lease and not (settled := self._settled(device))[0] and settled[1]:
                memory = settled[1]
                reasons.append(
                    f"device {device}: {_names([*state.reported, *state.died])} of phase {state.lease.phase!r} died,"
                    f" having given up {sum(state.reported.values())} bytes, but {memory.used} bytes are in use;"
                    f" {state.used_at_grant} were when it began, {now - state.last_report_s:.1f} s later"
                )
        return "; ".join(reasons) or _devices(lease.devices)


def _names(holders: Iterable[Holder]) -> str:
    return ", ".join(str(holder) for holder in holders)


def _devices(devices: Iterable[int]) -> str:
    listed = sorted(devices)
    return f"device{'s' if len(listed) > 1 else ''} {', '.join(map(str, listed))}"
