"""Results are where the inputs are: under another default device, a tensor made without naming one would not mix."""

import pytest
import torch
from algorithm_cases import make_layout, numbers

from hotseat.algorithms.advantages import compute_advantages
from hotseat.algorithms.aggregation import loss_weights, mask_truncated
from hotseat.algorithms.baselines import group_normalised
from hotseat.algorithms.corrections import correction_weights, rejection_weights
from hotseat.algorithms.kl import estimate_kl
from hotseat.algorithms.policy_loss import cispo_loss, gspo_loss, ppo_loss
from hotseat.algorithms.shaping import overlong_penalty, penalise_truncation
from hotseat.algorithms.supervised_loss import (
    answer_nll,
    dpo_loss,
    episode_log_probs,
    orpo_loss,
    pairwise_loss,
    simpo_loss,
)
from hotseat.algorithms.turns import turn_ends
from hotseat.algorithms.value_loss import value_loss
from hotseat.registry.estimators import ESTIMATORS

LAYOUT = make_layout([[[0, 1, 1], [0, 1]], [[0, 1, 0, 1]], [[0, 1]], [[0, 0, 1, 1]]])
GROUPS = torch.tensor([0, 0, 1, 1])
EPISODES = numbers(0, 4)
TOKENS = [numbers(seed, LAYOUT.num_tokens) for seed in range(4)]
TURNS = numbers(5, len(turn_ends(LAYOUT)))
CLIP = {"eps_low": 0.2, "eps_high": 0.2}

CALLS = {
    **{
        name: lambda name=name: (
            compute_advantages(
                name,
                LAYOUT,
                EPISODES,
                groups=GROUPS,
                values=TOKENS[0],
                turn_rewards=TURNS,
                kl=TOKENS[1],
                kl_coefficient=0.1,
                reward_clip=(-1.0, 1.0),
            ).advantages
        )
        for name in ESTIMATORS
    },
    "group_normalised": lambda: group_normalised(EPISODES, GROUPS),
    "turn_ends": lambda: turn_ends(LAYOUT),
    "estimate_kl": lambda: estimate_kl(TOKENS[0], TOKENS[1], LAYOUT.mask, "k3"),
    "ppo_loss": lambda: ppo_loss(*TOKENS[:3], LAYOUT.mask, **CLIP, dual_clip=3.0).loss,
    "cispo_loss": lambda: cispo_loss(*TOKENS[:3], LAYOUT.mask, **CLIP).loss,
    "gspo_loss": lambda: gspo_loss(*TOKENS[:3], LAYOUT, **CLIP).loss,
    "correction_weights": lambda: correction_weights(*TOKENS[:2], LAYOUT, "seq-mask-tis", low=0.5, high=2.0).weights,
    "rejection_weights": lambda: rejection_weights(*TOKENS[:2], LAYOUT, "k3", high=0.5),
    "value_loss": lambda: value_loss(*TOKENS[:3], LAYOUT.mask, clip=0.2).loss,
    "loss_weights": lambda: loss_weights(LAYOUT, "sequence_mean"),
    "mask_truncated": lambda: mask_truncated(LAYOUT, GROUPS),
    "episode_log_probs": lambda: episode_log_probs(TOKENS[0], LAYOUT),
    "dpo_loss": lambda: dpo_loss(*[EPISODES] * 4, beta=0.1).loss,
    "answer_nll": lambda: answer_nll(EPISODES, GROUPS),
    "orpo_loss": lambda: orpo_loss(*[EPISODES] * 2, *[GROUPS] * 2, beta=0.1).loss,
    "simpo_loss": lambda: simpo_loss(*[EPISODES] * 2, *[GROUPS] * 2, beta=2.0, gamma=0.5).loss,
    "pairwise_loss": lambda: pairwise_loss(EPISODES, EPISODES, kind="logexp"),
    "overlong_penalty": lambda: overlong_penalty(LAYOUT.sampled_per_episode, 4, 2, 1.0),
    "penalise_truncation": lambda: penalise_truncation(EPISODES, GROUPS, -1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_stay_on_the_device_of_the_inputs(name):
    with torch.device("meta"):
        assert CALLS[name]().device == torch.device("cpu")
