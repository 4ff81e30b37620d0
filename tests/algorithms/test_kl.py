import math
from dataclasses import asdict

import pytest
import torch
from algorithm_cases import NAN, assert_close, numbers, quick, seeds, some_order, with_rubbish
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.kl import AdaptiveKl, FixedKl, distillation_advantages, estimate_kl
from hotseat.algorithms.policy_loss import ppo_loss
from hotseat.errors import NonFiniteError, UserError

ESTIMATORS = ("k1", "k2", "k3")
ALL = torch.ones(2, dtype=torch.bool)


def test_the_three_estimates_of_two_tokens():
    # d = -1 - (-2) = 1 and -3 - (-1) = -2
    log_probs = torch.tensor([-1.0, -3.0], dtype=torch.float64)
    reference = torch.tensor([-2.0, -1.0], dtype=torch.float64)
    assert_close(estimate_kl(log_probs, reference, ALL, "k1"), [1, -2])
    assert_close(estimate_kl(log_probs, reference, ALL, "k2"), [0.5, 2])
    # e^-1 - 1 + 1 = 0.3678794; e^2 - 1 - 2 = 4.3890561
    assert_close(estimate_kl(log_probs, reference, ALL, "k3"), [0.36787944117144233, 4.38905609893065])


@quick
@given(seeds, st.sampled_from(ESTIMATORS))
def test_estimates_equal_a_loop_with_the_clamp(seed, estimator):
    log_probs, reference = numbers(seed, 12, scale=4), numbers(seed + 1, 12, scale=4)
    mask = numbers(seed + 2, 12) > -0.5
    expected = []
    for new, old, sampled in zip(log_probs.tolist(), reference.tolist(), mask.tolist(), strict=True):
        d = new - old
        estimate = {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) - 1 + d}[estimator]
        expected.append(max(-10.0, min(10.0, estimate)) if sampled else 0.0)
    assert_close(estimate_kl(log_probs, reference, mask, estimator), expected)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_wild_tokens_are_clamped_and_have_no_gradient(estimator):
    log_probs = torch.tensor([-1000.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.0, -1000.0, -torch.inf], dtype=torch.float64)
    estimate = estimate_kl(log_probs, reference, torch.ones(3, dtype=torch.bool), estimator)
    assert_close(estimate, [-10 if estimator == "k1" else 10, 10, 10])
    estimate.sum().backward()
    assert_close(log_probs.grad, [0, 0, 0])


@pytest.mark.parametrize(("estimator", "expected"), [("k1", [1, 1]), ("k2", [1, -2]), ("k3", [0.63212056, -6.3890561])])
def test_gradients_of_the_estimates(estimator, expected):
    # d = 1, -2: the derivatives are 1, d, and 1 - e^-d = 1 - 0.3678794, 1 - 7.3890561
    log_probs = torch.tensor([-1.0, -3.0], dtype=torch.float64, requires_grad=True)
    estimate_kl(log_probs, torch.tensor([-2.0, -1.0], dtype=torch.float64), ALL, estimator).sum().backward()
    assert_close(log_probs.grad, expected, 1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_gradient_of_each_estimate_over_all_tokens(seed):
    """Over every token of a vocabulary of six, weighted by the policy: what a loss of many samples follows."""
    logits = numbers(seed, 6, grad=True)
    reference = numbers(seed + 1, 6).log_softmax(0)
    every = torch.ones(6, dtype=torch.bool)

    def gradient(loss):
        (found,) = torch.autograd.grad(loss, logits, retain_graph=True)
        return found

    def mean_gradient(estimator):
        log_probs = logits.log_softmax(0)
        return gradient((log_probs.exp().detach() * estimate_kl(log_probs, reference, every, estimator)).sum())

    log_probs = logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    reversed_kl = (reference.exp() * (reference - log_probs)).sum()
    assert_close(mean_gradient("k1"), torch.zeros(6, dtype=torch.float64))
    assert_close(mean_gradient("k2"), gradient(kl))
    assert_close(mean_gradient("k3"), gradient(reversed_kl))


@quick
@given(seeds)
def test_distillation_has_the_gradient_of_the_kl_to_the_teacher(seed):
    """Over every token of a vocabulary of six, weighted by the policy, as above."""
    logits = numbers(seed, 6, grad=True)
    log_probs, teacher = logits.log_softmax(0), numbers(seed + 1, 6).log_softmax(0)
    every = torch.ones(6, dtype=torch.bool)
    advantages = distillation_advantages(log_probs, teacher, every)
    losses = ppo_loss(log_probs, log_probs.detach(), advantages, every, eps_low=0.2, eps_high=0.2).loss
    (found,) = torch.autograd.grad((log_probs.exp().detach() * losses).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad((log_probs.exp() * (log_probs - teacher)).sum(), logits)
    assert_close(found, expected)


@quick
@given(seeds)
def test_distillation_equals_a_loop_and_never_reads_unsampled_tokens(seed):
    mask, old, teacher = numbers(seed, 9) > 0, numbers(seed + 1, 9, grad=True), numbers(seed + 2, 9)
    expected = [float(t) - float(o.detach()) if m else 0.0 for o, t, m in zip(old, teacher, mask, strict=True)]
    found = distillation_advantages(with_rubbish(old, mask), with_rubbish(teacher, mask), mask)
    assert_close(found, expected)
    assert not found.requires_grad


@quick
@given(seeds, st.sampled_from(ESTIMATORS))
def test_kl_of_unsampled_tokens_never_matters(seed, estimator):
    mask = numbers(seed, 9) > 0
    clean = numbers(seed + 1, 9, grad=True), numbers(seed + 2, 9)
    dirty = with_rubbish(clean[0], mask), with_rubbish(clean[1], mask)
    for log_probs, reference in (clean, dirty):
        estimate_kl(log_probs, reference, mask, estimator).sum().backward()
    assert torch.equal(estimate_kl(*clean, mask, estimator), estimate_kl(*dirty, mask, estimator))
    assert torch.equal(clean[0].grad, dirty[0].grad)
    order = some_order(seed, 9)
    swapped = estimate_kl(clean[0][order], clean[1][order], mask[order], estimator)
    assert_close(swapped, estimate_kl(*clean, mask, estimator)[order])


def test_an_unknown_estimator_is_refused():
    with pytest.raises(UserError, match=r"kl estimator 'k4' is not known: use one of k1, k2, k3"):
        estimate_kl(torch.zeros(2), torch.zeros(2), ALL, "k4")


def test_a_fixed_coefficient_stays():
    assert FixedKl(0.01).updated(kl=5.0, num_samples=128) == FixedKl(0.01)


def test_the_adaptive_coefficient_moves_towards_the_target():
    controller = AdaptiveKl(coefficient=0.1, target=6.0, horizon=10000)
    # KL 6.6: error 0.1; 0.1 * (1 + 0.1 * 1000 / 10000) = 0.101
    assert controller.updated(6.6, 1000).coefficient == pytest.approx(0.101)
    # KL 60: error 9, clipped to 0.2: 0.1 * 1.02. KL 0: error -1, clipped to -0.2: 0.1 * 0.98.
    assert controller.updated(60.0, 1000).coefficient == pytest.approx(0.102)
    assert controller.updated(0.0, 1000).coefficient == pytest.approx(0.098)
    assert controller.updated(6.0, 1000) == controller


def test_a_controller_restored_from_its_fields_goes_on_where_it_was():
    one = AdaptiveKl(0.1, 6.0, 10000).updated(9.0, 512)
    assert AdaptiveKl(**asdict(one)).updated(3.0, 512) == one.updated(3.0, 512)


@quick
@given(st.lists(st.floats(0, 100), max_size=20), st.integers(1, 4000))
def test_the_adaptive_coefficient_equals_a_loop_and_stays_positive(measured, num_samples):
    controller, expected = AdaptiveKl(0.05, 2.0, 10000), 0.05
    for kl in measured:
        controller = controller.updated(kl, num_samples)
        error = kl / 2.0 - 1
        expected *= 1 + (0.2 if error > 0.2 else -0.2 if error < -0.2 else error) * num_samples / 10000
    assert controller.coefficient == pytest.approx(expected)
    assert controller.coefficient > 0


def test_a_controller_that_cannot_work_is_refused():
    with pytest.raises(UserError, match=r"kl_target is 0: .* set it above 0"):
        AdaptiveKl(0.1, target=0, horizon=100)
    with pytest.raises(UserError, match=r"kl_horizon is -1: .* set it above 0"):
        AdaptiveKl(0.1, target=1.0, horizon=-1)
    with pytest.raises(UserError, match=r"kl_horizon 1000 is too short for 8192 samples .* above 1638.4"):
        AdaptiveKl(0.1, target=6.0, horizon=1000).updated(1.0, 8192)
    with pytest.raises(NonFiniteError, match=r"the measured KL is nan: the coefficient 0.1 would be lost"):
        AdaptiveKl(0.1, target=6.0, horizon=1000).updated(NAN, 10)
