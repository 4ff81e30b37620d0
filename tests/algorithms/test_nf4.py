"""NF4 against its definition, number by number, and against bitsandbytes where that is installed."""

from __future__ import annotations

import copy
from statistics import NormalDist

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hotseat.algorithms.nf4 import LEVELS, Nf4Linear, dequantise, level_pairs, nf4_layers, quantise, quantise_layers


def some_weight(dtype: torch.dtype = torch.float32, num_rows: int = 7) -> torch.Tensor:
    torch.manual_seed(0)
    weight = 0.02 * torch.randn(num_rows, 192)
    weight[0, :64] = 0  # a block without a scale
    weight[1, 64:128] *= 1e-4
    return weight.to(dtype)


def by_hand(number: float, scale: float) -> float:
    """Return the level times the scale that is nearest to a number."""
    return min((level * scale for level in LEVELS), key=lambda found: abs(found - number))


def test_levels_split_a_normal_distribution_into_equal_parts():
    quantile, offset = NormalDist().inv_cdf, 0.9677083
    positive = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    expected = sorted([*positive, 0.0, *negative])
    assert [level / expected[-1] for level in expected] == pytest.approx(LEVELS, abs=2e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_number_becomes_the_nearest_level_times_the_scale_of_its_block(dtype):
    weight = some_weight(dtype)
    packed, scales = quantise(weight)
    assert (packed.shape, packed.dtype) == ((7, 96), torch.uint8)
    assert (scales.shape, scales.dtype) == ((7, 3), dtype)
    found = dequantise(packed, scales, level_pairs(), torch.float32)
    for row in range(7):
        for block in range(3):
            numbers = weight[row, 64 * block : 64 * block + 64].tolist()
            scale = max(map(abs, numbers))
            assert scales[row, block].item() == scale
            expected = [by_hand(number, scale) for number in numbers]
            assert found[row, 64 * block : 64 * block + 64].tolist() == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_the_first_of_two_numbers_is_in_the_high_half_of_their_byte():
    weight = torch.zeros(1, 64)
    weight[0, :4] = torch.tensor([-1.0, 1.0, 0.0, 0.8])
    packed, _ = quantise(weight)
    assert packed[0, :3].tolist() == [0x0F, 0x7E, 0x77]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_dequantised_has_the_same_bytes_again(dtype):
    packed, scales = quantise(some_weight(dtype))
    again = quantise(dequantise(packed, scales, level_pairs(), dtype))
    assert torch.equal(again[1], scales)
    # A block of zeros has no other level.
    assert torch.equal(again[0], packed)


def test_rows_are_quantised_by_themselves():
    weight = some_weight()
    packed, scales = quantise(weight)
    parts = [quantise(part) for part in weight.split([2, 1, 4])]
    assert torch.equal(torch.cat([part for part, _ in parts]), packed)
    assert torch.equal(torch.cat([part for _, part in parts]), scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_scales_and_values_are_those_of_bitsandbytes(dtype):
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = some_weight(dtype, 64)[2:]
    packed, scales = quantise(weight)
    theirs, state = functional.quantize_4bit(weight.contiguous(), blocksize=64, quant_type="nf4")
    assert torch.equal(theirs.view_as(packed), packed)
    assert torch.equal(state.absmax.view_as(scales), scales.float())
    assert torch.equal(functional.dequantize_4bit(theirs, state), dequantise(packed, scales, level_pairs(), dtype))


def test_forward_and_gradient_are_those_of_the_dequantised_weight():
    torch.manual_seed(0)
    linear = nn.Linear(128, 9).requires_grad_(False)
    layer, plain = Nf4Linear(linear), copy.deepcopy(linear)
    plain.weight.data = layer.dequantised(torch.float32)
    x = torch.randn(5, 128, requires_grad=True)
    again = x.detach().clone().requires_grad_()
    (layer(x) ** 2).sum().backward()
    (plain(again) ** 2).sum().backward()
    torch.testing.assert_close(layer(x), plain(x))
    torch.testing.assert_close(x.grad, again.grad)


def test_what_is_kept_for_the_backward_is_not_the_dequantised_weight():
    layer = Nf4Linear(nn.Linear(128, 64, bias=False))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        layer(torch.randn(3, 128, requires_grad=True))
    # 64 x 128 numbers of 4 bits, 128 scales, and a table of 256 pairs.
    assert sum(tensor.nbytes for tensor in kept) == 64 * 64 + 128 * 4 + 256 * 2 * 4


def test_levels_survive_a_conversion_of_the_module():
    layer = Nf4Linear(nn.Linear(64, 3, dtype=torch.bfloat16))
    expected = layer.dequantised(torch.float32)
    assert torch.equal(nn.Sequential(layer).bfloat16()[0].dequantised(torch.float32), expected)


def test_everything_but_embeddings_norms_and_the_head_is_in_four_bits():
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, **sizes))
    plain = {name: weight.numel() for name, weight in model.named_parameters()}
    quantise_layers(model)
    in_bits = {name: count for name, count in plain.items() if "proj" in name}
    assert {f"{name}.weight" for name in nf4_layers(model)} == in_bits.keys()
    assert {name for name, _ in model.named_parameters()} == plain.keys() - in_bits.keys()
    # 4 bits for each weight, and 32 for each 64 of them.
    num_bytes = sum(layer.weight.nbytes + layer.absmax.nbytes for layer in nf4_layers(model).values())
    assert num_bytes * 8 == 4.5 * sum(in_bits.values())
