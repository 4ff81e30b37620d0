import math

import pytest
import torch
from algorithm_cases import (
    NAN,
    assert_close,
    layouts,
    make_layout,
    numbers,
    quick,
    sampled_tokens,
    seeds,
    some_order,
    with_rubbish,
)
from hypothesis import given
from hypothesis import strategies as st

from hotseat.algorithms.supervised_loss import (
    answer_nll,
    dpo_loss,
    episode_log_probs,
    ipo_loss,
    orpo_loss,
    pairwise_loss,
    sft_loss,
    simpo_loss,
)
from hotseat.errors import UserError


def _sigmoid(x):
    return 1 / (1 + math.exp(-x))


# one pair: log-ratios to the reference 0.5 (chosen) and -1.5 (rejected): delta 2
PAIR = [torch.tensor([x], dtype=torch.float64) for x in (-3.0, -6.0, -3.5, -4.5)]


def test_sft_loss_is_the_negative_log_prob_of_masked_tokens():
    log_probs = torch.tensor([NAN, -0.5, -2.0], dtype=torch.float64, requires_grad=True)
    loss = sft_loss(log_probs, torch.tensor([False, True, True]))
    assert_close(loss, [0, 0.5, 2])
    loss.sum().backward()
    assert_close(log_probs.grad, [0, -1, -1])


def test_the_log_prob_of_an_answer_is_the_sum_over_its_segments():
    layout = make_layout([[[0, 1, 1], [0, 1]], [[0]], [[1]]])
    log_probs = torch.tensor([NAN, -1, -2, NAN, -4, NAN, -8], dtype=torch.float64)
    assert_close(episode_log_probs(log_probs, layout), [-7, 0, -8])


@quick
@given(layouts(), seeds)
def test_answer_log_probs_and_sft_equal_loops_and_read_no_masked_token(layout, seed):
    log_probs = numbers(seed, layout.num_tokens)
    dirty = with_rubbish(log_probs, layout.mask).requires_grad_()
    sums = [sum(float(log_probs[t]) for t in sampled_tokens(layout, e)) for e in range(layout.num_episodes)]
    answers, losses = episode_log_probs(dirty, layout), sft_loss(dirty, layout.mask)
    assert_close(answers, sums)
    assert_close(losses, [-float(x) if m else 0.0 for x, m in zip(log_probs, layout.mask, strict=True)])
    (answers.sum() + losses.sum()).backward()
    assert_close(dirty.grad, torch.zeros(layout.num_tokens))  # +1 from the sum, -1 from the loss, never NaN


def test_dpo_of_one_pair():
    # beta 0.1: -log sigmoid(0.2) = 0.5981389; rewards 0.1 * 0.5 and 0.1 * -1.5
    result = dpo_loss(*PAIR, beta=0.1)
    assert_close(result.loss, [-math.log(_sigmoid(0.2))])
    assert_close(result.loss, [0.5981388693815918])
    assert_close(result.chosen_rewards, [0.05])
    assert_close(result.rejected_rewards, [-0.15])


def test_cdpo_mixes_in_the_flipped_label():
    # 0.9 * 0.5981389 + 0.1 * -log sigmoid(-0.2) = 0.9 * 0.5981389 + 0.1 * 0.7981389 = 0.6181389
    assert_close(dpo_loss(*PAIR, beta=0.1, label_smoothing=0.1).loss, [0.6181388693815918])


def test_the_nll_term_is_the_mean_over_each_answer():
    # 3 / 4 tokens, 1 / 1, and an answer without tokens
    assert_close(answer_nll(torch.tensor([-3.0, -1.0, 0.0]), torch.tensor([4, 1, 0])), [0.75, 1.0, 0.0])


def test_ipo_summed_and_length_normalised():
    # beta 0.1: summed (2 - 5)^2 = 9; with 2 and 3 tokens (0.5 / 2 + 1.5 / 3 - 5)^2 = 4.25^2 = 18.0625
    assert_close(ipo_loss(*PAIR, beta=0.1).loss, [9.0])
    lengths = {"chosen_lengths": torch.tensor([2]), "rejected_lengths": torch.tensor([3])}
    result = ipo_loss(*PAIR, beta=0.1, **lengths)
    assert_close(result.loss, [18.0625])
    assert_close(result.chosen_rewards, [0.05])


def test_orpo_and_simpo_of_one_pair():
    # means log 1/2 over 2 tokens and log 1/4 over 1: odds 1 and 1/3, so their ratio is 3 and sigmoid(log 3) = 3/4
    answers = torch.tensor([2 * math.log(0.5)]), torch.tensor([math.log(0.25)]), torch.tensor([2]), torch.tensor([1])
    result = orpo_loss(*answers, beta=0.5)
    assert_close(result.loss, [math.log(2) - 0.5 * math.log(0.75)], 1e-6)
    assert_close(result.chosen_rewards, [0.5 * math.log(0.5)], 1e-6)
    assert_close(result.rejected_rewards, [0.5 * math.log(0.25)], 1e-6)
    # beta 2: 2 * log 2 - 0.5
    result = simpo_loss(*answers, beta=2.0, gamma=0.5)
    assert_close(result.loss, [-math.log(_sigmoid(2 * math.log(2) - 0.5))], 1e-6)
    assert_close(result.chosen_rewards, [2 * math.log(0.5)], 1e-6)


@quick
@given(seeds, st.sampled_from([0.05, 2.0]))
def test_losses_without_a_reference_equal_a_loop_in_loss_and_gradient(seed, beta):
    chosen, rejected = ((-numbers(seed + i, 6, scale=9).abs() - 0.01).requires_grad_() for i in range(2))
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    orpo, simpo, gradients = [], [], []
    for c, r, n in zip(chosen.tolist(), rejected.tolist(), lengths.tolist(), strict=True):
        one, other = c / n, r / (7 - n)
        ratio = (math.exp(one) / (1 - math.exp(one))) / (math.exp(other) / (1 - math.exp(other)))
        orpo.append(-one - beta * math.log(ratio / (1 + ratio)))
        simpo.append(-math.log(_sigmoid(beta * (one - other) - 0.5)))
        # d log odds / d one = 1 / (1 - e^one), and d -log sigmoid(x) / dx = -(1 - sigmoid(x)) = -1 / (1 + ratio)
        gradients.append((-1 - beta / (1 + ratio) / (1 - math.exp(one))) / n)
    result = orpo_loss(chosen, rejected, lengths, 7 - lengths, beta=beta)
    assert_close(result.loss, orpo, 1e-8)
    result.loss.sum().backward()
    assert_close(chosen.grad, gradients, 1e-8)
    assert_close(simpo_loss(chosen, rejected, lengths, 7 - lengths, beta=beta, gamma=0.5).loss, simpo, 1e-8)


def test_orpo_of_certain_and_of_hopeless_answers_is_finite():
    chosen = torch.tensor([0.0, -1e-30, -1e4, -1e-3], requires_grad=True)
    rejected = torch.tensor([-1.0, 0.0, -2e4, -1e-30], requires_grad=True)
    ones = torch.ones(4, dtype=torch.int64)
    orpo_loss(chosen, rejected, ones, ones, beta=0.1).loss.sum().backward()
    assert chosen.grad.isfinite().all()
    assert rejected.grad.isfinite().all()


@quick
@given(seeds, st.sampled_from([0.0, 0.1]), st.sampled_from([0.05, 1.0]))
def test_preference_losses_equal_a_loop_and_keep_order(seed, smoothing, beta):
    inputs = [numbers(seed + i, 6, scale=3) for i in range(4)]
    lengths = torch.tensor([1, 2, 3, 4, 5, 6])
    dpo, ipo, ipo_mean = [], [], []
    for c, r, rc, rr, n in zip(*(x.tolist() for x in inputs), lengths.tolist(), strict=True):
        logit = beta * ((c - rc) - (r - rr))
        dpo.append(-(1 - smoothing) * math.log(_sigmoid(logit)) - smoothing * math.log(_sigmoid(-logit)))
        ipo.append(((c - rc) - (r - rr) - 1 / (2 * beta)) ** 2)
        ipo_mean.append(((c - rc) / n - (r - rr) / (7 - n) - 1 / (2 * beta)) ** 2)
    options = {"beta": beta, "label_smoothing": smoothing}
    result = dpo_loss(*inputs, **options)
    assert_close(result.loss, dpo, 1e-10)
    assert_close(ipo_loss(*inputs, beta=beta).loss, ipo, 1e-10)
    both = {"chosen_lengths": lengths, "rejected_lengths": 7 - lengths}
    assert_close(ipo_loss(*inputs, beta=beta, **both).loss, ipo_mean, 1e-10)
    order = some_order(seed, 6)
    shuffled = dpo_loss(*(x[order] for x in inputs), **options)
    assert_close(shuffled.loss, result.loss[order])
    assert_close(shuffled.chosen_rewards, result.chosen_rewards[order])


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
def test_preference_losses_reach_only_the_policy_and_keep_precision(loss):
    inputs = [numbers(i, 3, grad=True) for i in range(4)]
    result = loss(*inputs, beta=0.1)
    result.loss.sum().backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    assert inputs[2].grad is None
    assert inputs[3].grad is None
    assert not result.chosen_rewards.requires_grad
    assert result.loss.dtype == torch.float64
    assert loss(*[x.detach().bfloat16() for x in inputs], beta=0.1).loss.dtype == torch.float32


@pytest.mark.parametrize("loss", [dpo_loss, ipo_loss])
@quick
@given(seed=seeds, cuts=st.lists(st.integers(0, 6), max_size=3))
def test_pairs_may_be_cut_into_micro_batches(loss, seed, cuts):
    inputs = [numbers(seed + i, 6) for i in range(4)]
    whole = loss(*inputs, beta=0.2).loss.mean()
    parts = torch.tensor_split(torch.arange(6), sorted(cuts))
    assert_close(sum(loss(*(x[part] for x in inputs), beta=0.2).loss.sum() / 6 for part in parts), whole)


def test_pairwise_loss_with_and_without_margin():
    chosen, rejected = torch.tensor([2.0], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64)
    margin = torch.tensor([0.5])
    for kind in ("sigmoid", "logexp"):
        # log(1 + e^-1) = 0.3132617; with margin 0.5: log(1 + e^-0.5) = 0.4740770
        assert_close(pairwise_loss(chosen, rejected, kind=kind), [0.31326168751822286])
        assert_close(pairwise_loss(chosen, rejected, margin=margin, kind=kind), [0.4740769841801067])


@quick
@given(seeds, st.sampled_from(["sigmoid", "logexp"]))
def test_pairwise_loss_equals_a_loop_in_loss_and_gradient(seed, kind):
    chosen, rejected = numbers(seed, 6, scale=4, grad=True), numbers(seed + 1, 6, scale=4, grad=True)
    margin = numbers(seed + 2, 6).abs()
    loss = pairwise_loss(chosen, rejected, margin=margin, kind=kind)
    gaps = (chosen - rejected - margin).tolist()
    assert_close(loss, [math.log1p(math.exp(-gap)) for gap in gaps])
    loss.sum().backward()
    assert_close(chosen.grad, [-_sigmoid(-gap) for gap in gaps])
    assert_close(rejected.grad, [_sigmoid(-gap) for gap in gaps])
    order = some_order(seed, 6)
    assert_close(pairwise_loss(chosen[order], rejected[order], margin=margin[order], kind=kind), loss[order])


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
def test_pairwise_loss_does_not_overflow(kind):
    chosen = torch.tensor([-500.0, 500.0], requires_grad=True)
    loss = pairwise_loss(chosen, torch.tensor([500, -500]), kind=kind)
    assert_close(loss, [1000, 0])
    loss.sum().backward()
    assert_close(chosen.grad, [-1, 0])


def test_supervised_losses_that_cannot_work_are_refused():
    with pytest.raises(UserError, match=r"beta is 0: .* set it above 0"):
        dpo_loss(*PAIR, beta=0)
    with pytest.raises(UserError, match=r"beta is -1: "):
        ipo_loss(*PAIR, beta=-1)
    for smoothing in (-0.1, 0.5):
        with pytest.raises(UserError, match=rf"label_smoothing is {smoothing}: .* set it in \[0, 0.5\)"):
            dpo_loss(*PAIR, beta=0.1, label_smoothing=smoothing)
    for loss, options in ((orpo_loss, {}), (simpo_loss, {"gamma": 0.5})):
        with pytest.raises(UserError, match=r"beta is 0: "):
            loss(*PAIR[:2], torch.tensor([1]), torch.tensor([1]), beta=0, **options)
    with pytest.raises(UserError, match=r"lengths of both answers .* or of neither"):
        ipo_loss(*PAIR, beta=0.1, chosen_lengths=torch.tensor([1]))
    with pytest.raises(UserError, match=r"reward-model loss 'hinge' is not known: use one of sigmoid, logexp"):
        pairwise_loss(torch.zeros(1), torch.zeros(1), kind="hinge")
