"""Records the samples of a step: the fate of each in the ledger, and some of them in full for people to read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotseat.config.schema.record_options import LogConfig
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.state import RlState
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.records import NO_GRADIENT, SampleRecord, TokenRecord
from hotseat.observe import Journal
from hotseat.types import SampleKey

if TYPE_CHECKING:
    from hotseat.loop.rl.step_metrics import Alarms
    from hotseat.loop.workers.group_facts import GroupFacts

NUM_RECORDED = 200  # steps whose samples are recorded before recording becomes less frequent


@dataclass(frozen=True)
class ChosenSample:
    """A sample to be recorded, and its fate."""

    key: SampleKey
    state: str  # trained or dropped
    reason: str = ""


def choose(collected: Collected, step: int, count: int) -> list[ChosenSample]:
    """Choose up to `count` samples that are learned from and `count` that were dropped, from all over the step."""
    kept = [ChosenSample(key, "trained") for key in _spread_out(collected.groups, step, count)]
    reasons = {facts.key: reason for facts, reason in collected.dropped}
    keys = _spread_out([facts for facts, _ in collected.dropped], step, count)
    return kept + [ChosenSample(key, "dropped", reasons[key.epoch, key.prompt]) for key in keys]


def _spread_out(groups: Sequence[GroupFacts], step: int, count: int) -> list[SampleKey]:
    """Return a sample each of `count` groups at equal distances; the position in the group changes with the step."""
    groups = [facts for facts in groups if facts.samples]
    picked = [groups[index * len(groups) // count] for index in range(count)] if groups else []
    keys = [
        SampleKey(facts.epoch, facts.prompt, facts.samples[(step + index) % len(facts.samples)])
        for index, facts in enumerate(picked)
    ]
    return list(dict.fromkeys(keys))


def failures(collected: Collected, step: int, count: int) -> list[dict[str, Any]]:
    """Return lines for the first samples that failed."""
    failed_samples = [(facts, sample, why) for facts in collected.all_groups for sample, why in facts.failures]
    return [
        {
            **_named(step, SampleKey(facts.epoch, facts.prompt, sample), facts.source, "failed", why),
            "reward": None,
            "segments": [],
        }
        for facts, sample, why in failed_samples[:count]
    ]


def written(
    step: int, chosen: ChosenSample, record: SampleRecord, tokens: Sequence[TokenRecord] | None
) -> dict[str, Any]:
    """Return a line of `samples.jsonl`. `tokens`: a record per segment; None if the trainer did not get the sample."""
    segments = [
        _segment(segment, None if tokens is None else tokens[index]) for index, segment in enumerate(record["segments"])
    ]
    return {
        **_named(step, chosen.key, record["source"], chosen.state, chosen.reason),
        **record,
        "segments": segments,
    }


def _named(step: int, key: SampleKey, source: str, state: str, reason: str) -> dict[str, Any]:
    return {"step": step, **vars(key), "source": source, "state": state, "reason": reason}


def _segment(segment: dict[str, list[Any]], tokens: TokenRecord | None) -> dict[str, Any]:
    count = len(segment["text"])
    nothing: list[None] = [None] * count
    fates = nothing if tokens is None else tokens.fates or [NO_GRADIENT] * count

    def sampled(values: Sequence[Any]) -> list[Any]:
        rounded = (round(value, 5) if isinstance(value, float) else value for value in values)
        return [value if is_mine else None for value, is_mine in zip(rounded, segment["sampled"], strict=True)]

    return {
        "text": segment["text"],
        "sampled": segment["sampled"],
        "engine_log_probs": sampled(segment["engine_log_probs"]),
        "trainer_log_probs": sampled(nothing if tokens is None else tokens.trainer_log_probs),
        "advantages": sampled(nothing if tokens is None else tokens.advantages),
        "fates": sampled(fates),
        "versions": sampled(segment["versions"]),
    }


def gaps(samples: Iterable[tuple[SampleRecord, Sequence[TokenRecord] | None]]) -> list[float]:
    """Return |engine log-prob - trainer log-prob| of every sampled token that has both."""
    return [
        abs(engine - trainer)
        for record, tokens in samples
        for segment, mine in zip(record["segments"], tokens or (), strict=False)
        for is_sampled, engine, trainer in zip(
            segment["sampled"], segment["engine_log_probs"], mine.trainer_log_probs, strict=True
        )
        if is_sampled and engine is not None
    ]


@dataclass(eq=False)
class SampleLog:
    """Chooses samples before their groups are dropped, and records them when the step is done."""

    groups: Groups
    ledger: Ledger
    alarms: Alarms
    state: RlState
    journal: Journal
    log: LogConfig
    _chosen: list[tuple[ChosenSample, SampleRecord]] = field(default_factory=list, init=False)  # of the step under way

    @property
    def ids_in_training(self) -> list[str]:
        """Return the ids of chosen samples that are learned from: the actor records their tokens."""
        return [str(chosen.key) for chosen, _ in self._chosen if chosen.state == "trained"]

    def choose(self, step: int, batch: Collected) -> None:
        """Choose samples of a batch, and fetch their records from the hosts."""
        self._chosen = []
        if self._is_due(step):
            chosen = choose(batch, step, self.log.samples_per_step)
            records = self.groups.hosts.sample_records([each.key for each in chosen])
            self._chosen = list(zip(chosen, records, strict=True))

    def record(self, step: int, batch: Collected, metrics: Mapping[str, float]) -> None:
        """Record a step that is done and whose weights were pushed; warn of anything unusual."""
        self.ledger.record(step, self.state.version - 1, batch)
        self.alarms.look(step, metrics, batch)
        distributions: dict[str, list[float]] = {
            "reward": [reward for facts in batch.groups for reward in facts.rewards],
            "length": [length for facts in batch.groups for length in facts.num_sampled],
        }
        if self._is_due(step):
            tokens = {
                name: record for rank in self.groups.actor.call(ActorWorker.recorded) for name, record in rank.items()
            }
            lines = [written(step, chosen, record, tokens.get(str(chosen.key))) for chosen, record in self._chosen]
            lines += failures(batch, step, self.log.samples_per_step)
            self.journal.samples(lines)
            distributions["engine_gap"] = gaps((record, tokens.get(str(each.key))) for each, record in self._chosen)
        self.journal.distributions(step, distributions)

    def record_unfinished(self, step: int, batch: Collected) -> None:
        """Record the samples of a step in which the run stops, so that the ledger says which failed, and why."""
        self.ledger.record(step, self.state.version, batch, is_trained=False)
        self.journal.samples(failures(batch, step, self.log.samples_per_step))

    def record_left_over(self, step: int, num_passes: int, group_size: int) -> None:
        """Record the prompts of the last pass that were too few for another step after `step`, the last one."""
        self.ledger.record_left_over(step, self.state.order.left_over(num_passes), group_size)

    def _is_due(self, step: int) -> bool:
        """Tell whether samples of this step are recorded.

        Recording is half as frequent each time the run has become twice as long: the file grows slower than the run.
        """
        every = self.log.samples_every << (step // (NUM_RECORDED * self.log.samples_every)).bit_length()
        return self.log.samples_per_step > 0 and (step == 1 or step % every == 0)
