"""Warnings about a running step: rewards without a learning signal, gradient spikes, and engines whose log-probs of
sampled tokens differ from the trainer's.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from hotseat.errors import RunError
from hotseat.loop.rl.collect import Collected
from hotseat.types import SampleKey

NUM_REMEMBERED = 20  # steps whose gradient norms a new one is compared with
NUM_NEEDED = 5  # norms before any is judged; also spikes in a row after which they count as normal
NUM_NAMED = 8  # samples that a warning names


@dataclass(eq=False)
class Alarms:
    """Checks the metrics of each step and warns.

    has_groups: the estimator compares samples with their siblings. spike_factor: a gradient norm above this many times
    the median of recent ones is a spike. hint: returns one at the cause of equal rewards, or nothing.
    """

    say: Callable[..., object]
    has_groups: bool
    spike_factor: float
    on_spike: Literal["warn", "stop"]
    hint: Callable[[], str] = str
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
        self._look_at_gap(step, metrics)
        self._look_for_spike(step, metrics, collected)

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
