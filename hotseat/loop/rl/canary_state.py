"""Settings and state of the canary, and the floors below which gaps are never errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotseat.algorithms.agreement import GapStatistics
from hotseat.config import Config
from hotseat.config.precision import dtype_of
from hotseat.loop.workers.weight_check import Canary
from hotseat.train.exact import NO_FP8, Fp8Parts
from hotseat.vision import image_from_json

NO_ROUNDING = GapStatistics(0.0, 0.0, 0.0)

# Gaps smaller than the factor times these are never errors. GPU kernels may multiply float32 numbers in TF32, which
# rounds to 10 bits.
FLOORS = {
    "fp32": GapStatistics(2.5e-4, 5e-4, 6e-5),
    "tf32": GapStatistics(2e-3, 4e-3, 5e-4),
    "fp16": GapStatistics(6e-4, 2e-3, 2e-4),
    "bf16": GapStatistics(5e-3, 1.5e-2, 1.5e-3),
}
# The same for growth since the first push. Kernels do not change during a run, so float32 repeats exactly here.
DRIFT_FLOORS = FLOORS | {"fp32": GapStatistics(2.5e-5, 5e-5, 1e-5)}
# Effect of rounding that is assumed where there is no memory to measure it.
ASSUMED_ROUNDING = {
    "fp32": NO_ROUNDING,
    "fp16": GapStatistics(4e-3, 1.2e-2, 1e-3),
    "bf16": GapStatistics(3e-2, 1e-1, 8e-3),
}
# The same of FP8, in layers and in the KV cache.
ASSUMED_FP8 = GapStatistics(8e-2, 3e-1, 2e-2)


@dataclass(frozen=True)
class CanarySettings:
    """Number of tokens to score, and which gaps are errors. `dtype`: the one of the computation, as `train.dtype`."""

    num_tokens: int
    rounding_factor: float
    drift_factor: float
    dtype: str
    temperature: float
    max_length: int  # of a sequence, in tokens
    seed: int
    on_gpu: bool = False
    is_merged: bool = True  # engines get adapters, if there are any, merged into weights
    fp8: Fp8Parts = NO_FP8  # what engines have in FP8

    @classmethod
    def of(cls, config: Config, on_gpu: bool, is_merged: bool = True) -> CanarySettings:
        canary = config.rollout.canary
        return cls(
            num_tokens=canary.num_tokens,
            rounding_factor=canary.rounding_factor,
            drift_factor=canary.drift_factor,
            dtype=dtype_of(config),
            temperature=config.rollout.temperature,
            max_length=config.data.max_length,
            seed=config.seed,
            on_gpu=on_gpu,
            is_merged=is_merged,
            fp8=Fp8Parts(
                weights=config.rollout.quantization is not None, cache=config.rollout.kv_cache_dtype is not None
            ),
        )

    @property
    def floor(self) -> GapStatistics:
        return FLOORS["tf32" if self.dtype == "fp32" and self.on_gpu else self.dtype]


@dataclass(frozen=True)
class Measured:
    """Gaps of engines and inference ranks on one set of answers, and what rounding alone does to them."""

    canary: Canary
    gaps: Mapping[str, GapStatistics]  # by the name of the engine or inference rank
    rounding: GapStatistics
    basis: str  # how `rounding` is known


@dataclass(frozen=True)
class Baseline:
    """The largest gaps after the first push, and what rounding did then: later pushes are compared with it."""

    gap: GapStatistics
    rounding: GapStatistics


@dataclass(frozen=True)
class CanaryState:
    """State of a guard, as a checkpoint holds it."""

    canary: Canary
    rounding: GapStatistics  # what rounding alone does to log-probs of these answers
    basis: str  # how `rounding` is known
    first: Baseline | None  # None until the first push was judged
    num_sets: int  # sets of answers that were sampled
    metrics: Mapping[str, float]
    eight_bits: Fp8Parts = NO_FP8  # what engines had in FP8, which `rounding` and `first` include

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> CanaryState:
        canary, first = state["canary"], state["first"]
        sequences = tuple(tuple(sequence) for sequence in canary["sequences"])
        images = tuple(tuple(map(image_from_json, each)) for each in canary.get("images", ()))
        return cls(
            Canary(sequences, tuple(canary["num_prompt"]), float(canary["temperature"]), images),
            GapStatistics(**state["rounding"]),
            str(state["basis"]),
            Baseline(GapStatistics(**first["gap"]), GapStatistics(**first["rounding"])),
            int(state["num_sets"]),
            dict(state["metrics"]),
            Fp8Parts(**state.get("eight_bits", {})),
        )
