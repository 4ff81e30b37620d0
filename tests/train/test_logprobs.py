"""Chunked log-probs against a full log_softmax, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hotseat.train.logprobs import token_log_probs

ROWS, HIDDEN, VOCAB = 11, 5, 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((ROWS, HIDDEN), (VOCAB, HIDDEN), (VOCAB,))
    )
    return hidden, weight, bias, torch.randint(0, VOCAB, (ROWS,), generator=generator)


def full(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float):
    logits = hidden @ weight.T
    log_p = ((logits if bias is None else logits + bias) / temperature).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk_rows", [1, 4, 11, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_value_and_gradient_are_those_of_a_full_log_softmax(
    chunk_rows: int, has_bias: bool, with_entropy: bool
) -> None:
    hidden, weight, bias, targets = inputs()
    leaves = [hidden, weight, *([bias] if has_bias else [])]
    upstream = torch.randn(2, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def gradients(log_probs: Tensor, entropy: Tensor | None) -> list[Tensor]:
        total = (upstream[0] * log_probs).sum()
        if entropy is not None:
            total = total + (upstream[1] * entropy).sum()
        return list(torch.autograd.grad(total, leaves))

    expected = full(hidden, weight, bias if has_bias else None, targets, 0.7)
    found = token_log_probs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        bias=bias if has_bias else None,
        with_entropy=with_entropy,
        chunk_rows=chunk_rows,
    )
    torch.testing.assert_close(found[0], expected[0])
    if with_entropy:
        torch.testing.assert_close(found[1], expected[1])
    else:
        assert found[1] is None
    for ours, theirs in zip(
        gradients(*found), gradients(expected[0], expected[1] if with_entropy else None), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_entropy_alone_has_its_gradient() -> None:
    hidden, weight, _, targets = inputs()
    _, expected = full(hidden, weight, None, targets, 1.3)
    _, found = token_log_probs(hidden, weight, targets, temperature=1.3, with_entropy=True, chunk_rows=3)
    assert found is not None
    for ours, theirs in zip(
        torch.autograd.grad(found.sum(), [hidden, weight]),
        torch.autograd.grad(expected.sum(), [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_two_tokens_by_hand() -> None:
    # Logits (ln 3, 0) are probabilities (3/4, 1/4); at temperature ½ they are (ln 9, 0), so (9/10, 1/10).
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([[3.0], [1.0]]).log()
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0, 1]), with_entropy=True)
    assert log_probs.exp().tolist() == pytest.approx([0.75, 0.25])
    assert entropy is not None
    assert entropy.tolist() == pytest.approx([0.562335, 0.562335], abs=1e-6)  # −¾ ln ¾ − ¼ ln ¼
    log_probs, _ = token_log_probs(hidden, weight, torch.tensor([0, 1]), temperature=0.5)
    assert log_probs.exp().tolist() == pytest.approx([0.9, 0.1])


def test_no_rows_still_reach_the_weights() -> None:
    """A rank with nothing to learn must still have a gradient to bring to the others."""
    _, weight, _, _ = inputs()
    log_probs, _ = token_log_probs(
        torch.zeros(0, HIDDEN, dtype=torch.float64), weight, torch.zeros(0, dtype=torch.int64)
    )
    assert log_probs.shape == (0,)
    (gradient,) = torch.autograd.grad(log_probs.sum(), [weight])
    assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_of_half_precision_nothing_is_rounded_but_gradients(dtype: torch.dtype, has_bias: bool) -> None:
    hidden, weight, bias, targets = inputs(dtype)
    leaves = [hidden, weight, *([bias] if has_bias else [])]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    log_probs, entropy = token_log_probs(
        hidden, weight, targets, bias=bias if has_bias else None, with_entropy=True, chunk_rows=2
    )
    assert entropy is not None
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected = full(exact[0], exact[1], exact[2] if has_bias else None, targets, 1.0)
    torch.testing.assert_close((log_probs.double(), entropy.double()), expected, rtol=1e-5, atol=1e-5)
    ours = torch.autograd.grad(log_probs.sum() + entropy.sum(), leaves)
    theirs = torch.autograd.grad(expected[0].sum() + expected[1].sum(), exact)
    for mine, true in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), true, rtol=0.02, atol=0.02)


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation made."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.num_elements = max(self.num_elements, *sizes, 0)
        return result


def test_no_more_than_one_chunk_of_logits_is_ever_held() -> None:
    rows, vocab, chunk = 64, 1000, 4
    hidden, weight = torch.randn(rows, 2, requires_grad=True), torch.randn(vocab, 2, requires_grad=True)
    with Largest() as largest:
        log_probs, entropy = token_log_probs(
            hidden, weight, torch.zeros(rows, dtype=torch.int64), with_entropy=True, chunk_rows=chunk
        )
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.num_elements == chunk * vocab
