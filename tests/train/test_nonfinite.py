"""The guard against updates that are not finite, alone."""

from __future__ import annotations

import math

import pytest
import torch

from hotseat.errors import NonFiniteError
from hotseat.train.nonfinite import NonFiniteGuard, sample_ids, suspects
from hotseat.types import MicroBatch


def batch(weights: list[float], sample_ids: tuple[str, str]) -> MicroBatch:
    """Two segments, of two and of three tokens."""
    return MicroBatch(
        token_ids=torch.zeros(5, dtype=torch.int64),
        offsets=torch.tensor([0, 2, 5]),
        mask=torch.ones(5, dtype=torch.bool),
        weights=torch.tensor(weights),
        sample_ids=sample_ids,
    )


def test_a_row_of_skipped_updates_ends_the_run_and_names_each_sample_once() -> None:
    guard = NonFiniteGuard(max_in_a_row=2)
    guard.record_skip(["a", "b"], loss=math.nan, grad_norm=1.0, version=4)
    with pytest.raises(NonFiniteError, match="2 updates in a row .*after version 4; samples: a, b, c\\."):
        guard.record_skip(["b", "c"], loss=math.inf, grad_norm=1.0, version=4)
    assert guard.num_skipped == 2


def test_an_update_that_is_finite_and_a_resume_end_the_row() -> None:
    guard = NonFiniteGuard(max_in_a_row=2)
    guard.record_skip(["a"], loss=math.nan, grad_norm=1.0, version=0)
    guard.record_step()
    guard.record_skip(["a"], loss=math.nan, grad_norm=1.0, version=1)
    guard.restore(num_skipped=7)
    guard.record_skip(["a"], loss=math.nan, grad_norm=1.0, version=1)
    assert guard.num_skipped == 8


def test_an_overflow_of_the_loss_scale_is_counted_and_blames_nobody() -> None:
    guard = NonFiniteGuard(max_in_a_row=1)
    guard.record_overflow()
    assert guard.num_skipped == 1


def test_many_samples_are_named_in_part() -> None:
    with pytest.raises(NonFiniteError, match="s15 and 4 more\\."):
        NonFiniteGuard(1).record_skip([f"s{i}" for i in range(20)], loss=math.nan, grad_norm=1.0, version=0)


def test_suspects_are_samples_with_a_value_that_is_not_finite_or_else_all_of_the_micro_batch() -> None:
    bad_value = batch([1.0, 1.0, 1.0, math.nan, 1.0], ("a", "b"))
    no_bad_value = batch([1.0] * 5, ("c", "d"))
    fine = batch([1.0] * 5, ("e", "f"))
    batches = [bad_value, no_bad_value, fine]
    assert suspects(batches, [math.nan, math.inf, 0.5]) == ("b", "c", "d")
    assert sample_ids([*batches, fine]) == ("a", "b", "c", "d", "e", "f")
