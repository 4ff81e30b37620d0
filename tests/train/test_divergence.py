"""Scores with a teacher, chunk by chunk, against whole logits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hotseat.algorithms.distillation import Divergence, divergence_from_logits, divergence_from_top, top_log_probs
from hotseat.train import divergence as chunked
from hotseat.train.divergence import Head, TeacherRows, scores_with_teacher, teacher_rows
from hotseat.train.logprobs import token_log_probs

ROWS, HIDDEN, VOCAB = 11, 5, 17
KINDS = [Divergence("forward_kl", 0.7), Divergence("reverse_kl", 1.3), Divergence("jsd", 1.0, beta=0.2)]


def made(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def heads(has_bias: bool, scale: float, cap: float | None) -> tuple[Head, Head]:
    bias = made(2, VOCAB).requires_grad_() if has_bias else None
    student = Head(made(1, VOCAB, HIDDEN).requires_grad_(), bias, scale, cap)
    return student, Head(made(3, VOCAB + 2, HIDDEN + 3), made(4, VOCAB + 2) if has_bias else None, 1 / scale, cap)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize(("has_bias", "scale", "cap"), [(False, 1.0, None), (True, 0.5, 3.0)])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=lambda how: how.kind)
def test_value_and_gradient_are_those_of_whole_logits(kind, with_entropy, has_bias, scale, cap, top_k, chunk_rows):
    how = Divergence(kind.kind, kind.temperature, kind.beta, top_k, vocab_size=VOCAB)
    student, teacher = heads(has_bias, scale, cap)
    hidden, other = made(0, ROWS, HIDDEN).requires_grad_(), made(5, ROWS, HIDDEN + 3)
    targets = torch.randint(0, VOCAB, (ROWS,), generator=torch.Generator().manual_seed(0))
    leaves = [hidden, student.weight, *([student.bias] if student.bias is not None else [])]

    def whole(head: Head, states: Tensor) -> Tensor:
        logits = states @ head.weight.T + (0 if head.bias is None else head.bias)
        return (logits if cap is None else cap * torch.tanh(logits / cap)) * head.scale

    logits, theirs = whole(student, hidden), whole(teacher, other)
    log_p = (logits / 0.9).log_softmax(-1)
    if top_k is None:
        apart = divergence_from_logits(logits, theirs, how)
    else:
        apart = divergence_from_top(logits, *top_log_probs(theirs, how), how)
    expected = [log_p.gather(-1, targets[:, None]).squeeze(-1), apart, -(log_p.exp() * log_p).sum(-1)]
    rows = teacher_rows(other, teacher, how, chunk_rows=chunk_rows)
    assert (rows.hidden is None) == (top_k is not None)
    found = scores_with_teacher(
        hidden,
        student,
        targets,
        rows,
        how,
        teacher_head=teacher,
        temperature=0.9,
        with_entropy=with_entropy,
        chunk_rows=chunk_rows,
    )
    ours = [each for each in found if each is not None]
    assert len(ours) == 2 + with_entropy
    upstream = made(6, 3, ROWS)
    for mine, full in zip(ours, expected, strict=False):
        torch.testing.assert_close(mine, full)
    totals = [sum((upstream[n] * each[n]).sum() for n in range(len(ours))) for each in (ours, expected)]
    for mine, full in zip(*(torch.autograd.grad(total, leaves) for total in totals), strict=True):
        torch.testing.assert_close(mine, full)


def test_log_probs_and_entropy_are_those_without_a_teacher():
    student, teacher = heads(True, 1.0, None)
    hidden, other = made(0, ROWS, HIDDEN), made(5, ROWS, HIDDEN + 3)
    targets = torch.arange(ROWS)
    how = Divergence("jsd", 2.0, top_k=4, vocab_size=VOCAB)
    found = scores_with_teacher(
        hidden, student, targets, teacher_rows(other, teacher, how), how, temperature=0.6, with_entropy=True
    )
    log_probs, entropy = token_log_probs(
        hidden, student.weight, targets, temperature=0.6, bias=student.bias, with_entropy=True
    )
    torch.testing.assert_close(found.log_probs, log_probs)
    torch.testing.assert_close(found.entropy, entropy)


def test_no_rows_still_reach_the_weights():
    """A rank with nothing to learn must still have a gradient to bring to the others."""
    student, teacher = heads(False, 1.0, None)
    how, none = Divergence("reverse_kl", vocab_size=VOCAB), torch.zeros(0, HIDDEN, dtype=torch.float64)
    rows = TeacherRows(hidden=torch.zeros(0, HIDDEN + 3, dtype=torch.float64))
    found = scores_with_teacher(none, student, torch.zeros(0, dtype=torch.int64), rows, how, teacher_head=teacher)
    assert found.divergence.shape == (0,)
    (gradient,) = torch.autograd.grad(found.divergence.sum(), [student.weight])
    assert (gradient == 0).all()


def test_chunks_bound_what_exists_at_once(monkeypatch):
    """No matrix has more elements than a chunk, nor one of the teacher's."""
    monkeypatch.setitem(chunked._CHUNK_ELEMENTS, "cpu", 4 * VOCAB)
    largest = 0
    plain = chunked.project

    def measured(hidden: Tensor, *rest: Tensor) -> Tensor:
        nonlocal largest
        logits = plain(hidden, *rest)
        largest = max(largest, logits.shape[0])
        return logits

    monkeypatch.setattr(chunked, "project", measured)
    student, teacher = heads(False, 1.0, None)
    hidden, other = made(0, ROWS, HIDDEN).requires_grad_(), made(5, ROWS, HIDDEN + 3)
    how = Divergence("reverse_kl", vocab_size=VOCAB)
    found = scores_with_teacher(
        hidden, student, torch.arange(ROWS), TeacherRows(hidden=other), how, teacher_head=teacher
    )
    found.divergence.sum().backward()
    assert largest == 2


@pytest.mark.parametrize("top_k", [None, 4])
def test_half_precision_comes_near_float64(top_k):
    student, teacher = heads(True, 1.0, None)
    hidden, other = made(0, ROWS, HIDDEN), made(5, ROWS, HIDDEN + 3)
    how, found = Divergence("jsd", top_k=top_k, vocab_size=VOCAB), {}
    for dtype in (torch.float64, torch.bfloat16):
        leaf = hidden.to(torch.bfloat16).to(dtype).requires_grad_()
        ours, theirs = (
            Head(head.weight.detach().bfloat16().to(dtype), head.bias.detach().bfloat16().to(dtype))
            for head in (student, teacher)
        )
        rows = teacher_rows(other.bfloat16().to(dtype), theirs, how)
        scores = scores_with_teacher(leaf, ours, torch.arange(ROWS), rows, how, teacher_head=theirs)
        scores.divergence.sum().backward()
        found[dtype] = scores.divergence.double(), leaf.grad.double()
    assert scores.divergence.dtype == torch.float32
    torch.testing.assert_close(found[torch.bfloat16][0], found[torch.float64][0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[torch.bfloat16][1], found[torch.float64][1], rtol=0.02, atol=0.01)
