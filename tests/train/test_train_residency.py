from __future__ import annotations

import torch

from hotseat.train.residency import Shelf


def test_tensors_come_back_in_place_and_bit_for_bit() -> None:
    """On host memory here; on a device it is the same code with pinned chunks."""
    shelf = Shelf(torch.device("cpu"), chunk_bytes=64)
    tensors = [torch.randn(7), torch.randn(30, 3).bfloat16(), torch.arange(5)]
    view = tensors[1][3:9]
    before = [tensor.clone() for tensor in (*tensors, view)]
    for _ in range(2):
        away = shelf.put_aside([*tensors, view])
        # The view shares its storage, which is counted and moved once.
        assert away.num_bytes == 7 * 4 + 90 * 2 + 5 * 8
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        back = shelf.bring_back()
        assert back.num_bytes == away.num_bytes
        assert all(torch.equal(tensor, old) for tensor, old in zip((*tensors, view), before, strict=True))
        for tensor, old in zip(tensors[:1], before[:1], strict=True):
            tensor += 1
            old += 1


def test_nothing_to_move_is_nothing_moved() -> None:
    shelf = Shelf(torch.device("cpu"))
    assert shelf.put_aside([]).num_bytes == 0
    assert shelf.bring_back().num_bytes == 0
