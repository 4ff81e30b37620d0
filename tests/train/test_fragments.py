"""A stretch of a flattened tensor as the rectangles it is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(("part", "shift"), [((2, 6), (3, 0)), ((5, 2), (0, 4)), ((5, 1), (0, 3)), ((2, 3), (1, 3))])
def test_a_fragment_of_a_part_lies_where_the_part_does(part: Any, shift: Any, tmp_path: Path) -> None:
    whole = torch.randn(5, 6)
    mine = whole[shift[0] : shift[0] + part[0], shift[1] : shift[1] + part[1]]
    dcp.save({"w": whole}, checkpoint_id=tmp_path / "whole", no_dist=True)
    flat = torch.zeros(mine.numel() - 2)
    fragment = Fragment(flat, (5, 6), 1, part, shift)
    assert fragment.size() == (5, 6)
    dcp.load({"w": fragment}, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert torch.equal(flat, mine.reshape(-1)[1:-1])
    assert repr(fragment) == f"Fragment(1 to {mine.numel() - 1} of {part} at {shift} in (5, 6))"


def test_the_boxes_of_a_part_are_shifted() -> None:
    # Columns 4 and 5 of rows of 6; elements 1 to 5 of them: the end of row 0, row 1, the beginning of row 2.
    fragment = Fragment(torch.zeros(4), (5, 6), 1, (5, 2), (0, 4))
    assert fragment._boxes() == [((0, 5), (1, 1), 0), ((1, 4), (1, 2), 1), ((2, 4), (1, 1), 3)]


def test_parts_that_are_saved_make_a_whole(tmp_path: Path) -> None:
    whole = torch.randn(5, 6)
    halves = [Fragment(whole[:, first : first + 3].reshape(-1), (5, 6), 0, (5, 3), (0, first)) for first in (0, 3)]
    kept = [half.detach().to("cpu", copy=True) for half in halves]
    # Each rank would write its own; here one planner gets both halves under two names.
    dcp.save({"left": kept[0], "right": kept[1]}, checkpoint_id=tmp_path, no_dist=True)
    for name, first in (("left", 0), ("right", 3)):
        found = torch.zeros(15)
        dcp.load({name: Fragment(found, (5, 6), 0, (5, 3), (0, first))}, checkpoint_id=tmp_path, no_dist=True)
        assert torch.equal(found.view(5, 3), whole[:, first : first + 3])


def test_a_fragment_is_not_computed_with() -> None:
    fragment = Fragment(torch.ones(2), (5, 3), 2)
    assert repr(fragment) == "Fragment(2 to 4 of (5, 3))"
    with pytest.raises(NotImplementedError, match="use what it holds"):
        fragment + 1
