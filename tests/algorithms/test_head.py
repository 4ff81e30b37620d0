"""Logits against the same products in float64: 16-bit numbers are exact there."""

import pytest
import torch

from hotseat.algorithms.head import project

HALVES = [torch.bfloat16, torch.float16]


def inputs(dtype: torch.dtype, vocab_size: int = 2500) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[rows, 24], [vocab_size, 24], [vocab_size]: more of the vocabulary than one block, and not a multiple of it."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((5, 24), (vocab_size, 24), (vocab_size,))
    hidden, weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return hidden, weight, bias


def test_a_logit_that_16_bits_cannot_hold() -> None:
    # 16 x 1 + 1 x 1/16; bfloat16 has 16 and 16.125.
    hidden, weight = torch.tensor([[16.0, 1.0]]).bfloat16(), torch.tensor([[1.0, 0.0625]]).bfloat16()
    assert project(hidden, weight).item() == 16.0625
    assert torch.nn.functional.linear(hidden, weight).item() == 16.0
    assert project(hidden, weight, torch.tensor([0.5]).bfloat16()).item() == 16.5625


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_results_of_16_bit_inputs_are_those_of_float32(dtype: torch.dtype, has_bias: bool, is_transposed: bool) -> None:
    hidden, weight, bias = inputs(dtype)
    expected = hidden.double() @ weight.double().t() + (bias.double() if has_bias else 0)
    if is_transposed:
        weight = weight.t().contiguous().t()
    logits = project(hidden, weight, bias if has_bias else None)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_types_are_the_linear_layers_bit_for_bit(dtype: torch.dtype) -> None:
    hidden, weight, bias = inputs(dtype)
    assert torch.equal(project(hidden, weight, bias), torch.nn.functional.linear(hidden, weight, bias))
    assert torch.equal(project(hidden, weight), torch.nn.functional.linear(hidden, weight))
    assert project(hidden, weight).dtype == dtype
