"""PPO with a Gaussian policy in one file, after CleanRL's `ppo_continuous_action`: one environment, MLPs of 64 x 64.

A batch is `num_steps` steps of the environment, cut into minibatches of steps, as in CleanRL; or `num_episodes` whole
episodes, cut into minibatches of episodes, as Hotseat plays and learns. Observations and rewards are as they are, the
learning rate is constant, and policy and value network have an optimizer each. A process of its own runs it, for time.

Huang et al., "CleanRL", 2022; Schulman et al., "Proximal Policy Optimization Algorithms", 2017.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal

GAMMA, LAMBDA, CLIP, MAX_NORM, NUM_EPOCHS, ADAM = 0.99, 0.95, 0.2, 0.5, 10, {"betas": (0.9, 0.999), "eps": 1e-5}


@dataclass(frozen=True)
class Batches:
    """Size of a batch and of its minibatches: in steps, or in episodes."""

    size: int
    minibatch: int
    of_episodes: bool


@dataclass
class Progress:
    """Returns of the episodes so far, each with the number of steps at its end, and the time without start-up."""

    returns: list[tuple[int, float]] = field(default_factory=list)
    num_steps: int = 0
    seconds: float = 0.0


class Agent(nn.Module):
    def __init__(self, state_dim: int, action_dim: int):
        super().__init__()
        self.value = nn.Sequential(*_body(state_dim), _layer(64, 1, 1.0))
        self.mean = nn.Sequential(*_body(state_dim), _layer(64, action_dim, 0.01))
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    def policy(self, states: Tensor) -> Normal:
        return Normal(self.mean(states), self.log_std.exp())


def _body(state_dim: int) -> list[nn.Module]:
    return [_layer(state_dim, 64), nn.Tanh(), _layer(64, 64), nn.Tanh()]


def _layer(num_in: int, num_out: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(num_in, num_out)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass
class Steps:
    """Steps of one environment, in order. A step whose episode ended, or the last, has what follows it in `after`."""

    states: list[np.ndarray] = field(default_factory=list)
    actions: list[np.ndarray] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ends: list[bool] = field(default_factory=list)
    after: dict[int, float] = field(default_factory=dict)  # by step: value of what follows; 0 if the task ended


def train(task: str, seed: int, max_steps: int, batches: Batches, learning_rate: float) -> Progress:
    """Train until an environment has taken so many steps, and finish the batch."""
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    environment = gymnasium.make(task)
    state, _ = environment.reset(seed=seed)
    agent = Agent(len(state), environment.action_space.shape[0])
    optimizers = [
        torch.optim.Adam([*agent.mean.parameters(), agent.log_std], learning_rate, **ADAM),
        torch.optim.Adam(agent.value.parameters(), learning_rate, **ADAM),
    ]
    progress, total, start = Progress(), 0.0, time.monotonic()
    while progress.num_steps < max_steps:
        steps = Steps()
        while (sum(steps.ends) if batches.of_episodes else len(steps.ends)) < batches.size:
            with torch.no_grad():
                seen = torch.from_numpy(state.astype(np.float32))
                policy = agent.policy(seen)
                action = policy.sample()
                steps.log_probs.append(policy.log_prob(action).sum().item())
                steps.values.append(agent.value(seen).item())
            steps.states.append(seen.numpy())
            steps.actions.append(action.numpy())
            space = environment.action_space
            state, reward, terminated, truncated, _ = environment.step(np.clip(action.numpy(), space.low, space.high))
            steps.rewards.append(float(reward))
            steps.ends.append(bool(terminated or truncated))
            total += float(reward)
            progress.num_steps += 1
            if steps.ends[-1]:
                steps.after[len(steps.ends) - 1] = 0.0 if terminated else _value(agent, state)
                progress.returns.append((progress.num_steps, total))
                total = 0.0
                state, _ = environment.reset()
        steps.after.setdefault(len(steps.ends) - 1, _value(agent, state))
        _learn(agent, optimizers, steps, batches)
        progress.seconds = time.monotonic() - start
    environment.close()
    return progress


def _value(agent: Agent, state: np.ndarray) -> float:
    with torch.no_grad():
        return agent.value(torch.from_numpy(state.astype(np.float32))).item()


def advantages_of(steps: Steps) -> np.ndarray:
    """Return GAE of each step: A = δ + γλ·A', δ = r + γ·V' − V."""
    found, later = np.zeros(len(steps.rewards)), 0.0
    for at in reversed(range(len(found))):
        is_cut = at in steps.after
        following = steps.after[at] if is_cut else steps.values[at + 1]
        delta = steps.rewards[at] + GAMMA * following - steps.values[at]
        later = found[at] = delta + (0.0 if is_cut else GAMMA * LAMBDA * later)
    return found


def _learn(agent: Agent, optimizers: list[torch.optim.Adam], steps: Steps, batches: Batches) -> None:
    states, actions = (torch.from_numpy(np.stack(each)) for each in (steps.states, steps.actions))
    old = torch.tensor(steps.log_probs)
    found = torch.from_numpy(advantages_of(steps)).float()
    returns = found + torch.tensor(steps.values)
    found = (found - found.mean()) / (found.std() + 1e-8)
    # Units that are dealt to minibatches: steps, or episodes.
    starts = [0, *(at + 1 for at, is_end in enumerate(steps.ends) if is_end)]
    episodes = [
        np.arange(first, end) for first, end in zip(starts, [*starts[1:], len(old)], strict=True) if end > first
    ]
    units = episodes if batches.of_episodes else [np.array([at]) for at in range(len(old))]
    for _ in range(NUM_EPOCHS):
        order = np.random.permutation(len(units))
        for first in range(0, len(units), batches.minibatch):
            rows = torch.from_numpy(np.concatenate([units[at] for at in order[first : first + batches.minibatch]]))
            ratio = torch.exp(agent.policy(states[rows]).log_prob(actions[rows]).sum(-1) - old[rows])
            gained = torch.min(ratio * found[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * found[rows])
            value_loss = 0.5 * ((agent.value(states[rows]).squeeze(-1) - returns[rows]) ** 2).mean()
            for optimizer, loss in zip(optimizers, (-gained.mean(), value_loss), strict=True):
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
                optimizer.step()
