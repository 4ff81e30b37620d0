"""The right to devices, held for a whole phase.

The driver asks for one lease after another, each for all devices of a phase on behalf of its holders (processes), and
ends it when they have given up what the next one needs. A holder that died keeps its devices until its process is seen
gone and the memory is seen free.

    leases = Leases(is_gone=..., measure=...)
    lease = leases.acquire("rollout", {engine: [0, 1]}, timeout_s=60)
    ...
    leases.end(lease)

Nothing here knows Ray or CUDA: the two callables return who is gone and how much memory a device has in use. Memory
counts as free, after a death, when the device holds no more than it did when the dead holder's phase got it, within
`SLACK_BYTES`; without a death, any measurement is enough.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hotseat.errors import DeadlineError

SLACK_BYTES = 64 << 20  # by which measurements of the same memory differ


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


@dataclass(frozen=True)
class Lease:
    """A phase's right to its devices, by holder."""

    phase: str
    holders: Mapping[Holder, tuple[int, ...]]

    @cached_property
    def devices(self) -> tuple[int, ...]:
        return tuple(sorted({device for devices in self.holders.values() for device in devices}))


@dataclass
class _Device:
    """The last lease of a device, and those of its holders that have not given the device up."""

    phase: str = ""
    holders: tuple[Holder, ...] = ()
    used_at_grant: int | None = None
    granted_s: float = 0.0


class Leases:
    """Grants leases on devices to phases; lives in the driver, which asks for each phase.

    `measure(device)` returns the memory in use there, or None where it cannot be measured. `is_gone(holder)` tells
    whether its process no longer exists.
    """

    def __init__(
        self,
        *,
        measure: Callable[[int], DeviceMemory | None] = lambda device: None,
        is_gone: Callable[[Holder], bool] = lambda holder: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        poll_s: float = 0.05,
    ):
        self._measure = measure
        self._is_gone = is_gone
        self._clock = clock
        self._sleep = sleep
        self._poll_s = poll_s
        self._devices: dict[int, _Device] = {}

    def acquire(self, phase: str, holders: Mapping[Holder, Iterable[int]], *, timeout_s: float) -> Lease:
        """Wait for every device of the phase."""
        lease = Lease(phase, {holder: tuple(devices) for holder, devices in holders.items()})
        assert lease.devices, f"phase {phase!r} asks for no device"
        asked_s = self._clock()
        while True:
            now_s, reasons, used = self._clock(), [], {}
            for device in lease.devices:
                reason, used[device] = self._look(device, now_s)
                reasons += [reason] if reason else []
            if not reasons:
                break
            waited_s = now_s - asked_s
            if waited_s >= timeout_s:
                raise DeadlineError(f"phase {phase!r} waited {waited_s:.1f} s for {'; '.join(reasons)}")
            self._sleep(min(timeout_s - waited_s, self._poll_s))
        on_it: dict[int, list[Holder]] = {device: [] for device in lease.devices}
        for holder, devices in lease.holders.items():
            for device in devices:
                on_it[device].append(holder)
        for device, its in on_it.items():
            self._devices[device] = _Device(phase, tuple(its), used[device], now_s)
        return lease

    def end(self, lease: Lease) -> None:
        """Take the devices back from all holders that live: they have given up what they do not need.

        Nobody is asked about holders of devices that cannot be measured, as those of other nodes: nothing follows from
        it, and each of thousands would be a call to its node.
        """
        for device in lease.devices:
            state = self._devices[device]
            is_measured = state.used_at_grant is not None
            state.holders = tuple(holder for holder in state.holders if is_measured and self._is_gone(holder))

    def forget_use(self, devices: Iterable[int]) -> None:
        """Forget earlier measurements after a dead holder was replaced: they do not say what is free now."""
        for device in devices:
            if device in self._devices:
                self._devices[device].used_at_grant = None

    def expect_use(self, num_bytes: Mapping[int, int]) -> None:
        """Expect more memory in use on devices: it came for the next phase before their holders left."""
        for device, more in num_bytes.items():
            state = self._devices.get(device)
            if state is not None and state.used_at_grant is not None:
                state.used_at_grant += more

    def _look(self, device: int, now_s: float) -> tuple[str, int | None]:
        """Return why a device cannot be passed on, or an empty text, and the bytes in use there."""
        state = self._devices.get(device) or _Device()
        if alive := [holder for holder in state.holders if not self._is_gone(holder)]:
            return f"device {device}: held by {_names(alive)} {_since(state, now_s)}", None
        memory = self._measure(device)
        used, before = None if memory is None else memory.used, state.used_at_grant
        if state.holders and used is not None and before is not None and used > before + SLACK_BYTES:
            reason = (
                f"device {device}: {_names(state.holders)}, which held it {_since(state, now_s)}, died, but {used}"
                f" bytes are in use; {before} were when the phase began"
            )
            return reason, used
        return "", used


def _since(state: _Device, now_s: float) -> str:
    return f"for phase {state.phase!r} since {now_s - state.granted_s:.1f} s ago"


def _names(holders: Iterable[Holder]) -> str:
    return ", ".join(map(str, holders))
