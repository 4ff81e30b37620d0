"""The digest of weights: its formula, what composes, what it notices."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotseat.algorithms.digest import combine_digests, mix64, named_digests, tensor_digest

MASK = (1 << 64) - 1


def slow_mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def slow_digest(tensor: torch.Tensor) -> int:
    """The formula of the module's docstring, element by element, in Python integers."""
    total = 0
    for index in itertools.product(*(range(n) for n in tensor.shape)):
        (bits,) = struct.unpack("<i", struct.pack("<f", float(tensor[index])))
        term = bits
        for dim, i in enumerate(index):
            term *= slow_mix(((i + 1) * 0x9E3779B97F4A7C15 + (dim << 56)) & MASK) | 1
        total += term
    return total & MASK


def test_mix64_is_splitmix64() -> None:
    # The first outputs of the published generator for seed 0: the mix of one, two, three golden ratios.
    states = [(n * 0x9E3779B97F4A7C15) & MASK for n in (1, 2, 3)]
    outputs = mix64(torch.tensor([s - (1 << 64) if s >> 63 else s for s in states])).tolist()
    assert [o & MASK for o in outputs] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4), (0,), (3, 0)])
def test_equals_the_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(1)
    tensor = torch.randn(shape)
    expected = slow_digest(tensor.reshape(1) if not shape else tensor)
    assert tensor_digest(tensor) == expected


def test_one_times_two_by_hand() -> None:
    # 1.0 is 0x3F800000 and -0.0 is the smallest int32; the weights are those of position 0 and 1 of dimension 0.
    weights = [0xE220A8397B1DCDAF | 1, 0x6E789E6AA1B965F4 | 1]
    expected = (0x3F800000 * weights[0] - (1 << 31) * weights[1]) & MASK
    assert tensor_digest(torch.tensor([1.0, -0.0])) == expected


@given(st.integers(1, 9), st.integers(1, 9), st.data())
@settings(max_examples=40, deadline=None)
def test_slices_add_up(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = torch.randn(rows, columns, dtype=torch.bfloat16)
    row, column = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
    whole = tensor_digest(tensor)
    quarters = [
        tensor_digest(tensor[:row, :column]),
        tensor_digest(tensor[row:, :column], offset=(row, 0)),
        tensor_digest(tensor[:row, column:], offset=(0, column)),
        tensor_digest(tensor[row:, column:], offset=(row, column)),
    ]
    assert combine_digests(quarters) == whole
    interleaved = [tensor_digest(tensor[:, i::3], offset=(0, i), stride=(1, 3)) for i in range(3)]
    assert combine_digests(interleaved) == whole


def test_layout_does_not_matter() -> None:
    tensor = torch.randn(33, 65, 3)
    digest = tensor_digest(tensor)
    assert tensor_digest(tensor.permute(2, 0, 1).contiguous().permute(1, 2, 0)) == digest
    assert tensor_digest(torch.cat([tensor, tensor], 1)[:, 65:]) == digest
    large = torch.randn(3, 100_000)
    assert tensor_digest(large) == combine_digests(tensor_digest(large[i : i + 1], (i, 0)) for i in range(3))
    assert tensor_digest(large.t()) != tensor_digest(large)
    assert tensor_digest(large.t().contiguous()) == tensor_digest(large.t())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8]
)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 7).to(dtype).view(2, 3)
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    seen = {tensor_digest(tensor)}
    width = 8 * tensor.element_size()
    for index in itertools.product(range(2), range(3)):
        for bit in range(width):
            value = 1 << bit if bit < width - 1 else -(1 << bit)
            bits[index] ^= value
            seen.add(tensor_digest(tensor))
            bits[index] ^= value
    assert len(seen) == 1 + 6 * width


def test_moved_elements_rows_and_columns_count() -> None:
    torch.manual_seed(0)
    tensor = torch.randn(16, 16)
    variants = [tensor, tensor.t(), tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)]
    for i, j in itertools.combinations(range(16), 2):
        order = list(range(16))
        order[i], order[j] = j, i
        variants += [tensor[order], tensor[:, order]]
    swapped = tensor.clone()
    swapped[3, 4], swapped[7, 9] = tensor[7, 9], tensor[3, 4]
    variants += [swapped, torch.where(tensor > 0, tensor, -tensor), torch.zeros_like(tensor)]
    digests = [tensor_digest(v) for v in variants]
    assert len(set(digests)) == len(digests)


def test_many_at_once_equal_one_by_one() -> None:
    named = {"a": torch.randn(3, 4), "b": torch.randn(4, 3).t(), "c": torch.randn(5).bfloat16(), "d": torch.tensor(2.0)}
    assert named_digests(named.items()) == {name: tensor_digest(tensor) for name, tensor in named.items()}
    assert named_digests([]) == {}


def test_offsets_must_fit_the_tensor() -> None:
    with pytest.raises(ValueError, match="2 dimensions"):
        tensor_digest(torch.zeros(2, 2), offset=(1,))
