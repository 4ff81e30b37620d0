"""Custom components: they see the groups of a step between rollout and update, and may change them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from hotseat.cluster import WorkerGroup
from hotseat.loop.rl.groups import RolloutHosts, ShareOfRank
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.workers.component import ComponentWorker
from hotseat.loop.workers.group_facts import GroupFacts, GroupKey
from hotseat.types import GroupChange

Decisions = dict[str, dict[GroupKey, GroupChange]]  # of each component, about each group


class Components:
    """Shows groups to each component in turn, on its own devices, and carries out its decisions.

    groups: worker groups by component, in the order in which they work. evaluating: components that see evaluations.

    A component does not see groups that an earlier one dropped. Groups travel from hosts to components by reference;
    the driver sees decisions. These are kept when a rollout is repeated because an engine or a host died: hosts that
    survived hold changed rewards already, which a component must not change again. Groups of an evaluation have the
    same keys every time, so decisions about them are kept only until it has its metrics.
    """

    def __init__(
        self,
        groups: Mapping[str, WorkerGroup[ComponentWorker]],
        hosts: RolloutHosts,
        meter: PhaseMeter,
        evaluating: Collection[str] = (),
    ):
        self._groups = groups
        self._hosts = hosts
        self._meter = meter
        self._of_step: Decisions = {name: {} for name in groups}
        self._of_evaluation: Decisions = {name: {} for name in groups if name in evaluating}

    def change(self, facts: Sequence[GroupFacts], *, is_evaluation: bool = False) -> list[GroupFacts]:
        """Return the facts of groups after the decisions of all components, or of those that see evaluations.

        A component decides about a group once.
        """
        by_key = {each.key: each for each in facts}
        for name, decided in (self._of_evaluation if is_evaluation else self._of_step).items():
            keys = [key for key, each in by_key.items() if each.dropped_because is None and each.rewards]
            undecided = [key for key in keys if key not in decided]
            if undecided:
                with self._meter.lease("prepare", name):
                    decided |= self._decisions(self._groups[name], undecided)
            changes = {key: decided[key] for key in keys}
            self._hosts.change_rewards({key: each.rewards for key, each in changes.items() if each.rewards is not None})
            for key, change in changes.items():
                by_key[key] = _changed(by_key[key], name, change)
        return list(by_key.values())

    def metrics(self, *, is_evaluation: bool = False) -> dict[str, float]:
        """Return metrics of the step, or the evaluation, that ends now, and forget its decisions.

        These are the groups that each component saw and dropped, and the means of what it reports.
        """
        metrics = {}
        prefix = "eval/components" if is_evaluation else "components"
        for name, changes in (self._of_evaluation if is_evaluation else self._of_step).items():
            seen = changes.values()
            metrics[f"{prefix}/{name}/groups"] = float(len(seen))
            metrics[f"{prefix}/{name}/dropped"] = float(sum(change.drop is not None for change in seen))
            for key in sorted({key for change in seen for key in change.metrics}):
                values = [change.metrics[key] for change in seen if key in change.metrics]
                metrics[f"{prefix}/{name}/{key}"] = fmean(values)
            changes.clear()
        return metrics

    def _decisions(self, group: WorkerGroup[ComponentWorker], keys: Sequence[GroupKey]) -> dict[GroupKey, GroupChange]:
        mine = [keys[rank :: group.size] for rank in group.ranks]
        shares = self._hosts.shares([ShareOfRank(part, [()] * len(part)) for part in mine])
        answers = group.scatter(ComponentWorker.change, shares)
        return {
            key: change or GroupChange()
            for part, answer in zip(mine, answers, strict=True)
            for key, change in zip(part, answer, strict=True)
        }


def _changed(facts: GroupFacts, name: str, change: GroupChange) -> GroupFacts:
    if change.rewards is not None:
        rewards = tuple(change.rewards)
        facts = replace(facts, rewards=rewards, scores=rewards)
    return facts if change.drop is None else replace(facts, dropped_because=f"{name}: {change.drop}")
