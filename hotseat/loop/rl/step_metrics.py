"""Metrics of a step, and warnings: no learning signal, gradient spikes, engines that disagree with the trainer."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hotseat.algorithms.agreement import GapStatistics
from hotseat.algorithms.quantiles import quantile
from hotseat.errors import RunError
from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.collect import Collected, rollout_metrics
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phases import Updates, mean
from hotseat.loop.rl.recovery import ENGINE, HOST, Recovery
from hotseat.loop.rl.state import PhaseSettings, RlState
from hotseat.loop.rl.sync import PushReport
from hotseat.loop.settings.training_settings import is_filtered
from hotseat.loop.workers.turn_times import turn_metrics
from hotseat.train.backend import UpdateReport
from hotseat.train.update_facts import add_up
from hotseat.types import SampleKey


@dataclass(frozen=True)
class StepMetrics:
    """Collects the metrics of a step from the objects that measured them."""

    meter: PhaseMeter
    recovery: Recovery
    guard: CanaryGuard
    phase_settings: PhaseSettings
    state: RlState
    has_reference: bool
    has_agent: bool
    components: Components | None = None
    num_group_restarts: Callable[[], int] = lambda: 0
    is_replay: bool = False

    def of_step(self, batch: Collected, updates: Updates, pushed: PushReport) -> dict[str, float]:
        measured = self.meter.metrics()
        metrics = rollout_metrics(batch)
        if self.has_agent:
            metrics |= turn_metrics([facts.turn_times for facts in batch.groups])
        metrics |= policy_metrics(updates.actor) | critic_metrics(updates.critic) | push_metrics(pushed)
        metrics |= {
            "engine_restarts": float(self.recovery.restarts[ENGINE]),
            "host_restarts": float(self.recovery.restarts[HOST]),
            "group_restarts": float(self.num_group_restarts()),
            "step_s": measured.pop("step_s"),
            "time/driver_cpu": measured.pop("time/driver_cpu"),
        }
        metrics["tokens_per_s"] = metrics["sampled_tokens"] / metrics["step_s"]
        # They are of this step's push, or of the one before where engines score only once their cache is onloaded.
        metrics |= self.guard.metrics()
        gaps = engine_gap_statistics(updates.actor)
        use = None if gaps is None or not self._are_gaps_comparable() else self.guard.use(gaps)
        if use is not None:
            metrics["engine_gap_use"] = use
        if self.has_reference:
            metrics["kl_coefficient"] = self.state.kl.coefficient
        if self.components is not None:
            metrics |= self.components.metrics()
        return metrics | measured

    def _are_gaps_comparable(self) -> bool:
        """Tell whether gaps of a step compare with the canary's.

        They have to be of the weights that are trained, of the whole distribution, and without dropout.
        """
        config = self.phase_settings.config
        if self.is_replay or config.overlap.staleness > 0 or is_filtered(config):
            return False
        drops = config.train.lora.rank > 0 and config.train.lora.dropout > 0
        return not drops or self.phase_settings.policy.needs_old_log_probs


_BY_LAG = ("engine_gap_lags", "tokens_lags")
_PER_TOKEN = ("clipped", "policy_kl", "engine_gap", "corrected", "rejected", "kl", "divergence", "entropy")


def policy_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the metrics of the actor's optimizer steps; none where it made none."""
    if not reports:
        return {}
    metrics = _update_metrics(reports, "")
    # The means below are over these tokens: samples whose loss has no gradient are left out.
    metrics["learned_tokens"] = float(sum(report.num_sampled for report in reports))
    means = {name: mean(reports, name) for name in _PER_TOKEN}
    metrics |= {name: value for name, value in means.items() if value is not None}
    return metrics | _gap_spread(reports) | _gaps_by_lag(reports)


def critic_metrics(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the metrics of the critic's optimizer steps; none where it made none.

    `value` and `explained_variance` are those of the critic before it learned from the rollout.
    """
    if not reports:
        return {}
    metrics = _update_metrics(reports, "critic_")
    metrics["value_loss"] = metrics.pop("critic_loss")
    names = ("value", "value_clipped", "return", "return_squares", "value_error", "value_error_squares")
    means = {name: mean(reports, name) or 0.0 for name in names}
    metrics |= {name: means[name] for name in ("value", "value_clipped", "return")}
    variance = means["return_squares"] - means["return"] ** 2
    if variance > 0:
        unexplained = means["value_error_squares"] - means["value_error"] ** 2
        metrics["explained_variance"] = 1 - unexplained / variance
    return metrics


def _update_metrics(reports: Sequence[UpdateReport], prefix: str) -> dict[str, float]:
    metrics = {
        "loss": sum(report.loss for report in reports) / len(reports),
        "grad_norm": sum(report.grad_norm for report in reports) / len(reports),
        "learning_rate": reports[-1].learning_rate,
        "skipped_updates": float(reports[-1].num_skipped),
    }
    if "aux_loss" in reports[0].metrics:
        metrics["aux_loss"] = sum(report.metrics["aux_loss"] for report in reports) / len(reports)
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def push_metrics(pushed: PushReport) -> dict[str, float]:
    """Return version, size and times of a push. A replay, which has no engines, moves nothing."""
    if pushed.num_buckets == 0:
        return {"version": float(pushed.version)}
    return {
        "version": float(pushed.version),
        "sync/gb": pushed.num_bytes / 1e9,
        "sync/transfer_ms": pushed.transfer_s * 1e3,
        "sync/proof_ms": pushed.proof_s * 1e3,
        "sync/gb_per_s": pushed.num_bytes / 1e9 / pushed.transfer_s,
    }


def engine_gap_statistics(reports: Sequence[UpdateReport]) -> GapStatistics | None:
    """Compare engine and trainer log-probs on tokens of the first update, when both have the same weights.

    None where nothing was learned. Median and 90th percentile are right to 15%.
    """
    if not reports or "engine_gap_counts" not in reports[0].metrics:
        return None
    counts = reports[0].metrics["engine_gap_counts"]
    mean_gap = reports[0].metrics["engine_gap_mean"] / max(1, reports[0].num_sampled)
    return GapStatistics(quantile(counts, 0.5), quantile(counts, 0.9), mean_gap)


def _gap_spread(reports: Sequence[UpdateReport]) -> dict[str, float]:
    gaps = engine_gap_statistics(reports)
    if gaps is None:
        return {}
    first = reports[0].metrics
    return {
        "engine_gap_median": gaps.median,
        "engine_gap_p90": gaps.p90,
        "engine_gap_mean": gaps.mean,
        "engine_gap_p99": quantile(first["engine_gap_counts"], 0.99),
        "engine_gap_max": first["engine_gap_max"],
    }


def _gaps_by_lag(reports: Sequence[UpdateReport]) -> dict[str, float]:
    """Return the mean engine gap of tokens of each lag, and their share; none where lags were not measured.

    That of lag 0 is the mismatch between engine and trainer, that of the others is staleness.
    """
    totals = add_up([{name: report.metrics[name] for name in _BY_LAG if name in report.metrics} for report in reports])
    gaps, counts = (totals.get(name, []) for name in _BY_LAG)
    metrics: dict[str, float] = {}
    for lag, (gap, count) in enumerate(zip(gaps, counts, strict=True)):
        if count:
            metrics |= {f"engine_gap_lag_{lag}": gap / count, f"tokens_lag_{lag}": count / sum(counts)}
    return metrics


# --- warnings ---------------------------------------------------------------------------------------------------------

NUM_REMEMBERED = 20  # steps whose gradient norms a new one is compared with
NUM_NEEDED = 5  # norms before any is judged; also spikes in a row after which they count as normal
NUM_NAMED = 8  # samples that a warning names


@dataclass(eq=False)
class Alarms:
    """Checks the metrics of each step and warns.

    has_groups: the estimator compares the totals of samples with their siblings'. parts: the rewards that it compares
    apart, by name. spike_factor: a gradient norm above this many times
    the median of recent ones is a spike. hint: returns one at the cause of equal rewards, or nothing.
    """

    say: Callable[..., object]
    has_groups: bool
    spike_factor: float
    on_spike: Literal["warn", "stop"]
    hint: Callable[[], str] = str
    parts: Iterable[str] = ()
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED), init=False)
    _num_spikes: int = field(default=0, init=False)  # in a row
    _was_alike: bool = field(default=False, init=False)
    _was_apart: bool = field(default=False, init=False)

    def look(self, step: int, metrics: Mapping[str, float], collected: Collected) -> None:
        """Warn of what is wrong with a step. Raises `RunError` at a gradient spike if `train.on_spike` is stop."""
        is_alike = self.has_groups and metrics["groups_alike"] == 1.0
        if is_alike and not self._was_alike:
            hint = self.hint()
            self.say(
                f"step {step}: in every group all rewards are equal, so nothing is learned; if that stays so, look at"
                f" the reward function and at the difficulty of the prompts{'; ' * bool(hint)}{hint}",
                kind="warning",
            )
        self._was_alike = is_alike
        self._look_for_parts(step, collected)
        self._look_at_gap(step, metrics)
        self._look_for_spike(step, metrics, collected)

    def _look_for_parts(self, step: int, collected: Collected) -> None:
        """Warn in the first step of rewards that no sample has."""
        seen = {name for facts in collected.groups for extra in facts.extra for name in extra}
        unseen, self.parts = [name for name in self.parts if name not in seen], ()
        if unseen:
            self.say(
                f"step {step}: no sample has the reward {', '.join(unseen)}, which is to be compared apart and adds"
                f" nothing; they have {', '.join(sorted(seen))}. reward.parts names what is compared",
                kind="warning",
            )

    def _look_at_gap(self, step: int, metrics: Mapping[str, float]) -> None:
        is_apart = not metrics.get("engine_gap_use", 0.0) <= 1.0
        if is_apart and not self._was_apart:
            self.say(
                f"step {step}: engine and trainer disagree on the tokens of this rollout by more than rounding: the gap"
                f" of their log-probs has the median {metrics['engine_gap_median']:.3g}, the 90th percentile"
                f" {metrics['engine_gap_p90']:.3g} and the mean {metrics['engine_gap_mean']:+.3g},"
                f" {metrics['engine_gap_use']:.1f} times what the canary's limits allow, while the canary itself"
                " agrees. algorithm.correction can weigh such tokens",
                kind="warning",
            )
        self._was_apart = is_apart

    def _look_for_spike(self, step: int, metrics: Mapping[str, float], collected: Collected) -> None:
        norm = metrics.get("grad_norm")
        if norm is None:
            return  # only the critic learned
        usual = statistics.median(self._norms) if len(self._norms) >= NUM_NEEDED else None
        if usual is not None and usual > 0 and norm > self.spike_factor * usual:
            text = (
                f"step {step}: the gradient's norm is {norm:.3g}, {norm / usual:.0f} times the usual {usual:.3g}, and"
                f" the loss {metrics['loss']:.3g}; the rewards of these samples differ most from their siblings':"
                f" {', '.join(_outliers(collected))}"
            )
            if self.on_spike == "stop":
                raise RunError(f"{text}. The update was made; with train.on_spike=warn the run continues")
            self.say(text, kind="warning")
            self._num_spikes += 1
            if self._num_spikes < NUM_NEEDED:
                return  # a spike must not raise the median that later norms are compared with
            self._norms.clear()  # so many in a row are the new normal
        self._num_spikes = 0
        if norm > 0:
            self._norms.append(norm)


def _outliers(collected: Collected) -> list[str]:
    distances = [
        (-abs(reward - statistics.fmean(facts.rewards)), str(SampleKey(facts.epoch, facts.prompt, sample)))
        for facts in collected.groups
        for sample, reward in zip(facts.samples, facts.rewards, strict=True)
    ]
    return [name for _, name in sorted(distances)[:NUM_NAMED]]
