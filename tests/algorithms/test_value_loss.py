import pytest
import torch
from algorithm_cases import NAN, assert_close, numbers, quick, seeds, some_order, with_rubbish
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.value_loss import value_loss
from hotseat.errors import UserError


def test_the_larger_of_the_free_and_the_clipped_error_counts():
    # V 2, V_old 1, clip 0.5, so the clipped value is 1.5.
    # R = 0:   max(4, 2.25) / 2 = 2, free.       R = 3:  max(1, 2.25) / 2 = 1.125, clipped: no gradient.
    # V 1.2 (within the clip), R = 0: 1.44 / 2 = 0.72
    values = torch.tensor([2.0, 2.0, 1.2, NAN], dtype=torch.float64, requires_grad=True)
    old, returns = torch.tensor([1.0, 1, 1, NAN]), torch.tensor([0.0, 3, 0, NAN])
    result = value_loss(values, old, returns, torch.tensor([True, True, True, False]), clip=0.5)
    assert_close(result.loss, [2, 1.125, 0.72, 0])
    assert result.clipped.tolist() == [False, True, False, False]
    result.loss.sum().backward()
    assert_close(values.grad, [2, 0, 1.2, 0])


def test_without_a_clip_it_is_half_the_squared_error():
    result = value_loss(
        torch.tensor([2.0]), torch.tensor([NAN]), torch.tensor([5.0]), torch.ones(1, dtype=torch.bool), clip=None
    )
    assert_close(result.loss, [4.5])
    assert result.clipped.tolist() == [False]


@quick
@given(seeds, st.sampled_from([None, 0.1, 1.0]))
def test_value_loss_equals_a_loop_in_loss_and_gradient(seed, clip):
    mask, old, returns = numbers(seed, 10) > -0.5, numbers(seed + 1, 10), numbers(seed + 2, 10)
    fast = numbers(seed + 3, 10, grad=True)
    slow = fast.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for token in range(10):
        if not mask[token]:
            continue
        error = (slow[token] - returns[token]) ** 2
        if clip is not None:
            near = torch.maximum(torch.minimum(slow[token], old[token] + clip), old[token] - clip)
            error = torch.maximum(error, (near - returns[token]) ** 2)
        total = total + error / 2
    loss = value_loss(fast, old, returns, mask, clip=clip).loss
    assert_close(loss.sum(), total)
    loss.sum().backward()
    if total.requires_grad:
        total.backward()
    assert_close(fast.grad, torch.zeros(10) if slow.grad is None else slow.grad)


@quick
@given(seeds, st.sampled_from([None, 0.2]))
def test_value_loss_never_reads_unsampled_tokens_and_keeps_order(seed, clip):
    mask = numbers(seed, 9) > 0
    clean = numbers(seed + 1, 9, grad=True), numbers(seed + 2, 9), numbers(seed + 3, 9)
    dirty = tuple(with_rubbish(values, mask) for values in clean)
    here, there = value_loss(*clean, mask, clip=clip), value_loss(*dirty, mask, clip=clip)
    assert torch.equal(here.loss, there.loss)
    assert torch.equal(here.clipped, there.clipped)
    here.loss.sum().backward()
    there.loss.sum().backward()
    assert torch.equal(clean[0].grad, dirty[0].grad)
    order = some_order(seed, 9)
    swapped = value_loss(*(values[order] for values in clean), mask[order], clip=clip)
    assert_close(swapped.loss, here.loss[order])


def test_value_loss_precision():
    mask = torch.ones(1, dtype=torch.bool)
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        assert value_loss(*[torch.zeros(1, dtype=dtype)] * 3, mask, clip=0.2).loss.dtype == expected


def test_a_value_clip_that_cannot_work_is_refused():
    with pytest.raises(UserError, match=r"value_clip is 0.0: set it above 0"):
        value_loss(*[torch.zeros(1)] * 3, torch.ones(1, dtype=torch.bool), clip=0.0)
