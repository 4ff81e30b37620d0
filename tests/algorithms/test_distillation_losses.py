"""Divergences from a teacher: numbers by hand, plain loops in float64, and properties."""

import math
from fractions import Fraction

import pytest
import torch
from algorithm_cases import assert_close, numbers, quick, seeds
from hypothesis import given

from hotseat.algorithms.distillation import (
    Divergence,
    classes_of_top,
    divergence,
    divergence_from_logits,
    divergence_from_top,
    forward_kl,
    generalised_jsd,
    reverse_kl,
    top_log_probs,
)
from hotseat.errors import UserError
from hotseat.extensions import load
from hotseat.registry.divergences import DIVERGENCES

KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]
P = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 8), Fraction(1, 8)]  # the policy
Q = [Fraction(1, 8), Fraction(1, 2), Fraction(1, 4), Fraction(1, 8)]  # the teacher


def kl(a, b):
    return sum(float(x) * math.log(x / y) for x, y in zip(a, b, strict=True))


def by_formula(p, q, kind, beta):
    if kind == "forward_kl":
        return kl(q, p)
    if kind == "reverse_kl":
        return kl(p, q)
    middle = [beta * y + (1 - beta) * x for x, y in zip(p, q, strict=True)]
    return beta * kl(q, middle) + (1 - beta) * kl(p, middle)


def logits_of(probs):
    """Logits whose softmax are these: log-probs, moved by a constant."""
    return torch.tensor([[math.log(prob) + 3.7 for prob in probs]], dtype=torch.float64)


def test_four_tokens_by_hand():
    # In units of ln 2: log p is −1, −2, −3, −3 and log q −3, −1, −2, −3.
    log_p, log_q = (torch.tensor([values], dtype=torch.float64).log() for values in (map_floats(P), map_floats(Q)))
    assert_close(forward_kl(log_p, log_q), [math.log(2) * float(Fraction(1, 8) * -2 + Fraction(1, 2) + Fraction(1, 4))])
    assert_close(reverse_kl(log_p, log_q), [math.log(2) * float(Fraction(1, 2) * 2 - Fraction(1, 4) - Fraction(1, 8))])
    # The middle of the two is 5/16, 3/8, 3/16, 1/8.
    middle = [Fraction(5, 16), Fraction(3, 8), Fraction(3, 16), Fraction(1, 8)]
    assert_close(generalised_jsd(log_p, log_q, beta=0.5), [kl(P, middle) / 2 + kl(Q, middle) / 2])


def map_floats(values):
    return [float(value) for value in values]


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_logits_are_taken_at_the_temperature(kind, beta):
    # At temperature ½ probabilities are squared and divided by their sum: p becomes 32, 8, 2, 2 of 44.
    squares = [[value**2 / sum(each**2 for each in values) for value in values] for values in (P, Q)]
    how = Divergence(kind, temperature=0.5, beta=beta)
    expected = by_formula(*squares, kind, Fraction(beta))
    assert_close(divergence_from_logits(logits_of(P), logits_of(Q), how), [expected])


@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_the_tail_is_one_more_class_or_left_out(kind, beta):
    # The teacher's two most likely tokens are 1 and 2: p has 1/4 and 1/8 there, 5/8 elsewhere; q 1/2 and 1/4, and 1/4.
    other = by_formula([P[1], P[2], Fraction(5, 8)], [Q[1], Q[2], Fraction(1, 4)], kind, Fraction(beta))
    alone = by_formula(
        [Fraction(2, 3), Fraction(1, 3)], [Fraction(2, 3), Fraction(1, 3)], kind, Fraction(beta)
    )  # of both, by chance
    for tail, expected in (("other", other), ("renormalise", alone)):
        how = Divergence(kind, beta=beta, top_k=2, tail=tail)
        ids, log_probs = top_log_probs(logits_of(Q), how)
        assert ids.tolist() == [[1, 2]]
        assert log_probs.shape == (1, 3 if tail == "other" else 2)
        assert_close(divergence_from_top(logits_of(P), ids, log_probs, how), [expected])


@quick
@given(seeds)
def test_divergences_from_logits_equal_a_loop(seed):
    student, teacher = numbers(seed, 5, 7, scale=3), numbers(seed + 1, 5, 7, scale=3)
    for kind, beta in KINDS:
        for temperature in (0.5, 1.0, 3.0):
            how = Divergence(kind, temperature=temperature, beta=beta)
            found = divergence_from_logits(student, teacher, how)
            for row in range(5):
                p, q = (soft(values[row].tolist(), temperature) for values in (student, teacher))
                assert_close(found[row], by_formula(p, q, kind, beta), 1e-10)
            for top_k in (1, 3, 6):
                cut = Divergence(kind, temperature=temperature, beta=beta, top_k=top_k)
                found = divergence_from_top(student, *top_log_probs(teacher, cut), cut)
                for row in range(5):
                    p, q = (soft(values[row].tolist(), temperature) for values in (student, teacher))
                    order = sorted(range(7), key=lambda token, q=q: -q[token])
                    chosen, others = order[:top_k], order[top_k:]
                    p, q = ([*(x[token] for token in chosen), sum(x[token] for token in others)] for x in (p, q))
                    assert_close(found[row], by_formula(p, q, kind, beta), 1e-9)


def soft(logits, temperature):
    powers = [math.exp(value / temperature) for value in logits]
    return [power / sum(powers) for power in powers]


@quick
@given(seeds)
def test_a_divergence_is_0_of_equals_and_a_lower_bound_of_more_classes(seed):
    student, teacher = numbers(seed, 4, 9, scale=2), numbers(seed + 1, 4, 9, scale=2)
    for kind, beta in KINDS:
        whole = divergence_from_logits(student, teacher, Divergence(kind, beta=beta))
        assert_close(divergence_from_logits(teacher, teacher + 1, Divergence(kind, beta=beta)), torch.zeros(4), 1e-12)
        before = torch.zeros(4, dtype=torch.float64)
        for top_k in range(1, 9):
            how = Divergence(kind, beta=beta, top_k=top_k)
            found = divergence_from_top(student, *top_log_probs(teacher, how), how)
            assert (found >= before - 1e-12).all()
            before = found
        assert_close(before, whole, 1e-10)  # eight of nine classes, and the ninth alone


def test_the_tail_of_a_sure_teacher_keeps_its_digits():
    """In float32 one minus the sum of the others would be 0, and its logarithm infinite."""
    logits = torch.tensor([[40.0, 1.0, 0.0, -1.0]], requires_grad=True)
    how = Divergence("reverse_kl", top_k=1)
    ids, log_probs = top_log_probs(logits.detach(), how)
    tail = math.log(math.exp(1) + 1 + math.exp(-1)) - 40
    assert log_probs[0, 1].item() == pytest.approx(tail, rel=1e-6)
    found = divergence_from_top(logits - torch.tensor([5.0, 0, 0, 0]), ids, log_probs, how)
    found.sum().backward()
    assert found.item() >= 0
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("tail", ["other", "renormalise"])
def test_classes_follow_from_log_probs_of_the_likely_tokens_alone(tail):
    teacher, how = numbers(5, 4, 9, scale=2), Divergence("reverse_kl", top_k=3, tail=tail)
    ids, expected = top_log_probs(teacher, how)
    log_probs = teacher.log_softmax(-1).gather(-1, ids.long())
    assert_close(classes_of_top(log_probs, tail).double(), expected, 1e-6)
    rest = classes_of_top(torch.tensor([[math.log(0.5), math.log(0.25)]]), "other")
    assert_close(rest.exp(), torch.tensor([[0.5, 0.25, 0.25]]), 1e-6)
    # A sum of 1 up to rounding, or above it, leaves a rest, so that nothing is infinite.
    sure = classes_of_top(torch.tensor([[0.0, -40.0], [1e-7, -40.0]]), "other")
    assert sure[:, 2].tolist() == pytest.approx([math.log(2**-23)] * 2, abs=1e-5)


def test_padding_of_vocabularies_does_not_count():
    """A checkpoint with 12 rows of which 9 are tokens is compared with one of 9."""
    student, teacher = numbers(0, 3, 9), numbers(1, 3, 12, scale=4)
    for kind, beta in KINDS:
        how = Divergence(kind, beta=beta, vocab_size=9)
        expected = divergence_from_logits(student, teacher[:, :9], Divergence(kind, beta=beta))
        assert_close(divergence_from_logits(student, teacher, how), expected)
        for tail in ("other", "renormalise"):
            how = Divergence(kind, beta=beta, vocab_size=9, top_k=4, tail=tail)
            plain = Divergence(kind, beta=beta, top_k=4, tail=tail)
            expected = divergence_from_top(student, *top_log_probs(teacher[:, :9], plain), plain)
            assert_close(divergence_from_top(student, *top_log_probs(teacher, how), how), expected)
            wider = torch.cat([student, numbers(2, 3, 3, scale=9)], -1)
            assert_close(divergence_from_top(wider, *top_log_probs(teacher, how), how), expected)


def test_small_and_large_beta_come_near_the_two_kls():
    log_p, log_q = (numbers(seed, 4, 6).log_softmax(-1) for seed in (0, 1))
    assert_close(generalised_jsd(log_p, log_q, beta=1e-6) / 1e-6, forward_kl(log_p, log_q), 1e-4)
    assert_close(generalised_jsd(log_p, log_q, beta=1 - 1e-6) / 1e-6, reverse_kl(log_p, log_q), 1e-4)
    assert (generalised_jsd(log_p, log_q, beta=0.5) <= math.log(2)).all()


def test_every_entry_computes_its_divergence():
    log_p, log_q = logits_of(P).log_softmax(-1), logits_of(Q).log_softmax(-1)
    assert all(name == entry.name and callable(load(entry.function)) for name, entry in DIVERGENCES.items())
    for name, entry in DIVERGENCES.items():
        found = divergence(log_p, log_q, Divergence(name, beta=0.25))
        assert_close(found, [by_formula(P, Q, name, Fraction(1, 4))])
        assert entry.has_beta == (float(found) != float(divergence(log_p, log_q, Divergence(name, beta=0.75))))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "reverse"}, "did you mean reverse_kl"),
        ({"kind": "jsd", "beta": 1.0}, "at the ends use forward_kl and reverse_kl"),
        ({"kind": "jsd", "temperature": 0.0}, "temperature 0.0: set it above 0"),
        ({"kind": "jsd", "top_k": 0}, "over 0 tokens"),
    ],
)
def test_what_is_no_divergence_is_refused(options, says):
    with pytest.raises(UserError, match=says):
        Divergence(**options)


def test_more_tokens_than_a_vocabulary_has_are_refused():
    with pytest.raises(UserError, match=r"top_k is 4, and the vocabulary has 4 tokens: set a smaller one, or null"):
        top_log_probs(logits_of(Q), Divergence("jsd", top_k=4))
