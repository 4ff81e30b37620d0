"""Records the samples of a step: the fate of each in the ledger, and some of them in full for people to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotseat.config.schema import LogConfig
from hotseat.loop.rl.alarms import Alarms
from hotseat.loop.rl.collect import Collected
from hotseat.loop.rl.groups import Groups
from hotseat.loop.rl.ledger import Ledger
from hotseat.loop.rl.sample_records import ChosenSample, choose, failures, gaps, written
from hotseat.loop.rl.state import RlState
from hotseat.loop.workers.model_workers import ActorWorker
from hotseat.loop.workers.records import SampleRecord
from hotseat.observe import Journal

NUM_RECORDED = 200  # steps whose samples are recorded before recording becomes less frequent


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
