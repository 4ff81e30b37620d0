"""The pacer: which groups may begin, and which make up the next batch, so that no sample is too old when it is learned.

A ticket, which is a number, stands for one group from the moment it may begin until it is trained or dropped. With P
groups per step, a staleness of S and a queue of q:

    in flight + waiting + in training <= P (1 + S)      no ticket can be pushed beyond its bound by those before it
    in flight + waiting               <= P (1 + q)      how far rollout runs ahead; q <= S

A ticket that began under version b has to be trained by the weights of version b + S or before. A batch of version v is
chosen so that the tickets left behind can all keep that bound: for every version s,

    tickets left that began under s or before  <=  P (s + S - v)

the places in the batches up to version s + S. Nothing is thrown away for age: both sides wait instead.

The pacer is pure: no clock, no thread, no I/O. `state` and `Pacer.restored` carry it through a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Order = Literal["prompt", "arrival"]


@dataclass(frozen=True)
class Pace:
    """The settings of a pacer. `num_groups`: those that the whole run learns from; no ticket begins beyond them."""

    groups_per_step: int
    staleness: int
    queue: int
    order: Order
    num_groups: int

    def __post_init__(self) -> None:
        assert self.groups_per_step >= 1
        assert 0 <= self.queue <= self.staleness


@dataclass(frozen=True)
class Awaited:
    """Tickets in flight without which there is no next batch, and how many of them have to arrive at least."""

    numbers: tuple[int, ...]
    at_least: int


@dataclass
class Pacer:
    """Lets tickets in, takes arrivals, and chooses batches. `version` counts the updates that are done.

    `in_flight` and `waiting` hold the version under which each ticket began: the tickets whose groups are in progress,
    in the order in which they were let in, and those whose groups are finished, in the order of their arrival.
    """

    pace: Pace
    version: int = 0
    in_flight: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    training: tuple[int, ...] = ()
    num_issued: int = 0
    num_trained: int = 0

    def admit(self) -> list[int]:
        """Let in as many new tickets as may begin now, under the version that is served; return them."""
        pace, held = self.pace, len(self.in_flight) + len(self.waiting)
        room = min(
            pace.groups_per_step * (1 + pace.staleness) - held - len(self.training),
            pace.groups_per_step * (1 + pace.queue) - held,
            pace.num_groups - self.num_trained - len(self.training) - held,
        )
        tickets = list(range(self.num_issued, self.num_issued + max(0, room)))
        self.in_flight |= dict.fromkeys(tickets, self.version)
        self.num_issued += len(tickets)
        return tickets

    def begin_again(self, tickets: Sequence[int]) -> None:
        """Restart tickets in flight under the version that is served now, without the samples that they have."""
        assert self.in_flight.keys() >= set(tickets)
        self.in_flight |= dict.fromkeys(tickets, self.version)

    def arrive(self, ticket: int) -> None:
        """Record that a group is finished and may be learned from."""
        self.waiting[ticket] = self.in_flight.pop(ticket)

    def drop(self, ticket: int) -> None:
        """Record that a group is finished and nothing is learned from it. Its place is free at once."""
        del self.in_flight[ticket]

    def batch(self) -> tuple[int, ...] | Awaited:
        """Choose the groups of the next step among those that wait, or say which tickets have to arrive first."""
        return self._batch_in_order() if self.pace.order == "prompt" else self._batch_by_arrival()

    def take(self, tickets: Sequence[int]) -> None:
        assert not self.training, "a batch is in training already"
        for ticket in tickets:
            del self.waiting[ticket]
        self.training = tuple(tickets)

    def trained(self) -> None:
        """Record the update with the batch in training: the next version is served from now on."""
        self.num_trained += len(self.training)
        self.training = ()
        self.version += 1

    def can_keep_bound(self) -> bool:
        """Tell whether every ticket can be trained in time, if those in flight begin again now."""
        began = [*self.waiting.values(), *[self.version] * len(self.in_flight)]
        return all(
            sum(other <= version for other in began) <= self._num_places(version, self.version) for version in {*began}
        )

    def _num_places(self, version: int, first: int) -> int:
        """Count places, from the batch of version `first` on, that may learn from what began under `version`."""
        return self.pace.groups_per_step * (version + self.pace.staleness - first + 1)

    def _batch_in_order(self) -> tuple[int, ...] | Awaited:
        first = sorted([*self.in_flight, *self.waiting])[: self.pace.groups_per_step]
        missing = tuple(ticket for ticket in first if ticket in self.in_flight)
        if missing or len(first) < self.pace.groups_per_step:
            return Awaited(missing, len(missing))
        return tuple(first)

    def _batch_by_arrival(self) -> tuple[int, ...] | Awaited:
        """Choose the tickets that a later batch would train too late, oldest first, then the first arrivals."""
        size = self.pace.groups_per_step
        if len(self.waiting) < size:
            return Awaited(tuple(self.in_flight), size - len(self.waiting))
        began = [*self.in_flight.values(), *self.waiting.values()]
        chosen: dict[int, None] = {}  # an ordered set
        for version in sorted({*began}):
            old = sum(other <= version for other in began)
            missing = old - self._num_places(version, self.version + 1) - len(chosen)  # chosen ones are as old
            if missing <= 0:
                continue
            candidates = [t for t, start in self.waiting.items() if start <= version and t not in chosen]
            if missing > len(candidates):
                due = tuple(t for t, start in self.in_flight.items() if start <= version)
                return Awaited(due, missing - len(candidates))
            chosen |= dict.fromkeys(candidates[:missing])
        rest = [ticket for ticket in self.waiting if ticket not in chosen]
        tickets = [*chosen, *rest[: size - len(chosen)]]
        assert len(tickets) == size, "more tickets are due than a batch has places"
        return tuple(sorted(tickets))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the pacer between two steps as JSON."""
        assert not self.training, "a batch is in training"
        return {
            "version": self.version,
            "in_flight": [[ticket, began] for ticket, began in self.in_flight.items()],
            "waiting": [[ticket, began] for ticket, began in self.waiting.items()],
            "num_issued": self.num_issued,
            "num_trained": self.num_trained,
        }

    @classmethod
    def restored(cls, pace: Pace, state: Mapping[str, Any]) -> Pacer:
        """Make the pacer that `state` described."""
        return cls(
            pace,
            state["version"],
            dict(state["in_flight"]),
            dict(state["waiting"]),
            num_issued=state["num_issued"],
            num_trained=state["num_trained"],
        )
