"""Settings of the phases that change while a run goes on: token budgets are lowered, the KL coefficient adapts."""

from __future__ import annotations

from collections.abc import Callable

from hotseat.config import Config
from hotseat.config.batches import BatchAlgebra, token_budget
from hotseat.loop import settings
from hotseat.loop.rl.state import RlState
from hotseat.loop.workers.model_workers import PolicySettings
from hotseat.loop.workers.value_models import CriticSettings, RewardSettings
from hotseat.planning.budgets import Use, lowered_note, with_budget


class PhaseSettings:
    """Config of the run with the token budgets in use, and the settings that workers get from it."""

    def __init__(self, config: Config, algebra: BatchAlgebra, state: RlState, warn: Callable[[str], object]):
        self.config = config
        self.algebra = algebra
        self._state = state
        self._warn = warn

    @property
    def policy(self) -> PolicySettings:
        """Return how the actor makes experience and learns from it."""
        optimizer_steps = self.algebra.optimizer_steps_per_step
        return settings.policy_settings(self.config, optimizer_steps, self._state.kl.coefficient, self._state.version)

    @property
    def critic(self) -> CriticSettings:
        """Return how the critic computes values and learns from returns."""
        return settings.critic_settings(self.config)

    @property
    def reward(self) -> RewardSettings:
        """Return how a reward model scores."""
        return settings.reward_settings(self.config)

    def lower_budget(self, use: Use, tokens: int, why: str) -> None:
        """Use at most `tokens` tokens per micro-batch from now on, if that is fewer than before."""
        before = token_budget(getattr(self.config, use))
        if before is None or tokens >= before:
            return
        self.config = with_budget(self.config, use, tokens)
        self._warn(lowered_note(why, use, tokens, before))
