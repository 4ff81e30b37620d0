"""Count of failed rewards, by cause, and the check that they are not too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hotseat.errors import RewardError
from hotseat.failed import Failed
from hotseat.words import cause_of

_SHOWN = 3


@dataclass
class RewardTally:
    """Counts the samples of a step, or of any number of steps, until `clear`.

    hint: returns a line on what may be the cause, for the error; "" if there is nothing to say.
    """

    max_failed_fraction: float
    hint: Callable[[], str] = str
    num_samples: int = 0
    _causes: Counter[str] = field(default_factory=Counter)
    _examples: dict[str, str] = field(default_factory=dict)  # the first reason of each cause

    @property
    def num_failed(self) -> int:
        return self._causes.total()

    @property
    def failed_fraction(self) -> float:
        return self.num_failed / self.num_samples if self.num_samples else 0.0

    def add(self, samples: Iterable[Any]) -> None:
        """Count samples, or their scores; those that are `Failed` count as failed."""
        for sample in samples:
            self.num_samples += 1
            if isinstance(sample, Failed):
                cause = cause_of(sample.reason)
                self._causes[cause] += 1
                self._examples.setdefault(cause, sample.reason)

    def check(self, where: str = "") -> None:
        """Raise `RewardError` if too many failed. where: the beginning of the message."""
        if self.failed_fraction <= self.max_failed_fraction:
            return
        shown = self._causes.most_common(_SHOWN)
        lines = [f"  {count}x {'such as ' * (count > 1)}{self._examples[cause]}" for cause, count in shown]
        more = len(self._causes) - len(shown)
        hint = self.hint()
        raise RewardError(
            f"{where}{self.num_failed} of {self.num_samples} samples have no reward ({self.failed_fraction:.1%}), and"
            f" reward.max_failed_fraction is {self.max_failed_fraction:.1%}:\n"
            + "\n".join(lines)
            + (f"\n  and {more} more cause{'s' * (more > 1)}" if more else "")
            + (f"\n  {hint}" if hint else "")
        )

    def clear(self) -> None:
        self.num_samples = 0
        self._causes.clear()
        self._examples.clear()
