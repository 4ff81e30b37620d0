"""What ranks tell each other about an update, added up by hand."""

from __future__ import annotations

import math

import torch

from hotseat.train.update_facts import UpdateFacts, add_up, sum_metrics
from hotseat.types import MicroBatch


def batch(sample: str, mask: list[bool]) -> MicroBatch:
    return MicroBatch.from_segments([torch.zeros(len(mask), dtype=torch.int64)], [torch.tensor(mask)], [sample])


def test_metrics_are_summed_vectors_entry_by_entry_and_maxima_kept() -> None:
    metrics = [
        {"clipped": torch.tensor(1.0), "by_turn": torch.tensor([1.0, 2.0]), "ratio_max": torch.tensor(3.0), "n": 1},
        {"clipped": torch.tensor(0.5), "by_turn": torch.tensor([3.0, 4.0]), "ratio_max": torch.tensor(2.0), "n": 2},
    ]
    assert sum_metrics(metrics) == {"clipped": 1.5, "by_turn": [4.0, 6.0], "ratio_max": 3.0, "n": 3}
    assert add_up([{"a": 1, "b_max": 1}, {"a": 2, "b_max": 5}, {"c": [1]}]) == {"a": 3, "b_max": 5, "c": [1]}


def test_facts_of_ranks_add_up() -> None:
    ours = UpdateFacts.of([batch("a", [False, True])], [torch.tensor(0.5)], [{"n": 1}], grad_norm=1.0)
    theirs = UpdateFacts.of([batch("b", [True, True, True])], [torch.tensor(0.25)], [{"n": 2}], grad_norm=1.0)
    idle = UpdateFacts.of([], [], [], grad_norm=1.0)
    assert UpdateFacts.total([ours, theirs, idle]) == UpdateFacts(0.75, {"n": 3}, 5, 4, (), ())


def test_samples_are_named_only_when_loss_or_gradient_is_not_finite() -> None:
    batches = [batch("a", [True]), batch("b", [True])]
    bad_loss = UpdateFacts.of(batches, [torch.tensor(math.nan), torch.tensor(1.0)], [], grad_norm=1.0)
    bad_norm = UpdateFacts.of(batches, [torch.tensor(1.0), torch.tensor(1.0)], [], grad_norm=math.inf)
    assert (bad_loss.suspects, bad_loss.samples) == (("a",), ())
    assert (bad_norm.suspects, bad_norm.samples) == ((), ("a", "b"))
