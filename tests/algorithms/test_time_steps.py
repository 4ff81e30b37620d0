"""Advantages and ratios by action and by chunk, against loops over plain numbers."""

import math
import random

import pytest
import torch

from hotseat.algorithms.advantages import compute_advantages, gae
from hotseat.algorithms.corrections import correction_weights
from hotseat.algorithms.policy_loss import ppo_loss
from hotseat.algorithms.time_steps import mean_on_tokens, step_starts, sum_on_tokens
from hotseat.types import TokenLayout

ACTION = 2  # tokens of one


def layout_of(episodes: list[list[tuple[int, int]]]) -> TokenLayout:
    """episodes: per segment, the tokens of context and the sampled ones."""
    segments = [(index, segment) for index, episode in enumerate(episodes) for segment in episode]
    mask = [flag for _, (context, sampled) in segments for flag in [False] * context + [True] * sampled]
    ends = [0]
    for _, segment in segments:
        ends.append(ends[-1] + sum(segment))
    return TokenLayout(
        torch.tensor(mask), torch.tensor(ends), torch.tensor([index for index, _ in segments]), len(episodes)
    )


# Chunks of three actions of two tokens; the second chunk of episode 0 ended after two actions, and the last segment
# of episode 1 is only there to be valued.
EPISODES = [[(3, 6), (2, 4)], [(1, 6), (4, 6), (3, 0)], [(2, 2)]]


def steps_by_hand(time_step: str) -> list[list[list[int]]]:
    """Flat positions of the tokens of each step, per episode."""
    position, steps = 0, []
    for episode in EPISODES:
        own = []
        for context, sampled in episode:
            tokens = list(range(position + context, position + context + sampled))
            size = {"action": ACTION, "chunk": max(1, len(tokens))}[time_step]
            own += [tokens[at : at + size] for at in range(0, len(tokens), size)]
            position += context + sampled
        steps.append(own)
    return steps


def per_step(time_step: str) -> int | None:
    return ACTION if time_step == "action" else None


@pytest.mark.parametrize("time_step", ["action", "chunk"])
def test_steps_of_time_begin_where_actions_and_chunks_do(time_step):
    starts = step_starts(layout_of(EPISODES), per_step(time_step))
    expected = [step[0] for episode in steps_by_hand(time_step) for step in episode]
    assert starts.nonzero().squeeze(1).tolist() == expected


@pytest.mark.parametrize("time_step", ["action", "chunk"])
@pytest.mark.parametrize("bootstraps", [False, True])
def test_gae_of_longer_steps_equals_a_loop_over_them(time_step, bootstraps):
    layout = layout_of(EPISODES)
    draw = random.Random(5)
    rewards = [draw.gauss(0, 1) if flag else 0.0 for flag in layout.mask.tolist()]
    values = [draw.gauss(0, 1) for _ in rewards]
    after = [0.0, values[-5], 0.0] if bootstraps else [0.0, 0.0, 0.0]  # the valued segment ends five from the end
    gamma, lam = 0.9, 0.8
    advantages, returns = [0.0] * len(rewards), [0.0] * len(rewards)
    for episode, steps in enumerate(steps_by_hand(time_step)):
        following, carried = after[episode], 0.0
        for step in reversed(steps):
            value = values[step[0]]
            carried = sum(rewards[t] for t in step) + gamma * following - value + gamma * lam * carried
            for token in step:
                advantages[token] = carried
            returns[step[0]] = carried + value
            following = value
    found = gae(
        layout,
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor(values, dtype=torch.float64),
        gamma=gamma,
        lam=lam,
        starts=step_starts(layout, per_step(time_step)),
        bootstrap=torch.tensor(after, dtype=torch.float64) if bootstraps else None,
    )
    assert torch.allclose(found[0], torch.tensor(advantages, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(found[1], torch.tensor(returns, dtype=torch.float64), rtol=0, atol=1e-12)


def test_gae_of_tokens_takes_the_value_after_an_episode_that_was_cut_off():
    layout = layout_of([[(0, 2)], [(0, 1)]])
    rewards, values = torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, 0.25, 0.5])
    advantages, _ = gae(layout, rewards, values, gamma=1.0, lam=1.0, bootstrap=torch.tensor([2.0, 0.0]))
    assert advantages.tolist() == [1.5, 1.75, 0.5]


def test_discounted_returns_count_chunks():
    layout = layout_of([[(1, 2), (1, 2)]])
    found = compute_advantages(
        "reinforce",
        layout,
        torch.tensor([1.0]),
        turn_rewards=torch.tensor([2.0, 0.0]),
        turns=torch.tensor([2, 5]),
        gamma=0.5,
        starts=step_starts(layout, None),
    )
    assert found.returns.tolist() == [0.0, 2.5, 2.5, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("time_step", ["action", "chunk"])
def test_the_ratio_of_a_step_is_the_product_over_its_tokens(time_step):
    layout = layout_of(EPISODES)
    draw = random.Random(6)
    new = [draw.gauss(-1, 0.3) for _ in layout.mask.tolist()]
    old = [draw.gauss(-1, 0.3) for _ in new]
    steps = [step for episode in steps_by_hand(time_step) for step in episode]
    advantage_of = {token: draw.gauss(0, 1) for step in steps for token in step[:1]}
    advantages, expected, slopes = [0.0] * len(new), [0.0] * len(new), [0.0] * len(new)
    for step in steps:
        advantage = advantage_of[step[0]]
        ratio = math.exp(sum(new[t] - old[t] for t in step))
        clipped = min(max(ratio, 0.8), 1.2)
        for token in step:
            advantages[token] = advantage
            expected[token] = -min(ratio * advantage, clipped * advantage)
            slopes[token] = -len(step) * ratio * advantage if ratio * advantage <= clipped * advantage else 0.0
    log_probs = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    loss = ppo_loss(
        log_probs,
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        layout.mask,
        eps_low=0.2,
        eps_high=0.2,
        starts=step_starts(layout, per_step(time_step)),
    ).loss
    loss.sum().backward()
    assert torch.allclose(loss, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.allclose(log_probs.grad, torch.tensor(slopes, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "by_action", "by_chunk"),
    [
        # Ratios of the tokens: 2, 2 and 0.5, 1 in the first chunk, 2, 0.25 in the second. Bounds are [0.5, 3].
        ("tis", [3.0, 3.0, 0.5, 0.5, 0.5, 0.5], [2.0, 2.0, 2.0, 2.0, 0.5, 0.5]),
        ("icepop", [0.0, 0.0, 0.5, 0.5, 0.5, 0.5], [2.0, 2.0, 2.0, 2.0, 0.5, 0.5]),
        ("seq-tis", [1.0] * 6, [1.0] * 6),
    ],
)
def test_the_correction_of_a_step_is_that_of_the_product_over_its_tokens(kind, by_action, by_chunk):
    layout = layout_of([[(1, 4), (1, 2)]])
    ratios = torch.tensor([9.0, 2.0, 2.0, 0.5, 1.0, 9.0, 2.0, 0.25], dtype=torch.float64)
    for tokens_per_step, expected in ((ACTION, by_action), (None, by_chunk)):
        found = correction_weights(
            ratios.log(),
            torch.zeros_like(ratios),
            layout,
            kind,
            low=0.5,
            high=3.0,
            starts=step_starts(layout, tokens_per_step),
        )
        assert found.weights[layout.mask].tolist() == pytest.approx(expected)
        assert found.weights[~layout.mask].tolist() == [0.0, 0.0]
        assert found.changed.tolist() == [False, *(weight in (3.0, 0.0) for weight in expected[:4]), *[False] * 3]


def test_steps_of_masked_episodes_and_of_no_tokens_have_sums():
    layout = layout_of([[(1, 2)], [(0, 2), (1, 2)]])
    starts = step_starts(layout, None)
    mask = layout.mask & (layout.token_episode == 1)
    values = torch.tensor([5.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0])
    assert sum_on_tokens(values, starts, mask).tolist() == [0, 0, 0, 7, 7, 0, 14, 14]
    assert mean_on_tokens(values, starts, mask).tolist() == [0, 0, 0, 3.5, 3.5, 0, 7, 7]
    nothing = torch.zeros(8, dtype=torch.bool)
    assert not sum_on_tokens(values, nothing, nothing).any()
