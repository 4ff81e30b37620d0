"""Our supervised losses against TRL's own code, loss and gradient in float64."""

import importlib
import math

import pytest
import torch
from algorithm_cases import assert_close, assert_same_gradients, make_layout, numbers

from hotseat.algorithms.aggregation import loss_weights, weighted_sum
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

pytestmark = pytest.mark.slow

# three chosen answers, then three rejected ones; no first token is learned, as it has nothing before it
LAYOUT = make_layout([[[0, 1, 1]], [[0, 0, 1]], [[0, 1, 1, 1]], [[0, 1]], [[0, 1, 1, 1, 1]], [[0, 0, 1]]])
CHOSEN, REJECTED = slice(0, 3), slice(3, 6)
BETA = 0.3


@pytest.fixture(scope="module")
def trl():
    return importlib.import_module("trl_oracle")


def _inputs(seed, layout=LAYOUT):
    ours = numbers(seed, layout.num_tokens, grad=True)
    return ours, ours.detach().clone().requires_grad_(), numbers(seed + 100, layout.num_tokens)


def _answers(log_probs, reference, layout=LAYOUT):
    policy, reference = episode_log_probs(log_probs, layout), episode_log_probs(reference, layout)
    return policy[CHOSEN], policy[REJECTED], reference[CHOSEN], reference[REJECTED]


@pytest.mark.parametrize("seed", range(3))
def test_dpo_equals_trl_sigmoid(trl, seed):
    ours, theirs, reference = _inputs(seed)
    our_loss = dpo_loss(*_answers(ours, reference), beta=BETA).loss.mean()
    assert_same_gradients(our_loss, trl.dpo_loss(["sigmoid"], LAYOUT, theirs, reference, beta=BETA), ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_cdpo_equals_trl_smoothed_aot_of_a_single_pair(trl, seed):
    # TRL has cDPO only inside AOT, which sorts the pairs of a batch: with one pair there is nothing to sort.
    layout = make_layout([[[0, 1, 1]], [[0, 1]]])
    ours, theirs, reference = _inputs(seed, layout)
    policy, reference_sums = episode_log_probs(ours, layout), episode_log_probs(reference, layout)
    pair = (policy[:1], policy[1:], reference_sums[:1], reference_sums[1:])
    our_loss = dpo_loss(*pair, beta=BETA, label_smoothing=0.2).loss.mean()
    their_loss = trl.dpo_loss(["aot"], layout, theirs, reference, beta=BETA, label_smoothing=0.2)
    assert_same_gradients(our_loss, their_loss, ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_ipo_with_lengths_equals_trl(trl, seed):
    ours, theirs, reference = _inputs(seed)
    lengths = LAYOUT.sampled_per_episode
    our_loss = ipo_loss(
        *_answers(ours, reference), beta=BETA, chosen_lengths=lengths[CHOSEN], rejected_lengths=lengths[REJECTED]
    ).loss.mean()
    assert_same_gradients(our_loss, trl.dpo_loss(["ipo"], LAYOUT, theirs, reference, beta=BETA), ours, theirs)


def test_summed_ipo_equals_trl_on_answers_of_one_token(trl):
    layout = make_layout([[[0, 1]]] * 6)
    ours, theirs, reference = _inputs(3, layout)
    our_loss = ipo_loss(*_answers(ours, reference, layout), beta=BETA).loss.mean()
    assert_same_gradients(our_loss, trl.dpo_loss(["ipo"], layout, theirs, reference, beta=BETA), ours, theirs)


def test_dpo_with_token_mean_nll_equals_trl_sft_term(trl):
    ours, theirs, reference = _inputs(4)
    chosen_tokens = LAYOUT.mask & (LAYOUT.token_episode < 3)
    nll = sft_loss(ours, chosen_tokens).sum() / chosen_tokens.sum()
    our_loss = dpo_loss(*_answers(ours, reference), beta=BETA).loss.mean() + 0.4 * nll
    their_loss = trl.dpo_loss(["sigmoid", "sft"], LAYOUT, theirs, reference, beta=BETA, loss_weights=[1.0, 0.4])
    assert_same_gradients(our_loss, their_loss, ours, theirs)


def test_dpo_with_mean_of_means_nll_equals_trl_on_answers_of_one_length(trl):
    layout = make_layout([[[0, 1, 1]]] * 6)
    ours, theirs, reference = _inputs(5, layout)
    answers = _answers(ours, reference, layout)
    our_loss = (dpo_loss(*answers, beta=BETA).loss + 0.4 * answer_nll(answers[0], torch.tensor([2, 2, 2]))).mean()
    their_loss = trl.dpo_loss(["sigmoid", "sft"], layout, theirs, reference, beta=BETA, loss_weights=[1.0, 0.4])
    assert_same_gradients(our_loss, their_loss, ours, theirs)


def _of_logits(seed, lengths, prompt):
    """Logits of pairs, chosen first, with the summed log-probs and the lengths of their answers."""
    width, vocabulary = max(lengths) + prompt, 5
    token_ids = torch.arange(len(lengths) * width).view(len(lengths), width) * 3 % vocabulary
    position = torch.arange(width)
    mask = (position >= prompt) & (position < prompt + torch.tensor(lengths)[:, None])
    ours = numbers(seed, len(lengths), width, vocabulary, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    token_log_probs = ours[:, :-1].log_softmax(-1).gather(-1, token_ids[:, 1:, None]).squeeze(-1)
    sums, half = (token_log_probs * mask[:, 1:]).sum(-1), len(lengths) // 2
    answers = (sums[:half], sums[half:], torch.tensor(lengths[:half]), torch.tensor(lengths[half:]))
    return ours, theirs, answers, token_ids, mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", [[4, 4, 4, 3, 2, 1], [5, 3], [3, 5]])
def test_orpo_equals_trl_where_its_likelihood_is_of_the_answers(trl, seed, lengths):
    """TRL's likelihood term counts prompts, and is a mean over tokens: here prompts have a token, which has none."""
    ours, theirs, answers, token_ids, mask = _of_logits(seed, lengths, prompt=1)
    our_loss = orpo_loss(*answers, beta=BETA).loss.mean()
    assert_same_gradients(our_loss, trl.orpo_loss(token_ids, mask, theirs, beta=BETA), ours, theirs)


@pytest.mark.parametrize("seed", range(3))
def test_simpo_equals_trl(trl, seed):
    ours, theirs, answers, token_ids, mask = _of_logits(seed, [2, 4, 3, 3, 2, 1], prompt=2)
    our_loss = simpo_loss(*answers, beta=2.0, gamma=0.7).loss.mean()
    assert_same_gradients(our_loss, trl.simpo_loss(token_ids, mask, theirs, beta=2.0, gamma=0.7), ours, theirs)


def test_summed_ipo_and_cdpo_equal_a_derivation_of_openrlhfs_formulas_in_loss_and_gradient():
    """OpenRLHF sums log-probs over each answer: loss and gradient worked out with respect to each token."""
    ours, _, reference = _inputs(9)
    beta, smoothing = 0.2, 0.1
    layout, policy = LAYOUT, ours.detach()
    sums = [float((policy - reference)[(layout.token_episode == e) & layout.mask].sum()) for e in range(6)]
    for kind in ("ipo", "cdpo"):
        loss, gradient = 0.0, torch.zeros_like(policy)
        for pair in range(3):
            delta = sums[pair] - sums[pair + 3]
            sigma = 1 / (1 + math.exp(-beta * delta))
            if kind == "ipo":
                loss += (delta - 1 / (2 * beta)) ** 2 / 3
                slope = 2 * (delta - 1 / (2 * beta)) / 3
            else:
                loss += -((1 - smoothing) * math.log(sigma) + smoothing * math.log(1 - sigma)) / 3
                slope = -beta * ((1 - smoothing) * (1 - sigma) - smoothing * sigma) / 3
            gradient[(layout.token_episode == pair) & layout.mask] = slope
            gradient[(layout.token_episode == pair + 3) & layout.mask] = -slope
        answers = _answers(ours, reference)
        result = ipo_loss(*answers, beta=beta) if kind == "ipo" else dpo_loss(*answers, beta=beta, label_smoothing=0.1)
        ours.grad = None
        result.loss.mean().backward()
        assert_close(result.loss.mean(), torch.tensor(loss, dtype=torch.float64), 1e-10)
        assert_close(ours.grad, gradient, 1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_sft_equals_trl(trl, seed):
    ours, theirs, _ = _inputs(seed)
    weights = loss_weights(LAYOUT, "token_mean", dtype=torch.float64)
    assert_same_gradients(
        weighted_sum(sft_loss(ours, LAYOUT.mask), weights), trl.sft_loss(LAYOUT, theirs), ours, theirs
    )


def test_sft_on_trl_log_probs_equals_cross_entropy_of_the_logits(trl):
    from trl.trainer.utils import selective_log_softmax

    tokens = torch.arange(LAYOUT.num_tokens) % 7
    ours = numbers(6, LAYOUT.num_tokens, 7, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    weights = loss_weights(LAYOUT, "token_mean", dtype=torch.float64)
    our_loss = weighted_sum(sft_loss(selective_log_softmax(ours, tokens), LAYOUT.mask), weights)
    their_loss = torch.nn.functional.cross_entropy(theirs, tokens.masked_fill(~LAYOUT.mask, -100))
    assert_same_gradients(our_loss, their_loss, ours, theirs)


@pytest.mark.parametrize("kind", ["sigmoid", "logexp"])
@pytest.mark.parametrize("with_margin", [False, True])
def test_pairwise_loss_equals_trl(trl, kind, with_margin):
    ours, theirs = numbers(7, 2, 5, scale=3, grad=True), numbers(7, 2, 5, scale=3, grad=True)
    margin = numbers(8, 5).abs() if with_margin else None
    our_loss = pairwise_loss(ours[0], ours[1], margin=margin, kind=kind).mean()
    assert_same_gradients(our_loss, trl.reward_loss(theirs[0], theirs[1], margin), ours, theirs)
