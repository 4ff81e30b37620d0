"""The losses of a translated config are TRL's, called with the values of TRL's config: loss and gradient in float64."""

import importlib

import pytest
import torch
from algorithm_cases import assert_close, make_layout, numbers
from trl_cases import trl_config

from hotseat.algorithms.advantages import compute_advantages
from hotseat.algorithms.aggregation import loss_weights
from hotseat.config.resolved import max_sampled_tokens
from hotseat.loop.settings.training_settings import policy_settings
from hotseat.loop.workers.losses import ADVANTAGES, OLD_LOG_PROBS, REFERENCE_LOG_PROBS, ROLLOUT_LOG_PROBS
from hotseat.loop.workers.preferences import Answers, PreferenceObjective
from hotseat.train.backend import Outputs
from hotseat.trl.from_config import from_trl
from hotseat.types import MicroBatch

pytestmark = pytest.mark.slow

# Four answers of two groups.
LAYOUT = make_layout([[[0, 1, 1, 1]], [[0, 1, 1]], [[0, 1]], [[0, 0, 1, 1, 1, 1]]])
GROUPS, REWARDS = torch.tensor([0, 0, 1, 1]), torch.tensor([1.0, 0.0, 0.25, 0.75], dtype=torch.float64)


@pytest.fixture(scope="module")
def oracle():
    return importlib.import_module("trl_oracle")


def our_loss(args, log_probs, old, rollout, reference):
    config = from_trl(args).config
    settings = policy_settings(config, optimizer_steps=2, kl_coefficient=config.algorithm.kl.coef)
    weights = loss_weights(LAYOUT, settings.aggregation, max_length=max_sampled_tokens(config), dtype=torch.float64)
    advantages = compute_advantages(
        settings.advantages.estimator, LAYOUT, REWARDS, groups=GROUPS, eps=1e-4
    ).advantages  # with TRL's eps
    fields = {ADVANTAGES: advantages, OLD_LOG_PROBS: old, ROLLOUT_LOG_PROBS: rollout}
    if config.algorithm.kl.coef:
        fields[REFERENCE_LOG_PROBS] = reference
    token_ids, sample_ids = torch.zeros(LAYOUT.num_tokens, dtype=torch.int64), ("a", "b", "c", "d")
    batch = MicroBatch(token_ids, LAYOUT.offsets, LAYOUT.mask, weights, fields, sample_ids)
    return settings.objective(Outputs(log_probs, None, None), batch)[0]


def their_loss(oracle, args, log_probs, old, rollout, reference):
    scale = {True: "group", False: "none"}.get(args.scale_rewards, args.scale_rewards)
    advantages = oracle.generated_batch(oracle.GRPOTrainer, REWARDS, args.num_generations, scale_rewards=scale)
    correction = None
    if args.use_vllm and args.vllm_importance_sampling_correction:
        correction = correction_of(args, old, rollout)
    return oracle.grpo_loss(
        args.loss_type,
        LAYOUT,
        log_probs,
        old,
        advantages["advantages"][LAYOUT.token_episode],
        eps_low=args.epsilon,
        eps_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        level=args.importance_sampling_level,
        delta=args.delta,
        reference_log_probs=reference if args.beta else None,
        beta=args.beta,
        correction=correction,
        max_completion_length=args.max_completion_length,
    )


def correction_of(args, old, rollout):
    """The weights of `sequence_mask` and `token_truncate`, written out."""
    low, high = args.vllm_importance_sampling_clip_min or 0.0, args.vllm_importance_sampling_clip_max
    gaps = torch.where(LAYOUT.mask, old - rollout, 0.0)
    if args.vllm_importance_sampling_mode == "token_truncate":
        return gaps.exp().clamp(low, high)
    assert args.vllm_importance_sampling_mode == "sequence_mask"
    sums = torch.zeros(LAYOUT.num_episodes, dtype=torch.float64).index_add(0, LAYOUT.token_episode, gaps)
    weights = sums.exp()
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)[LAYOUT.token_episode]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"loss_type": "bnpo"},
        {"loss_type": "grpo", "epsilon_high": 0.28},
        {"loss_type": "dr_grpo", "scale_rewards": False, "max_completion_length": 9},
        {"loss_type": "cispo", "epsilon_high": 1.28},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.003, "epsilon_high": 0.004},
        {"importance_sampling_level": "sequence", "delta": 1.3},
        {"delta": 1.4},
        {"beta": 0.04, "use_bias_correction_kl": False},
        {"use_vllm": True},
        {"use_vllm": True, "vllm_importance_sampling_clip_max": 0.9},
        {
            "use_vllm": True,
            "vllm_importance_sampling_mode": "token_truncate",
            "beta": 0.1,
            "use_bias_correction_kl": False,
        },
        {"use_vllm": True, "vllm_importance_sampling_correction": False},
    ],
    ids=lambda values: " ".join(map(str, values.values())) or "defaults",
)
def test_the_grpo_loss_of_a_translated_config_is_trls(oracle, values):
    args = trl_config("GRPOConfig", num_generations=2, per_device_train_batch_size=4, **values)
    ours = numbers(1, LAYOUT.num_tokens, grad=True)
    theirs = ours.detach().clone().requires_grad_()
    old = ours.detach() + numbers(2, LAYOUT.num_tokens, scale=0.4)
    rollout, reference = old + numbers(3, LAYOUT.num_tokens, scale=0.3), old + numbers(4, LAYOUT.num_tokens, scale=0.5)
    our, their = (
        our_loss(args, ours, old, rollout, reference),
        their_loss(oracle, args, theirs, old, rollout, reference),
    )
    assert_close(our, their)
    our.backward()
    their.backward()
    assert float(ours.grad.abs().sum()) > 0
    assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("values", [{}, {"beta": 0.3}, {"loss_type": ["ipo"], "beta": 0.2}], ids=str)
def test_the_dpo_loss_of_a_translated_config_is_trls(oracle, values):
    args = trl_config("DPOConfig", **values)
    layout = make_layout([[[0, 1, 1]], [[0, 0, 1]], [[0, 1, 1, 1]], [[0, 1]]])  # two chosen, then two rejected
    ours, reference = numbers(1, layout.num_tokens, grad=True), numbers(2, layout.num_tokens)
    theirs = ours.detach().clone().requires_grad_()
    objective = PreferenceObjective(from_trl(args).config.algorithm.dpo)
    lengths = layout.sampled_per_episode.view(2, 2).T
    our = objective.loss_of_pairs(Answers(sums(ours, layout), lengths, sums(reference, layout))).loss.mean()
    their = oracle.dpo_loss(args.loss_type, layout, theirs, reference, beta=args.beta)
    assert_close(our, their)
    our.backward()
    their.backward()
    assert_close(ours.grad, theirs.grad)


def sums(log_probs, layout):
    """Log-probs of the answers, [pairs, 2]."""
    learned = torch.where(layout.mask, log_probs, 0.0)
    return torch.zeros(4, dtype=torch.float64).index_add(0, layout.token_episode, learned).view(2, 2).T
