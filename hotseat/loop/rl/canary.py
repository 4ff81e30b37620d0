"""The canary: after every push, engines and trainer score the same answers, and the gaps of their log-probs are judged.

    first push    an engine samples answers; all engines and the trainer score them; a float32 forward of the same
                  weights measures what rounding alone does to log-probs, and gaps are judged against that; where
                  engines have weights or caches in FP8, another forward measures the effect
    later pushes  the same answers are scored with the new weights: in the push itself, or, by engines that need their
                  cache to score, in their next lease; gaps are judged against the same limits and the first push's gaps
    an alarm      new answers, of other prompts, are sampled with the current weights, and rounding is measured anew:
                  to a policy that has moved far, old answers are unlikely, and 16 bits are coarser there. Gaps above
                  the new limits end the run; otherwise the new answers are the canary from then on
    a resume      the checkpoint has the canary and its limits; in addition, new answers are judged as at a first push.
                  Limits of engines that had other parts in FP8 are dropped

`algorithms.agreement` has the statistics and their limits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from hotseat.algorithms.agreement import (
    GapLimits,
    GapStatistics,
    Verdict,
    gap_statistics,
    growth,
    judge,
    largest,
    limits_from,
)
from hotseat.cluster import WorkerGroup
from hotseat.config import Config
from hotseat.config.precision import dtype_of
from hotseat.errors import WeightError
from hotseat.loop.workers.engine_worker import EngineWorker
from hotseat.loop.workers.model_workers import ActorWorker, InferenceWorker
from hotseat.loop.workers.weight_check import Canary
from hotseat.train.exact import NO_FP8, Fp8Parts
from hotseat.types import Prompt, Request, Sampling
from hotseat.vision import image_as_json, image_from_json

if TYPE_CHECKING:
    from hotseat.loop.rl.sync import PushReport

ANSWER_TOKENS = 128  # length of an answer, where data.max_length leaves room for it
NUM_SEARCHED = 256  # prompts to choose the shortest from; prompts cost time, since they are scored too
RESUMED_FACTOR = 2.0  # growth of gaps since the checkpoint above which a resumed run starts a new baseline
MEANINGS = {
    "median": "the median of |gap|",
    "p90": "the 90th percentile of |gap|",
    "mean": "the size of the mean gap",
}

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

Gaps = Mapping[str, GapStatistics]  # by the name of the engine or inference rank


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
    num_sets: int  # sets of answers that were sampled
    fp8: Fp8Parts  # what engines had in FP8, which `rounding` and `first` include
    first: Baseline | None = None  # None until the first push was judged
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> CanaryState:
        images = tuple(tuple(map(image_from_json, each)) for each in state["canary"]["images"])
        parsed = TypeAdapter(cls).validate_python({**state, "canary": {**state["canary"], "images": ()}})
        return replace(parsed, canary=replace(parsed.canary, images=images))


class CanaryGuard:
    """Keeps the canary of a run, and judges the log-probs of engines and inference ranks on it.

    lease: holds the devices of a role for a phase. warn: records a warning.
    """

    def __init__(
        self,
        settings: CanarySettings,
        prompts: Sequence[Prompt],
        actor: WorkerGroup[ActorWorker],
        engines: WorkerGroup[EngineWorker],
        inference: WorkerGroup[InferenceWorker] | None,
        lease: Callable[[str, str], AbstractContextManager[None]],
        warn: Callable[[str], object],
    ):
        self._settings = settings
        self._prompts = _choose_prompts(prompts, settings)
        self._actor, self._engines, self._inference = actor, engines, inference
        self._lease = lease
        self._warn = warn
        self.is_started = False  # whether the first push of this process was judged
        self._state: CanaryState | None = None  # None until answers were sampled after the first push
        self._num_sets = 0  # sets of answers that were sampled, those before a resume included
        self._unscored: PushReport | None = None  # the push after which engines have yet to score the canary

    @property
    def canary(self) -> Canary | None:
        """Return the answers that are scored after a push; None before the first."""
        return None if self._state is None else self._state.canary

    def start(self, version: int) -> None:
        """Judge the engines after the first push, on new answers. Raises `WeightError`. A replay has no engines."""
        if self._engines.size == 0:
            self.is_started = True
            return
        state, gaps = self._measure(version)
        resumed, self._state = self._state, None  # Only now: `_measure` can fail, and is then done again.
        verdict = self._adopt(state, gaps)
        if verdict.is_alarm:
            gaps = self._confirm(version, verdict, gaps)
        gap = largest(list(gaps.values()))
        self.is_started = True
        if resumed is not None and resumed.first is not None and not verdict.is_alarm:
            grown = limits_from(resumed.first.gap, RESUMED_FACTOR, DRIFT_FLOORS[self._settings.dtype], "")
            if not judge(gap, [grown]).is_alarm:
                self._state, self._num_sets = resumed, resumed.num_sets
                return
        assert self._state is not None
        self._state = replace(self._state, first=Baseline(gap, self._state.rounding))

    def state(self) -> dict[str, Any] | None:
        """Return the guard's part of a checkpoint; None before the first push was judged."""
        if self._state is None or self._state.first is None:
            return None
        state = asdict(self._state)
        state["canary"]["images"] = [[image_as_json(image) for image in each] for each in self._state.canary.images]
        return state

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state in a checkpoint; a checkpoint without one changes nothing.

        If engines had other parts in FP8 then, the run starts a new baseline, on other answers. The next push is judged
        as a first one.
        """
        self.is_started, self._state, self._num_sets, self._unscored = False, None, 0, None
        if state is not None:
            resumed = CanaryState.parse(state)
            self._num_sets = resumed.num_sets
            if resumed.fp8 == self._settings.fp8:
                self._state = resumed

    def check(self, pushed: PushReport, to_inference: PushReport | None = None) -> None:
        """Judge the scores that a push brought back. Raises `WeightError`."""
        self._unscored = None
        if self.canary is None or pushed.expected is None:
            return
        answers: dict[str, list[float]] = {}
        if to_inference is not None:
            answers |= _named("inference rank", to_inference.answers)
        if pushed.answers is None:
            self._unscored = pushed
        else:
            answers |= _named("engine", pushed.answers, pushed.ranks)
        self._judge(pushed.version, pushed.expected, answers)

    def ask(self) -> None:
        """Have engines score the canary if they could not during the push, and judge it. Raises `WeightError`."""
        if self._unscored is None or self.canary is None:
            return
        pushed = self._unscored
        assert pushed.expected is not None
        with self._lease("rollout", "rollout"):
            answers = self._engines.call(EngineWorker.score_canary, self.canary)
        self._unscored = None
        self._judge(pushed.version, pushed.expected, _named("engine", answers))

    def metrics(self) -> dict[str, float]:
        """Return the latest gaps, and the share of its limit that the largest takes."""
        return {"canary_alarms": 0.0} if self._state is None else dict(self._state.metrics)

    @property
    def limits(self) -> tuple[GapLimits, ...]:
        """Return the limits of gaps, all of which hold; empty before the first push was judged."""
        return () if self._state is None else self._limits_of(self._state)

    def use(self, gaps: GapStatistics) -> float | None:
        """Return the share of the canary's limits that gaps, such as a step's, take; None before the first push."""
        return judge(gaps, self.limits).use if self.limits else None

    # ------------------------------------------------------------------------------------------------------------------

    def _judge(self, version: int, expected: Sequence[float], answers: Mapping[str, Sequence[float]]) -> None:
        if not answers:
            return
        gaps = _gaps(expected, answers)
        verdict = self._look_at(gaps)
        if verdict.is_alarm and self.is_started:
            self._confirm(version, verdict, gaps)

    def _look_at(self, gaps: Gaps) -> NamedVerdict:
        assert self._state is not None
        verdict = _worst(gaps, self.limits)
        gap = largest(list(gaps.values()))
        metrics = {
            "canary_gap": gap.mean_size,
            "canary_gap_median": gap.median,
            "canary_gap_p90": gap.p90,
            "canary_gap_mean": gap.mean,
            "canary_use": verdict.use,
        }
        self._state = replace(self._state, metrics={**self._state.metrics, **metrics})
        return verdict

    def _confirm(self, version: int, alarm: NamedVerdict, gaps: Gaps) -> Gaps:
        """Measure again on new answers. Raises `WeightError` if the same engine exceeds its limits again.

        Otherwise the new answers become the canary. If only another engine exceeds them, answers are sampled once more.
        """
        assert self._state is not None
        seen = f"over {self._state.canary.num_sampled:,} tokens of the policy's own answers {alarm}"
        suspects = {name for name, gap in gaps.items() if judge(gap, self.limits).is_alarm}
        while True:
            state, gaps = self._measure(version)
            verdict = self._adopt(state, gaps)
            accused = {name: gap for name, gap in gaps.items() if judge(gap, self.limits).is_alarm}
            confirmed = {name: gap for name, gap in accused.items() if name in suspects}
            if confirmed:
                worst = _worst(confirmed, self.limits)
                raise WeightError(
                    f"{worst.name} and the trainer disagree on version {version}: {seen} ({alarm.name}); confirmed on"
                    f" {state.canary.num_sampled:,} other tokens, where {worst}. {self._advice()}"
                )
            if not accused:
                break
            suspects |= set(accused)
        metrics = self.metrics()
        self._state = replace(self._state, metrics=metrics | {"canary_alarms": metrics["canary_alarms"] + 1})
        self._warn(
            f"canary: after the push of version {version} {alarm.name} seemed to disagree with the trainer: {seen}. New"
            f" answers do not confirm it ({verdict}), so the run continues, with them as its canary"
        )
        return gaps

    def _advice(self) -> str:
        if self._state is None or self._state.first is None:
            return (
                "Every weight that has a digest equals the trainer's, bit for bit, so look at what the engine computes"
                " from them: its config of the model (positions, epsilon of norms), its attention, its dtype,"
                " and weights that have no digest. Nothing was trained on what it samples. If the engine is right"
                " nevertheless, raise rollout.canary.rounding_factor"
            )
        return (
            "Earlier pushes agreed, so look at weights that have no digest or that the engine keeps in a form of its"
            " own. Nothing was trained on what it sampled with them. If the engine is right nevertheless, resume with a"
            " higher rollout.canary.rounding_factor or drift_factor"
        )

    def _adopt(self, state: CanaryState, gaps: Gaps) -> NamedVerdict:
        """Make these answers the canary, with the limits that belong to them, and return the verdict on their gaps."""
        self._unscored = None
        self._state = replace(state, first=None if self._state is None else self._state.first, metrics=self.metrics())
        return self._look_at(gaps)

    def _limits_of(self, state: CanaryState) -> tuple[GapLimits, ...]:
        settings, floor = self._settings, self._settings.floor
        factor = settings.rounding_factor
        absolute = limits_from(state.rounding, factor, floor, f"{factor:g} times {state.basis}")
        if state.first is None:
            return (absolute,)
        grown = growth(state.rounding, state.first.rounding, floor)
        factor = settings.drift_factor
        basis = f"{factor:g} times the gap after the first push"
        return absolute, limits_from(state.first.gap, factor, DRIFT_FLOORS[settings.dtype], basis, grown)

    def _measure(self, version: int) -> tuple[CanaryState, Gaps]:
        """Sample answers with the current weights, and have engines, inference ranks and the trainer score them."""
        with self._lease("rollout", "rollout"):
            canary = self._sample(version)
            answers = _named("engine", self._engines.call(EngineWorker.score_canary, canary))
        with self._lease("sync", "actor"):
            expected = self._actor.call(ActorWorker.score_canary, canary)[0]
            num_wrong = sum(not math.isfinite(each) for each in expected)
            if num_wrong:  # no engine can be compared with them
                raise WeightError(
                    f"the trainer's own log-probs of {num_wrong:,} of {len(expected):,} tokens are not finite on"
                    f" version {version}: look at the checkpoint's weights, or set train.dtype to bf16 if it is fp16"
                )
            if self._inference is not None:
                answers |= _named("inference rank", self._inference.call(InferenceWorker.score_canary, canary))
            rounding, basis = self._rounding(canary, expected)
        self._num_sets += 1  # Only now: a measurement that fails is done again with the same requests.
        return CanaryState(canary, rounding, basis, self._num_sets, self._settings.fp8), _gaps(expected, answers)

    def _sample(self, version: int) -> Canary:
        settings = self._settings
        requests: list[Request] = []
        num_tokens, number = 0, self._num_sets
        while num_tokens < settings.num_tokens:
            index = len(requests)
            # Sets alternate between the two halves of the prompts, and reuse prompts where there are too few.
            prompt, images = self._prompts[(number * len(self._prompts) // 2 + index) % len(self._prompts)]
            length = _answer_length(prompt, settings)
            num_tokens += length
            name = f"canary/{version}/{number}/{index}"
            seed = hashlib.blake2b(f"{settings.seed}/{name}".encode(), digest_size=8).digest()
            # Sampling ignores the end token: a few long answers reach far positions, and need fewer prompts.
            sampling = Sampling(length, settings.temperature, ignore_eos=True)
            requests.append(Request(name, prompt, sampling, int.from_bytes(seed, "little") >> 1, images))
        [answers] = self._engines.on(0).call(EngineWorker.answer, requests)
        return Canary(
            tuple(request.token_ids + tuple(answer) for request, answer in zip(requests, answers, strict=True)),
            tuple(len(request.token_ids) for request in requests),
            settings.temperature,
            tuple(request.images for request in requests) if any(request.images for request in requests) else (),
        )

    def _rounding(self, canary: Canary, expected: Sequence[float]) -> tuple[GapStatistics, str]:
        """Measure the gaps of log-probs that rounding alone makes on these tokens; return them and their source.

        It is the trainer's own rounding, plus that of logits in the engine's dtype (the trainer computes logits in
        float32, and engines may not), plus that of what engines have in FP8.
        """
        if self._settings.dtype == "fp32":
            return NO_ROUNDING, "the smallest gap that can be an error in fp32"
        longest = max(len(sequence) for sequence in canary.sequences)
        lacking = self._actor.call(ActorWorker.lacks_bytes_for_exact, longest)[0]
        if lacking:
            return self._assumed(f"{lacking / 2**30:.1f} GiB of device memory are lacking")
        settings = self._settings
        exact = self._actor.call(ActorWorker.score_exactly, canary, settings.is_merged, settings.fp8)[0]
        assert exact is not None, "the first rank has an answer"
        if isinstance(exact, str):
            return self._assumed(exact)
        each = zip(expected, exact.log_probs, exact.with_rounded_logits, strict=True)
        gaps = [mine - true + rounded - true for mine, true, rounded in each]
        if exact.with_fp8 is not None:
            of_fp8 = zip(exact.with_fp8, exact.log_probs, strict=True)
            gaps = [gap + coarse - true for gap, (coarse, true) in zip(gaps, of_fp8, strict=True)]
        if not all(map(math.isfinite, gaps)):
            return self._assumed("some of its log-probs are not finite")
        basis = "what rounding alone does, by a float32 forward of the same weights"
        if exact.with_fp8 is not None:
            basis = "what rounding to 16 bits and to FP8 alone does, by float32 forwards of the same weights"
        return gap_statistics(gaps), basis

    def _assumed(self, why: str) -> tuple[GapStatistics, str]:
        """Warn that rounding could not be measured, and return an assumption."""
        dtype = self._settings.dtype
        self._warn(
            f"canary: no float32 forward of the policy could be made ({why}), so engines are judged by what rounding"
            " usually does, not by what it does to this model"
        )
        if self._settings.fp8 != NO_FP8:
            return ASSUMED_FP8, "what rounding to FP8 usually does (it was not measured)"
        return ASSUMED_ROUNDING[dtype], f"what rounding to {dtype} usually does (it was not measured)"


@dataclass(frozen=True)
class NamedVerdict(Verdict):
    """Verdict on one engine or inference rank, with its name."""

    name: str

    def __str__(self) -> str:
        return f"{MEANINGS[self.statistic]} is {self.value:.3g}, {self.limit:.3g} allowed ({self.basis})"


def _worst(gaps: Gaps, limits: Sequence[GapLimits]) -> NamedVerdict:
    verdicts = {name: judge(gap, limits) for name, gap in gaps.items()}
    name = max(verdicts, key=lambda name: verdicts[name].use)
    worst = verdicts[name]
    return NamedVerdict(worst.statistic, worst.value, worst.limit, worst.basis, name)


def _gaps(expected: Sequence[float], answers: Mapping[str, Sequence[float]]) -> Gaps:
    return {
        name: gap_statistics([theirs - mine for theirs, mine in zip(answer, expected, strict=True)])
        for name, answer in answers.items()
    }


def _named(
    what: str, answers: Sequence[list[float]] | None, ranks: Sequence[int] | None = None
) -> dict[str, list[float]]:
    answers = answers or []
    ranks = range(len(answers)) if ranks is None else ranks
    return {f"{what} {rank}": answer for rank, answer in zip(ranks, answers, strict=False)}


def _answer_length(prompt: Sequence[int], settings: CanarySettings) -> int:
    """Return how many tokens to sample after a prompt. vLLM cannot score the last token of a full-length sequence."""
    return max(1, min(ANSWER_TOKENS, settings.max_length - 1 - len(prompt)))


def _choose_prompts(
    prompts: Sequence[Prompt], settings: CanarySettings
) -> list[tuple[tuple[int, ...], tuple[str, ...]]]:
    """Return the shortest of the first prompts, shortest first: enough for two sets of answers, if there are as many.

    Each is its tokens and its images. Prompts that leave no room for an answer are cut.
    """
    longest = max(1, settings.max_length - 2)
    different = {(prompt.token_ids[:longest], prompt.images) for prompt in prompts[:NUM_SEARCHED]}
    chosen: list[tuple[tuple[int, ...], tuple[str, ...]]] = []
    num_tokens = 0
    for token_ids, images in sorted(different, key=lambda prompt: (len(prompt[0]), prompt)):
        if num_tokens >= 2 * settings.num_tokens and len(chosen) >= 2 and len(chosen) % 2 == 0:
            break
        chosen.append((token_ids, images))
        num_tokens += _answer_length(token_ids, settings)
    return chosen
