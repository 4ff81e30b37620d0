"""The one constructor of flat batches: segments of any length, laid end to end."""

import doctest

import torch

from hotseat import types
from hotseat.types import MicroBatch, segment_offsets


def test_the_examples_of_the_types_are_true():
    results = doctest.testmod(types)
    assert results.attempted >= 10
    assert results.failed == 0


def test_segments_are_laid_flat_with_offsets_and_weights_of_zero():
    tokens = [torch.tensor([5, 6, 7]), torch.tensor([8])]
    masks = [torch.tensor([False, True, True]), torch.tensor([True])]
    batch = MicroBatch.from_segments(tokens, masks, ["a", "b"], {"x": [torch.tensor([1.0, 2.0, 3.0]), torch.ones(1)]})
    assert batch.token_ids.tolist() == [5, 6, 7, 8]
    assert batch.offsets.tolist() == [0, 3, 4]
    assert batch.mask.tolist() == [False, True, True, True]
    assert batch.weights.tolist() == [0, 0, 0, 0]
    assert batch.fields["x"].tolist() == [1, 2, 3, 1]
    assert batch.sample_ids == ("a", "b")


def test_no_segment_is_an_empty_batch():
    batch = MicroBatch.from_segments([], [], [], {"x": []})
    assert (batch.num_tokens, batch.num_segments, batch.offsets.tolist()) == (0, 0, [0])
    assert (batch.token_ids.dtype, batch.mask.dtype, batch.fields["x"].dtype) == (
        torch.int64,
        torch.bool,
        torch.float32,
    )


def test_without_masks_no_token_is_sampled():
    assert MicroBatch.from_segments([torch.tensor([1, 2])], None, ["a"]).mask.tolist() == [False, False]


def test_offsets_begin_at_zero_and_end_at_the_number_of_tokens():
    assert segment_offsets(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
