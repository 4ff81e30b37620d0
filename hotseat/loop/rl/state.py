"""State of a reinforcement run apart from the weights, and the settings that workers get because of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.algorithms.kl import AdaptiveKl, FixedKl
from hotseat.cluster import WorkerGroup
from hotseat.config import Config, loads_saved
from hotseat.config.batches import BatchAlgebra
from hotseat.data import PromptOrder, SampledOrder, digest_of
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.settings.token_budgets import TokenBudgets
from hotseat.loop.settings.training_settings import critic_settings, policy_settings, reward_settings
from hotseat.loop.workers.model_workers import ModelWorker, PolicySettings
from hotseat.loop.workers.value_models import CriticSettings, RewardSettings
from hotseat.planning.budgets import Use, smallest, uses
from hotseat.types import Prompt
from hotseat.user_functions import user_function

NONE_SERVED = -1  # `RlState.version` before the first push


@dataclass
class RlState:
    """Order of the prompts, coefficient of the KL penalty, and version of the weights that engines serve."""

    order: PromptOrder | SampledOrder
    kl: AdaptiveKl | FixedKl
    version: int = NONE_SERVED

    @classmethod
    def initial(cls, config: Config, prompts: Sequence[Prompt]) -> RlState:
        sampler = config.data.sampler
        facts = len(prompts), config.seed, digest_of(prompts)
        return cls(
            PromptOrder(*facts, is_shuffled=config.data.shuffle)
            if sampler is None
            else SampledOrder(user_function(sampler), *facts),
            _initial_kl(config),
        )

    def save(self) -> dict[str, Any]:
        """Return this state as JSON for a checkpoint."""
        return {"order": self.order.state(), "kl_coefficient": self.kl.coefficient, "version": self.version}

    def restore(self, saved: Mapping[str, Any], config: Config) -> None:
        """Continue from what `save` returned. A KL coefficient that was changed in the config since starts anew."""
        self.order, self.kl = self.order.at(saved["order"]), _initial_kl(config)
        if loads_saved(str(saved["config"])).algorithm.kl.coef == config.algorithm.kl.coef:
            self.kl = replace(self.kl, coefficient=float(saved["kl_coefficient"]))
        self.version = int(saved["version"]) - 1  # the first push sends that version again


def _initial_kl(config: Config) -> AdaptiveKl | FixedKl:
    kl = config.algorithm.kl
    return FixedKl(kl.coef) if kl.target is None else AdaptiveKl(kl.coef, kl.target, kl.horizon)


class PhaseSettings(TokenBudgets):
    """Config of the run with the token budgets in use, and the settings that workers get from it."""

    def __init__(self, config: Config, algebra: BatchAlgebra, state: RlState, warn: Callable[[str], object]):
        super().__init__(config, warn)
        self.algebra = algebra
        self._state = state

    @property
    def policy(self) -> PolicySettings:
        optimizer_steps = self.algebra.optimizer_steps_per_step
        return policy_settings(self.config, optimizer_steps, self._state.kl.coefficient, self._state.version)

    @property
    def critic(self) -> CriticSettings:
        return critic_settings(self.config)

    @property
    def reward(self) -> RewardSettings:
        return reward_settings(self.config)


class MicroBatches:
    """Finds budgets that fit on the devices, role by role."""

    def __init__(
        self, models: Mapping[str, WorkerGroup[ModelWorker]], phase_settings: PhaseSettings, meter: PhaseMeter
    ):
        self._models = models
        self._settings = phase_settings
        self._meter = meter

    @property
    def config(self) -> Config:
        """Return the run's config, with the token budgets that are in use."""
        return self._settings.config

    def try_out(self, keep: Callable[[Config], object]) -> None:
        """Check before the first step that micro-batches as large as the budgets fit beside all else on the devices.

        Budgets that do not fit are halved until they do. `keep` gets the config that results.
        """
        config = self._settings.config
        scorer = "inference" if "inference" in self._models else "actor"
        trials: dict[Use, list[tuple[str, str]]] = {
            "rollout": [(role, "prepare") for role in ("reward", "reference", "critic", scorer)],
            "train": [(role, "update") for role in ("critic", "actor")],
        }
        for use in ("rollout", "train"):
            for role, phase in trials[use] if use in uses(config) else ():
                if role in self._models:
                    self._try_out(use, role, phase)
        keep(self._settings.config)

    def _try_out(self, use: Use, role: str, phase: str) -> None:
        config, is_update = self._settings.config, use == "train"
        with_entropy = is_update and config.algorithm.entropy_coef is not None

        def fits(num_tokens: int) -> bool:
            length = config.data.max_length
            return all(self._models[role].call(ModelWorker.fits, num_tokens, length, is_update, with_entropy))

        with self._meter.lease(phase, role):
            self._settings.try_out(use, fits, f"{role}: tried out")

    def keep_lowered(self, keep: Callable[[Config], object]) -> None:
        """Adopt for all later steps the budgets that ranks lowered because memory ran out; `keep` gets the config."""
        before = self._settings.config
        if not uses(before):
            return
        asked = {name: group.start(ModelWorker.lowered) for name, group in self._models.items()}
        for role, calls in asked.items():
            for use, tokens in smallest(calls.result()).items():
                self._settings.lower(use, tokens, f"{role} ran out of device memory, and repeated its work")
        if self._settings.config is not before:
            keep(self._settings.config)
