"""Results are where the inputs are: under another default device, a tensor made without naming one would not mix."""

import pytest
import torch
from algorithm_cases import make_layout, numbers

from hotseat import algorithms as al
from hotseat.registry.estimators import ESTIMATORS

LAYOUT = make_layout([[[0, 1, 1], [0, 1]], [[0, 1, 0, 1]], [[0, 1]], [[0, 0, 1, 1]]])
GROUPS = torch.tensor([0, 0, 1, 1])
EPISODES = numbers(0, 4)
TOKENS = [numbers(seed, LAYOUT.num_tokens) for seed in range(4)]
TURNS = numbers(5, len(al.turn_ends(LAYOUT)))
CLIP = {"eps_low": 0.2, "eps_high": 0.2}

CALLS = {
    **{
        name: lambda name=name: (
            al.compute_advantages(
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
    "group_normalised": lambda: al.group_normalised(EPISODES, GROUPS),
    "turn_ends": lambda: al.turn_ends(LAYOUT),
    "estimate_kl": lambda: al.estimate_kl(TOKENS[0], TOKENS[1], LAYOUT.mask, "k3"),
    "ppo_loss": lambda: al.ppo_loss(*TOKENS[:3], LAYOUT.mask, **CLIP, dual_clip=3.0).loss,
    "cispo_loss": lambda: al.cispo_loss(*TOKENS[:3], LAYOUT.mask, **CLIP).loss,
    "gspo_loss": lambda: al.gspo_loss(*TOKENS[:3], LAYOUT, **CLIP).loss,
    "correction_weights": lambda: al.correction_weights(*TOKENS[:2], LAYOUT, "seq-mask-tis", low=0.5, high=2.0).weights,
    "rejection_weights": lambda: al.rejection_weights(*TOKENS[:2], LAYOUT, "k3", high=0.5),
    "value_loss": lambda: al.value_loss(*TOKENS[:3], LAYOUT.mask, clip=0.2).loss,
    "loss_weights": lambda: al.loss_weights(LAYOUT, "sequence_mean"),
    "mask_truncated": lambda: al.mask_truncated(LAYOUT, GROUPS),
    "episode_log_probs": lambda: al.episode_log_probs(TOKENS[0], LAYOUT),
    "dpo_loss": lambda: al.dpo_loss(*[EPISODES] * 4, beta=0.1).loss,
    "answer_nll": lambda: al.answer_nll(EPISODES, GROUPS),
    "orpo_loss": lambda: al.orpo_loss(*[EPISODES] * 2, *[GROUPS] * 2, beta=0.1).loss,
    "simpo_loss": lambda: al.simpo_loss(*[EPISODES] * 2, *[GROUPS] * 2, beta=2.0, gamma=0.5).loss,
    "pairwise_loss": lambda: al.pairwise_loss(EPISODES, EPISODES, kind="logexp"),
    "overlong_penalty": lambda: al.overlong_penalty(LAYOUT.sampled_per_episode, 4, 2, 1.0),
    "penalise_truncation": lambda: al.penalise_truncation(EPISODES, GROUPS, -1.0),
}


@pytest.mark.parametrize("name", CALLS)
def test_results_stay_on_the_device_of_the_inputs(name):
    with torch.device("meta"):
        assert CALLS[name]().device == torch.device("cpu")
