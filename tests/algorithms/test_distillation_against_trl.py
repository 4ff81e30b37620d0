"""Our divergences against TRL's own code, value and gradient in float64."""

import importlib

import pytest
import torch
from algorithm_cases import assert_close, numbers

from hotseat.algorithms.distillation import (
    Divergence,
    divergence,
    divergence_from_logits,
    divergence_from_top,
    top_log_probs,
)

pytestmark = pytest.mark.slow

ROWS, TOKENS, VOCAB = 3, 5, 11
# Answers of different lengths behind prompts, one of them cut to nothing, and a mask with a hole.
MASKS = {
    "whole": torch.ones(ROWS, TOKENS, dtype=torch.bool),
    "answers": torch.tensor([[0, 1, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0]]).bool(),
    "hole": torch.tensor([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 0]]).bool(),
}


@pytest.fixture(scope="module")
def trl():
    return importlib.import_module("trl.experimental.gkd.gkd_trainer").GKDTrainer


@pytest.fixture(scope="module")
def top_k():
    return importlib.import_module("trl.experimental.sdft.loss_utils")


def kind_of(beta):
    return {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("temperature", [0.5, 0.9, 1.0, 2.5])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.8, 1.0])
def test_divergences_equal_trls_generalized_jsd_loss(trl, beta, temperature, mask):
    ours = numbers(1, ROWS, TOKENS, VOCAB, scale=2, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    teacher = numbers(2, ROWS, TOKENS, VOCAB, scale=2)
    labels = torch.where(MASKS[mask], 7, -100)
    their_loss = trl.generalized_jsd_loss(theirs, teacher, labels, beta=beta, temperature=temperature)
    how = Divergence(kind_of(beta), temperature=temperature, beta=beta if 0 < beta < 1 else 0.5)
    flat = divergence_from_logits(ours.flatten(0, 1), teacher.flatten(0, 1), how)
    our_loss = torch.where(MASKS[mask].flatten(), flat, 0.0).sum() / MASKS[mask].sum()
    assert_close(our_loss, their_loss)
    our_loss.backward()
    their_loss.backward()
    assert float(ours.grad.abs().sum()) > 0
    assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("tail", ["other", "renormalise"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_classes_and_their_divergence_equal_trls_tail_bucket(top_k, alpha, tail):
    """On the teacher's most likely tokens, where TRL's self-distillation takes the student's."""
    ours = numbers(3, ROWS, VOCAB, scale=2, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    teacher = numbers(4, ROWS, VOCAB, scale=2)
    how = Divergence(kind_of(alpha), beta=alpha if 0 < alpha < 1 else 0.5, top_k=4, tail=tail)
    ids, log_q = top_log_probs(teacher, how)
    found = divergence_from_top(ours, ids, log_q, how)

    def classes(logits):
        chosen = logits.log_softmax(-1).gather(-1, ids.long())
        return top_k.add_tail_bucket(chosen) if tail == "other" else chosen.log_softmax(-1)

    expected = top_k.compute_divergence(classes(theirs), classes(teacher), alpha)
    assert_close(log_q, classes(teacher), 1e-10)
    assert_close(found, expected, 1e-10)
    found.sum().backward()
    expected.sum().backward()
    assert_close(ours.grad, theirs.grad, 1e-10)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_divergences_of_log_probs_equal_trls_self_distillation(top_k, alpha):
    log_p, log_q = (numbers(seed, ROWS, VOCAB, scale=2).log_softmax(-1) for seed in (5, 6))
    how = Divergence(kind_of(alpha), beta=alpha if 0 < alpha < 1 else 0.5)
    assert_close(divergence(log_p, log_q, how), top_k.compute_divergence(log_p, log_q, alpha))
