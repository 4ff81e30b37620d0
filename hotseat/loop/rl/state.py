"""State that the driver of a reinforcement run keeps from step to step, apart from the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hotseat.algorithms.kl import AdaptiveKl, FixedKl
from hotseat.config import Config, loads_saved
from hotseat.data import PromptOrder, SampledOrder, digest_of
from hotseat.types import Prompt
from hotseat.user_functions import own_function

NONE_SERVED = -1  # `RlState.version` before the first push


@dataclass
class RlState:
    """Order of the prompts, coefficient of the KL penalty, and version of the weights that engines serve."""

    order: PromptOrder | SampledOrder
    kl: AdaptiveKl | FixedKl
    version: int = NONE_SERVED

    @classmethod
    def initial(cls, config: Config, prompts: Sequence[Prompt]) -> RlState:
        kl, sampler = config.algorithm.kl, config.data.sampler
        facts = len(prompts), config.seed, digest_of(prompts)
        return cls(
            PromptOrder(*facts) if sampler is None else SampledOrder(own_function(sampler), *facts),
            FixedKl(kl.coef) if kl.target is None else AdaptiveKl(kl.coef, kl.target, kl.horizon),
        )

    def save(self) -> dict[str, Any]:
        """Return this state as JSON for a checkpoint."""
        return {"order": self.order.state(), "kl_coefficient": self.kl.coefficient, "version": self.version}

    def restore(self, saved: Mapping[str, Any], config: Config) -> None:
        """Continue from what `save` returned. A KL coefficient that was changed in the config since starts anew."""
        self.order = self.order.at(saved["order"])
        if loads_saved(str(saved["config"])).algorithm.kl.coef == config.algorithm.kl.coef:
            self.kl = replace(self.kl, coefficient=float(saved["kl_coefficient"]))
        self.version = int(saved["version"]) - 1  # the first push sends that version again
