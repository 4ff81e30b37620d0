from __future__ import annotations

import torch

from hotseat.placement.role_names import Part
from hotseat.train.backend import PARTS
from hotseat.train.offload import HostBuffer, PartResidency


def test_tensors_come_back_in_place_and_bit_for_bit() -> None:
    """On host memory here; on a device it is the same code with pinned chunks."""
    buffer = HostBuffer(torch.device("cpu"), chunk_bytes=64)
    tensors = [torch.randn(7), torch.randn(30, 3).bfloat16(), torch.arange(5)]
    view = tensors[1][3:9]
    before = [tensor.clone() for tensor in (*tensors, view)]
    for _ in range(2):
        away = buffer.offload([*tensors, view])
        # The view shares its storage, which is counted and moved once.
        assert away.num_bytes == 7 * 4 + 90 * 2 + 5 * 8
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        back = buffer.onload()
        assert back.num_bytes == away.num_bytes
        assert all(torch.equal(tensor, old) for tensor, old in zip((*tensors, view), before, strict=True))
        for tensor, old in zip(tensors[:1], before[:1], strict=True):
            tensor += 1
            old += 1


def test_nothing_to_move_is_nothing_moved() -> None:
    buffer = HostBuffer(torch.device("cpu"))
    assert buffer.offload([]).num_bytes == 0
    assert buffer.onload().num_bytes == 0


def test_parts_are_offloaded_once_and_only_marked_where_host_and_device_memory_are_one() -> None:
    residency = PartResidency(torch.device("cpu"))
    weights = torch.ones(5)
    assert residency.offload([Part.WEIGHTS], lambda part: [weights]).num_bytes == 0
    assert residency.offloaded == {"weights"}
    assert weights.tolist() == [1] * 5
    residency.onload(PARTS)
    assert not residency.offloaded
    residency.movable = frozenset(PARTS)
    assert residency.offload([Part.WEIGHTS], lambda part: [weights]).num_bytes == 20
    assert residency.offload([Part.WEIGHTS], lambda part: [weights]).num_bytes == 0
    assert residency.onload(PARTS).num_bytes == 20
    assert weights.tolist() == [1] * 5
