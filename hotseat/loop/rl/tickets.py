"""The groups that are sampled ahead of training: which may begin, how far each is, and what has come of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.errors import RunError
from hotseat.loop.rl.arrivals import Arrivals
from hotseat.loop.rl.collect import MAX_REFILLS, Collected, GroupFilter, add_rewards, too_few_kept
from hotseat.loop.rl.pacer import Awaited, Pace, Pacer
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey
from hotseat.rewards import RewardTally


@dataclass(frozen=True)
class _Arrival:
    """A finished group and its ticket. `reason`: why it was dropped; None: it was kept."""

    ticket: int
    facts: GroupFacts
    reason: str | None


class Tickets:
    """Connects the pacer's tickets with prompts and facts.

    next_keys: takes so many prompts in the order of the run. record: of what the choice of batches depends on.
    """

    def __init__(
        self,
        pace: Pace,
        group_filter: GroupFilter,
        next_keys: Callable[[int], list[GroupKey]],
        record: Arrivals,
    ):
        self.pacer = Pacer(pace)
        self._record = record
        self._filter = group_filter
        self._next_keys = next_keys
        self._tickets: dict[GroupKey, int] = {}  # in flight or waiting
        self._facts: dict[int, GroupFacts] = {}  # of those that wait
        self._unbegun: set[GroupKey] = set()  # no host works on them, as far as is known
        self._begun: set[GroupKey] = set()  # those that some host has begun, now or before
        self._arrivals: list[_Arrival] = []  # that belong to no batch yet
        self.num_begun_again = 0

    # --- in flight ----------------------------------------------------------------------------------------------------

    def admit(self) -> list[GroupKey]:
        """Let in what may begin; return all groups that a host has to begin now, those from before included."""
        tickets = self.pacer.admit()
        new = dict(zip(self._next_keys(len(tickets)), tickets, strict=True))
        self._tickets |= new
        self._unbegun |= new.keys()
        return [key for key in self._tickets if key in self._unbegun]

    def begin(self, taken: Iterable[GroupKey], sampled: Iterable[GroupKey]) -> None:
        """Record what a host has taken of that which `admit` returned: it samples some, and has the others already."""
        keys = list(sampled)
        self._record.begun(self.pacer.version, keys)
        self.pacer.begin_again([self._tickets[key] for key in keys])
        self.num_begun_again += sum(key in self._begun for key in keys)
        self._begun = {key for key in self._begun if key in self._tickets} | {*taken}
        self._unbegun -= {*taken}

    def begin_again(self) -> None:
        """Have `admit` return everything in flight: what hosts have lost of it begins again."""
        self._unbegun = {key for key, ticket in self._tickets.items() if ticket in self.pacer.in_flight}

    def arrive(self, groups: Sequence[GroupFacts]) -> None:
        """Keep or drop finished groups. Raises if too many rewards failed or too many groups were dropped."""
        if not groups:
            return
        judged = [(facts, self._filter.reason_to_drop(facts)) for facts in groups]
        self._record.arrived(judged)
        for facts, reason in judged:
            self._arrive(facts, reason)

    def _arrive(self, facts: GroupFacts, reason: str | None) -> None:
        ticket = self._tickets[facts.key]
        self._arrivals.append(_Arrival(ticket, facts, reason))
        if reason is None:
            self.pacer.arrive(ticket)
            self._facts[ticket] = facts
        else:
            self.pacer.drop(ticket)
            del self._tickets[facts.key]
        pace, arrivals = self.pacer.pace, self._arrivals
        if len(arrivals) >= pace.groups_per_step and any(each.facts.failures for each in arrivals):
            tally = RewardTally(self._filter.max_failed_fraction, self._filter.hint)
            for each in arrivals:
                add_rewards(tally, each.facts)
            tally.check()
        most = pace.groups_per_step * (1 + pace.staleness)
        reasons = [each.reason for each in arrivals if each.reason is not None]
        if len(reasons) >= MAX_REFILLS * most:
            raise too_few_kept(len(arrivals), len(self._facts), most, reasons)

    @property
    def num_awaited(self) -> int:
        """Return how many groups have to arrive at least before there is a batch; 0 if there is one."""
        awaited = self.pacer.batch()
        if not isinstance(awaited, Awaited):
            return 0
        assert awaited.numbers, "no batch, and nothing in flight that could make up one"
        return awaited.at_least

    @property
    def is_filtered(self) -> bool:
        return self._filter.low is not None or self._filter.high is not None

    # --- batches ------------------------------------------------------------------------------------------------------

    def take(self, step: int) -> Collected:
        """Put the batch of a step, which is complete, into training, and return it."""
        tickets = self.pacer.batch()
        assert not isinstance(tickets, Awaited), "the next batch is not complete"
        self.pacer.take(tickets)
        # In prompt order a group belongs to the step that its place in the order gives it, however early it came.
        last = max(tickets) if self.pacer.pace.order == "prompt" else math.inf
        batch = self._collected(tickets, [each for each in self._arrivals if each.ticket <= last])
        self._record.taken(step, batch)
        for facts in batch.groups:
            del self._facts[self._tickets.pop(facts.key)]
        self._arrivals = [each for each in self._arrivals if each.ticket > last]
        return batch

    def trained(self) -> None:
        """Record the update with the batch in training, whose weights are served from now on."""
        self.pacer.trained()
        self._record.trained(self.pacer.version)

    def unfinished(self) -> Collected:
        """Return the groups that no step has learned from."""
        return self._collected(sorted(self._facts), self._arrivals)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def finished_keys(self) -> list[GroupKey]:
        """Return the groups that a checkpoint has to hold: those that wait, and dropped ones not yet recorded."""
        dropped = (each.facts for each in self._arrivals if each.reason is not None)
        return [facts.key for facts in (*self._facts.values(), *dropped)]

    def state(self) -> dict[str, Any]:
        """Return the pacer, the prompts of its tickets, and arrivals since the last batch, as JSON."""
        return {
            "pacer": self.pacer.state(),
            "tickets": [[ticket, *key] for key, ticket in self._tickets.items()],
            "arrivals": [[*each.facts.key, each.reason, each.ticket] for each in self._arrivals],
        }

    def restore(self, state: Mapping[str, Any] | None, step: int, facts_of: Callable[[GroupKey], GroupFacts]) -> None:
        """Continue after `step`: groups that waited wait again, those in flight begin again. None: there are none."""
        self._record.restored(step, state)
        pace = self.pacer.pace
        num_trained = step * pace.groups_per_step
        self._tickets, self._facts, self._arrivals = {}, {}, []
        self._unbegun, self._begun = set(), set()
        if state is None:
            self.pacer = replace(Pacer(pace), version=step, num_trained=num_trained)
            return
        self.pacer = replace(Pacer.restored(pace, state["pacer"]), num_trained=num_trained)
        if not self.pacer.can_keep_bound():
            raise RunError(
                f"the checkpoint has {len(state['tickets'])} groups that were sampled ahead of training, more or older"
                f" ones than overlap.staleness {pace.staleness} and rollout.batch_size {pace.groups_per_step} allow:"
                " resume with those that it was saved with"
            )
        self._tickets = {(epoch, prompt): ticket for ticket, epoch, prompt in state["tickets"]}
        self._facts = {t: facts_of(key) for key, t in self._tickets.items() if t in self.pacer.waiting}
        for epoch, prompt, reason, ticket in state["arrivals"]:
            self._arrivals.append(_Arrival(ticket, facts_of((epoch, prompt)), reason))
        self.begin_again()
        self._begun = set(self._unbegun)

    def _collected(self, tickets: Iterable[int], arrivals: Sequence[_Arrival]) -> Collected:
        groups = tuple(self._facts[ticket] for ticket in tickets)
        dropped = tuple((each.facts, each.reason) for each in arrivals if each.reason is not None)
        return Collected(groups, len(arrivals), dropped, sum(len(each.facts.failures) for each in arrivals))
