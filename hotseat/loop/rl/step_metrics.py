"""Puts the metrics of a step together."""

from __future__ import annotations

from dataclasses import dataclass

from hotseat.loop.rl.canary import CanaryGuard
from hotseat.loop.rl.collect import Collected, rollout_metrics
from hotseat.loop.rl.components import Components
from hotseat.loop.rl.meter import PhaseMeter
from hotseat.loop.rl.phase_settings import PhaseSettings
from hotseat.loop.rl.push import PushReport
from hotseat.loop.rl.recovery import Recovery
from hotseat.loop.rl.report_metrics import critic_metrics, engine_gap_statistics, policy_metrics, push_metrics
from hotseat.loop.rl.state import RlState
from hotseat.loop.rl.update import Updates
from hotseat.loop.settings.learning_settings import is_filtered


@dataclass(frozen=True)
class StepMetrics:
    """Collects the metrics of a step from the objects that measured them."""

    meter: PhaseMeter
    recovery: Recovery
    guard: CanaryGuard
    phase_settings: PhaseSettings
    state: RlState
    has_reference: bool
    components: Components | None = None

    def of_step(self, batch: Collected, updates: Updates, pushed: PushReport) -> dict[str, float]:
        measured = self.meter.metrics()
        metrics = rollout_metrics(batch)
        metrics |= policy_metrics(updates.actor) | critic_metrics(updates.critic) | push_metrics(pushed)
        metrics |= {
            "engine_restarts": float(self.recovery.num_restarts),
            "host_restarts": float(self.recovery.num_host_restarts),
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
        if config.overlap.staleness > 0 or is_filtered(config):
            return False
        drops = config.train.lora.rank > 0 and config.train.lora.dropout > 0
        return not drops or self.phase_settings.policy.needs_old_log_probs
