"""Several teachers in the processes of the reference role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hotseat.algorithms.distillation import Divergence
from hotseat.cluster.activity import activity
from hotseat.loop.devices.held_memory import device_of_process
from hotseat.loop.workers.by_sample import BySample, TeacherScores
from hotseat.loop.workers.cutting import BatchSettings, MicroBatcher
from hotseat.loop.workers.experience import Share, flatten, groups_of
from hotseat.loop.workers.model_workers import ModelWorker
from hotseat.model_source import ModelSource
from hotseat.placement.role_names import Part
from hotseat.planning.budgets import Use
from hotseat.train.backend import Backend, TrainOptions
from hotseat.train.make import make_backend


class TeachersWorker(ModelWorker):
    """One rank of several teachers: one at a time is on its device, the others are in host memory.

    weights: of each teacher's log-probs in the log-prob of every token, Σ w log π; they add up to 1. With the advantage
    Σ w log π_teacher − log π_old the policy descends Σ w KL(π ‖ π_teacher). None: a prompt's source names its teacher.
    """

    def __init__(self, models: Mapping[str, ModelSource], weights: Mapping[str, float] | None, options: TrainOptions):
        (first, model), *others = models.items()
        super().__init__(model, options)
        self._weights = weights
        self._backends: dict[str, Backend] = {first: self._backend}
        self._cutters = {first: self._cutter}
        self._present = first
        for name, model in others:
            self._backend.offload([Part.WEIGHTS])
            with activity.doing("loading weights"):
                self._backend = self._backends[name] = make_backend(model, options, device=device_of_process())
            self._cutter = self._cutters[name] = MicroBatcher(self._backend)
            self._present = name

    def score(self, shares: Sequence[Share], cut: BatchSettings, temperature: float) -> BySample:
        groups = groups_of(shares)
        total = BySample()
        for name in self._backends:
            self._turn_to(name)
            own = groups if self._weights is not None else [each for each in groups if each.prompt.source == name]
            weight = 1.0 if self._weights is None else self._weights[name]
            for sample, segments in self._score(flatten(own), cut, temperature).items():
                before = total.get(sample)
                parts = [weight * segment for segment in segments]
                total[sample] = (
                    parts if before is None else [one + more for one, more in zip(before, parts, strict=True)]
                )
        return total

    def teach(self, shares: Sequence[Share], cut: BatchSettings, temperature: float, how: Divergence) -> TeacherScores:
        assert self._weights is None, "distributions of several teachers are not mixed"
        groups, log_probs, fields = groups_of(shares), BySample(), dict[str, BySample]()
        for name in self._backends:
            self._turn_to(name)
            own = self._teach([each for each in groups if each.prompt.source == name], cut, temperature, how)
            log_probs.update(own)
            for field, values in own.fields.items():
                fields.setdefault(field, BySample()).update(values)
        return TeacherScores(log_probs, fields)

    def warm_up(self, max_length: int) -> None:
        for name in self._backends:
            self._turn_to(name)
            super().warm_up(max_length)

    def lowered(self) -> dict[Use, int]:
        """Return the smallest budget that any teacher lowered, by use."""
        each = [cutter.lowered(self._sequence_parallel_size) for cutter in self._cutters.values()]
        uses = {use for budgets in each for use in budgets}
        return {use: min(budgets[use] for budgets in each if use in budgets) for use in uses}

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()

    def _turn_to(self, name: str) -> None:
        if name == self._present:
            return
        self._backend.offload([Part.WEIGHTS])
        self._backend, self._cutter, self._present = self._backends[name], self._cutters[name], name
        self._backend.onload([Part.WEIGHTS])
