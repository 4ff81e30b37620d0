"""What ranks tell each other about an update, added up by hand."""

from __future__ import annotations

import math

import pytest
import torch

from hotseat.errors import NonFiniteError
from hotseat.train.update_facts import UpdateFacts, UpdateHistory, add_up, sample_ids, sum_metrics, suspects
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


# --- updates that are not finite --------------------------------------------------------------------------------------


def two_segments(weights: list[float], sample_ids: tuple[str, str]) -> MicroBatch:
    """Two segments, of two and of three tokens."""
    return MicroBatch(
        token_ids=torch.zeros(5, dtype=torch.int64),
        offsets=torch.tensor([0, 2, 5]),
        mask=torch.ones(5, dtype=torch.bool),
        weights=torch.tensor(weights),
        sample_ids=sample_ids,
    )


def test_a_row_of_skipped_updates_ends_the_run_and_names_each_sample_once() -> None:
    history = UpdateHistory(max_in_a_row=2)
    history.version = 4
    history.record_skip(["a", "b"], loss=math.nan, grad_norm=1.0)
    with pytest.raises(NonFiniteError, match="2 updates in a row .*after version 4; samples: a, b, c\\."):
        history.record_skip(["b", "c"], loss=math.inf, grad_norm=1.0)
    assert history.num_skipped == 2


def test_an_update_that_is_finite_and_a_resume_end_the_row() -> None:
    history = UpdateHistory(max_in_a_row=2)
    history.record_skip(["a"], loss=math.nan, grad_norm=1.0)
    history.record_step()
    history.record_skip(["a"], loss=math.nan, grad_norm=1.0)
    history.restore({"counter.version": torch.tensor(3), "counter.num_skipped": torch.tensor(7)})
    history.record_skip(["a"], loss=math.nan, grad_norm=1.0)
    assert (history.version, history.num_skipped) == (3, 8)


def test_an_overflow_of_the_loss_scale_is_counted_and_blames_nobody() -> None:
    history = UpdateHistory(max_in_a_row=1)
    history.record_overflow()
    assert history.num_skipped == 1


def test_many_samples_are_named_in_part() -> None:
    with pytest.raises(NonFiniteError, match="s15 and 4 more\\."):
        UpdateHistory(1).record_skip([f"s{i}" for i in range(20)], loss=math.nan, grad_norm=1.0)


def test_suspects_are_samples_with_a_value_that_is_not_finite_or_else_all_of_the_micro_batch() -> None:
    bad_value = two_segments([1.0, 1.0, 1.0, math.nan, 1.0], ("a", "b"))
    no_bad_value = two_segments([1.0] * 5, ("c", "d"))
    fine = two_segments([1.0] * 5, ("e", "f"))
    batches = [bad_value, no_bad_value, fine]
    assert suspects(batches, [math.nan, math.inf, 0.5]) == ("b", "c", "d")
    assert sample_ids([*batches, fine]) == ("a", "b", "c", "d", "e", "f")
