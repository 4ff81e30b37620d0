"""A stretch of a flattened tensor as the rectangles it is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from hotseat.train.fragments import Fragment, boxes

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.mark.parametrize("shape", [(), (7,), (5, 3), (1, 6), (4, 1, 3), (2, 3, 2, 2)])
def test_boxes_are_the_stretch_in_order(shape: tuple[int, ...]) -> None:
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(whole.numel() + 1):
        for stop in range(start, whole.numel() + 1):
            stretch = whole.view(-1)[start:stop]
            place = 0
            for box in boxes(shape, start, stop):
                assert box.begin == place
                part = whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
                assert torch.equal(part, stretch[place : place + part.numel()])
                place += part.numel()
            assert place == stop - start


def test_a_stretch_of_a_matrix_is_at_most_three_boxes() -> None:
    # Rows of 3; elements 2 to 10: the end of row 0, rows 1 and 2, the beginning of row 3.
    assert boxes((5, 3), 2, 10) == [((0, 2), (1, 1), 0), ((1, 0), (2, 3), 1), ((3, 0), (1, 1), 7)]


def test_a_fragment_reads_its_part_of_a_whole_and_a_whole_reads_fragments(tmp_path: Path) -> None:
    whole = torch.randn(5, 3)
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "whole", no_dist=True)
    flat = torch.zeros(8)
    dcp.load({"w": Fragment(flat, (5, 3), 2)}, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert torch.equal(flat, whole.view(-1)[2:10])

    fragment = Fragment(whole.view(-1), (5, 3), 0)
    assert fragment.size() == (5, 3)
    dcp.save({"w": fragment.detach().to("cpu", copy=True)}, checkpoint_id=tmp_path / "fragment", no_dist=True)
    found = torch.zeros(5, 3)
    dcp.load({"w": found}, checkpoint_id=tmp_path / "fragment", no_dist=True)
    assert torch.equal(found, whole)


def test_a_fragment_is_not_computed_with() -> None:
    fragment = Fragment(torch.ones(2), (5, 3), 2)
    assert repr(fragment) == "Fragment(2 to 4 of (5, 3))"
    with pytest.raises(NotImplementedError, match="use what it holds"):
        fragment + 1
