"""The pacer: which groups may begin, and which make up the next batch, so that no sample is too old when it is learned.

A ticket stands for one group from the moment it may begin until it is trained or dropped. With P groups per step, a
staleness of S and a queue of q:

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
from dataclasses import dataclass, field, replace
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
class Ticket:
    """A group that was let in. `began`: the version that was served then; `place`: its position among the arrivals."""

    number: int
    began: int
    place: int | None = None  # None: still in flight


@dataclass(frozen=True)
class Awaited:
    """Tickets in flight without which there is no next batch."""

    numbers: tuple[int, ...]


@dataclass
class Pacer:
    """Lets tickets in, takes arrivals, and chooses batches. `version` counts the updates that are done."""

    pace: Pace
    version: int = 0
    tickets: dict[int, Ticket] = field(default_factory=dict)  # in flight or waiting, by number
    training: tuple[int, ...] = ()
    num_issued: int = 0
    num_trained: int = 0
    num_arrivals: int = 0

    @property
    def num_in_flight(self) -> int:
        """Return how many tickets have begun and have not arrived."""
        return sum(ticket.place is None for ticket in self.tickets.values())

    @property
    def num_waiting(self) -> int:
        """Return how many groups have arrived and are not in training yet."""
        return len(self.tickets) - self.num_in_flight

    @property
    def in_flight(self) -> list[int]:
        """Return the numbers of tickets in flight, in order."""
        return sorted(number for number, ticket in self.tickets.items() if ticket.place is None)

    def admit(self) -> list[int]:
        """Let in as many new tickets as may begin now, under the version that is served; return their numbers."""
        pace, held = self.pace, len(self.tickets)
        room = min(
            pace.groups_per_step * (1 + pace.staleness) - held - len(self.training),
            pace.groups_per_step * (1 + pace.queue) - held,
            pace.num_groups - self.num_trained - len(self.training) - held,
        )
        numbers = list(range(self.num_issued, self.num_issued + max(0, room)))
        self.tickets |= {number: Ticket(number, self.version) for number in numbers}
        self.num_issued += len(numbers)
        return numbers

    def begin_again(self, numbers: Sequence[int]) -> None:
        """Restart tickets in flight under the version that is served now: what was sampled of them is lost."""
        for number in numbers:
            assert self.tickets[number].place is None, f"ticket {number} has arrived"
            self.tickets[number] = Ticket(number, self.version)

    def arrive(self, number: int) -> None:
        """Record that a group is finished and may be learned from."""
        assert self.tickets[number].place is None, f"ticket {number} has arrived already"
        self.tickets[number] = replace(self.tickets[number], place=self.num_arrivals)
        self.num_arrivals += 1

    def drop(self, number: int) -> None:
        """Record that a group is finished and nothing is learned from it. Its place is free at once."""
        assert self.tickets[number].place is None, f"ticket {number} has arrived already"
        del self.tickets[number]

    def batch(self) -> tuple[int, ...] | Awaited:
        """Choose the groups of the next step among those that wait, or say which tickets have to arrive first."""
        return self._batch_in_order() if self.pace.order == "prompt" else self._batch_by_arrival()

    def take(self, numbers: Sequence[int]) -> None:
        """Put a batch into training."""
        assert not self.training, "a batch is in training already"
        assert all(self.tickets[number].place is not None for number in numbers)
        self.training = tuple(numbers)
        for number in numbers:
            del self.tickets[number]

    def trained(self) -> None:
        """Record the update with the batch in training: the next version is served from now on."""
        self.num_trained += len(self.training)
        self.training = ()
        self.version += 1

    def can_keep_bound(self) -> bool:
        """Tell whether every ticket can be trained in time, if those in flight begin again now."""
        began = [self.version if ticket.place is None else ticket.began for ticket in self.tickets.values()]
        num_batches = {version: version + self.pace.staleness - self.version + 1 for version in began}
        return all(
            sum(other <= version for other in began) <= self.pace.groups_per_step * num_batches[version]
            for version in began
        )

    def _batch_in_order(self) -> tuple[int, ...] | Awaited:
        first = [self.tickets[number] for number in sorted(self.tickets)[: self.pace.groups_per_step]]
        missing = [ticket.number for ticket in first if ticket.place is None]
        if missing or len(first) < self.pace.groups_per_step:
            return Awaited(tuple(missing))
        return tuple(ticket.number for ticket in first)

    def _batch_by_arrival(self) -> tuple[int, ...] | Awaited:
        """Choose the tickets that a later batch would train too late, oldest first, then the first arrivals."""
        pace = self.pace
        waiting = sorted((t for t in self.tickets.values() if t.place is not None), key=lambda t: t.place or 0)
        chosen: list[Ticket] = []
        for version in sorted({ticket.began for ticket in self.tickets.values()}):
            old = sum(ticket.began <= version for ticket in self.tickets.values())
            places_later = pace.groups_per_step * (version + pace.staleness - self.version)
            missing = old - places_later - sum(ticket.began <= version for ticket in chosen)
            candidates = [t for t in waiting if t.began <= version and t not in chosen]
            if missing > len(candidates):
                return Awaited(tuple(n for n in self.in_flight if self.tickets[n].began <= version))
            chosen += candidates[: max(0, missing)]
        rest = [ticket for ticket in waiting if ticket not in chosen]
        chosen += rest[: pace.groups_per_step - len(chosen)]
        if len(chosen) < pace.groups_per_step:
            return Awaited(tuple(self.in_flight))
        assert len(chosen) == pace.groups_per_step, "more tickets are due than a batch has places"
        return tuple(sorted(ticket.number for ticket in chosen))

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the pacer between two steps as JSON."""
        assert not self.training, "a batch is in training"
        return {
            "version": self.version,
            "tickets": [[ticket.number, ticket.began, ticket.place] for ticket in self.tickets.values()],
            "num_issued": self.num_issued,
            "num_trained": self.num_trained,
            "num_arrivals": self.num_arrivals,
        }

    @classmethod
    def restored(cls, pace: Pace, state: Mapping[str, Any]) -> Pacer:
        """Make the pacer that `state` described."""
        return cls(
            pace,
            int(state["version"]),
            {int(number): Ticket(number, began, place) for number, began, place in state["tickets"]},
            (),
            int(state["num_issued"]),
            int(state["num_trained"]),
            int(state["num_arrivals"]),
        )
